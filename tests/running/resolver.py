"""uv, which resolves requirements: for every platform at once, to the lowest versions, or with some packages changed and others as locked."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

UV = "uv==0.13.9"
OF_ACCELERATORS = ("nvidia-", "cuda-", "triton")
"""Beginnings of the names that only torch's builds for an accelerator require. The lock is for every build; torch brings these itself."""
Pins = dict[str, str]
"""Versions by normalized name."""


class NoVersionsError(Exception):
    """uv found no versions that fit together, or did not reach the index; the text is uv's."""


def find_uv(root: Path) -> str:
    """Install uv under .cache, once; return its program. It needs no .venv, since it writes what .venv is made of."""
    scripts = root / ".cache" / UV / ("Scripts" if os.name == "nt" else "bin")
    if not (scripts / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", str(scripts.parent)], check=True)
        install = [str(scripts / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV]
        if subprocess.run(install, check=False).returncode:
            sys.exit(
                f"{UV} was not installed. If the package index cannot be reached, look at the network; then run the same command again."
            )
    return str(scripts / "uv")


def read_pins(text: str) -> Pins:
    """Return the versions that a lock holds for this Python and machine."""
    entries = (Requirement(line) for line in re.findall(r"^([a-zA-Z0-9][^\s\\]*==[^\\\n]*?)[ \\]*$", text, re.MULTILINE))
    kept = (entry for entry in entries if entry.marker is None or entry.marker.evaluate({"extra": ""}))
    return {canonicalize_name(entry.name): next(iter(entry.specifier)).version for entry in kept}


@dataclass(frozen=True)
class Resolver:
    """`uv pip compile` for this Python, or with `--universal` for all."""

    uv: str
    root: Path

    def compile(self, *options: str, requirements: str | None = None) -> str:
        """Return what `uv pip compile` prints, of a file among `options` or of `requirements`, a line each.

        Raises:
            NoVersionsError: no versions fit together, or the index does not answer.
        """
        command = [self.uv, "pip", "compile", "--no-config", "--quiet", *options, *([] if requirements is None else ["-"])]
        done = subprocess.run(command, cwd=self.root, input=requirements, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoVersionsError(done.stderr)
        return done.stdout

    def resolve(self, requirements: Iterable[str], prefer: Mapping[str, str], *options: str) -> tuple[Pins, str]:
        """Return versions that fit together, and uv's text with the reasons. `prefer` holds versions to keep where they fit."""
        output = self.root / ".cache" / "resolved.txt"
        output.write_text("".join(f"{name}=={version}\n" for name, version in sorted(prefer.items())), encoding="utf-8")
        mine = ("--no-header", "--python", sys.executable, "--output-file", str(output))
        self.compile(*mine, *options, requirements="\n".join(requirements) + "\n")
        resolved = output.read_text(encoding="utf-8")
        return read_pins(resolved), resolved

    def explain(self, error: NoVersionsError) -> str:
        """Return uv's reason with a remedy, or one plain sentence where the index does not answer."""
        try:
            self.compile("--no-cache", requirements="packaging\n")
        except NoVersionsError:
            return "The package index cannot be reached, so no versions are known. Look at the network, then run the same command again."
        return (
            f"{error}\nThese requirements do not fit together. Change the range that uv names, in the pyproject.toml that names it."
        )
