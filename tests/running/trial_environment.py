"""A virtual environment whose packages are exchanged between runs of the tests: that of `nox -s oldest` or `nox -s newest`."""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resolver import OF_ACCELERATORS, Pins

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"


def choose_torch(words: Sequence[str], version: str, machine: str) -> list[str]:
    """Return pip's words for another version of the torch that `words` install (SKYRL_ENGINE_TORCH), of the same build.

    On Linux x86_64 the ordinary index has builds for CUDA, of gigabytes. Where `words` name no index, PyTorch's own is asked there, for CPUs.
    """
    first, *options = words
    local = re.search(r"\+\w+$", first)
    if local or options or machine != "Linux x86_64":
        return [f"torch=={version}{local[0] if local else ''}", *options]
    return [f"torch=={version}+cpu", "--extra-index-url", CPU_BUILDS]


@dataclass(frozen=True)
class TrialEnvironment:
    """`folder` holds the environment, `root` is this repository, `torch` are pip's words for the machine's torch."""

    folder: Path
    root: Path
    uv: str
    torch: Sequence[str]

    @property
    def python(self) -> str:
        return str(self.folder / ("Scripts" if os.name == "nt" else "bin") / "python")

    def make(self) -> None:
        """Make the environment, unless it is there and of this Python."""
        version = self.folder / "made-by.txt"
        if not version.exists() or version.read_text() != sys.version:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.folder)], check=True)
            version.write_text(sys.version)

    @property
    def own_torch(self) -> str:
        """The version of the machine's torch, without its build."""
        found = re.fullmatch(r"torch==([\w.]+)(\+\w+)?", self.torch[0])
        if found is None:
            sys.exit(f"SKYRL_ENGINE_TORCH names no version: {self.torch[0]}. Write it as torch==2.13.0.")
        return found[1]

    def install_torch(self, version: str) -> bool:
        """Install a version of torch, and say whether there is a build of it for this machine; there must be one of its own torch."""
        own = version == self.own_torch
        words = list(self.torch) if own else choose_torch(self.torch, version, f"{platform.system()} {platform.machine()}")
        if self._read_state("torch") == {"words": words}:
            return True
        command = [self.python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *words]
        if subprocess.run(command, capture_output=not own, check=own).returncode:
            return False
        self._write_state("torch", {"words": words})
        return True

    def hold(self, pins: Pins) -> None:
        """Install exactly these versions, and remove what an earlier call installed and this one does not name."""
        self.install_torch(pins["torch"])
        wanted = {name: version for name, version in pins.items() if name != "torch" and not name.startswith(OF_ACCELERATORS)}
        there = self._read_state("pins")
        changed = [f"{name}=={version}" for name, version in sorted(wanted.items()) if there.get(name) != version]
        left = sorted(there.keys() - wanted.keys())
        self._write_state("pins", {})  # an interrupted exchange must not look like a finished one
        if left:
            self._call_uv("uninstall", *left)
        if changed:
            self._call_uv("install", "--no-deps", *changed)
        self._write_state("pins", wanted)

    def install_projects(self) -> None:
        """Install this repository's distributions, editable, if a pyproject.toml or a compiled part has changed."""
        projects = [self.root, *sorted(file.parent for file in self.root.glob("[!.]*/*/pyproject.toml"))]
        files = [
            file
            for project in projects
            for file in (project / "pyproject.toml", *project.glob("hatch_build.py"), *project.glob("native/*"))
        ]
        state = {"sources": hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()}
        if self._read_state("projects") != state:
            ours = [word for project in projects for word in ("--editable", str(project))]
            self._call_uv("install", "--no-deps", "--no-build-isolation", *ours)
            self._write_state("projects", state)

    def run_tests(self, arguments: Sequence[str], output: Path | None = None) -> int:
        """Run pytest in the repository and return its exit status; what it says goes to the terminal, or to a file."""
        command = [self.python, "-m", "pytest", "-o", f"cache_dir={self.folder / 'pytest'}", *arguments]
        if output is None:
            return subprocess.run(command, cwd=self.root, check=False).returncode
        with output.open("w", encoding="utf-8") as file:
            return subprocess.run(command, cwd=self.root, stdout=file, stderr=subprocess.STDOUT, check=False).returncode

    def list_failed(self) -> list[str]:
        """Return the tests that failed last, and the files that could not be collected, as pytest's `--last-failed` would run them."""
        kept = self.folder / "pytest" / "v" / "cache" / "lastfailed"
        return sorted(json.loads(kept.read_text(encoding="utf-8"))) if kept.exists() else []

    def forget_failed(self) -> None:
        """Forget what earlier runs said, so that `list_failed` is about the next one."""
        (self.folder / "pytest" / "v" / "cache" / "lastfailed").unlink(missing_ok=True)

    def _call_uv(self, verb: str, *arguments: str) -> None:
        subprocess.run([self.uv, "pip", verb, "--no-config", "--quiet", "--python", self.python, *arguments], check=True)

    def _read_state(self, name: str) -> dict[str, object]:
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def _write_state(self, name: str, state: Mapping[str, object]) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(state), encoding="utf-8")
