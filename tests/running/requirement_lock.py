"""Write requirements-lock.txt, and the page that says where it installs: `nox -s lock`. With `--check`, compare the page with the index alone.

    python tests/running/requirement_lock.py torch==2.13.0 3.11,3.12,3.13,3.14 [--check | options of `uv pip compile`]

It runs in any Python that has packaging, nox's for instance: what .venv is made of must be written without it.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from locked_platforms import list_unknown_files, read_files, write_page
from resolver import OF_ACCELERATORS, NoVersionsError, Resolver, find_uv

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements-lock.txt"
PAGE = ROOT / "docs" / "reference" / "platforms.md"


def write_lock(resolver: Resolver, options: Iterable[str]) -> None:
    """Resolve requirements-dev.txt for every platform, without torch, what torch's builds bring, and this project's distributions."""
    universal = ("--universal", "--python-version", "3.11")
    of_torch = resolver.compile(*universal, "--no-annotate", requirements="torch\n")
    accelerators = [line.partition("==")[0] for line in of_torch.splitlines() if line.startswith(OF_ACCELERATORS)]
    projects = [ROOT / "pyproject.toml", *sorted(ROOT.glob("[!.]*/*/pyproject.toml"))]
    own = [re.findall(r'^name = "(.+)"', project.read_text(encoding="utf-8"), re.MULTILINE)[0] for project in projects]
    left_out = (word for name in ("torch", *accelerators, *own) for word in ("--no-emit-package", name))
    written = ("--generate-hashes", "--no-emit-index-url", "--custom-compile-command", "nox -s lock", "--output-file", LOCK.name)
    resolver.compile(*universal, *written, *left_out, *options, "requirements-dev.txt")


def main() -> None:
    torch, pythons, *options = sys.argv[1:]
    resolver = Resolver(find_uv(ROOT), ROOT)
    try:
        if options != ["--check"]:
            write_lock(resolver, options)
        lock = LOCK.read_text(encoding="utf-8")
        packages = read_files(resolver, f"{lock}\n{torch}\n")
    except NoVersionsError as error:
        sys.exit(resolver.explain(error))
    page = write_page(packages, pythons.split(","))
    unknown = list_unknown_files((package for package in packages if package["name"] != "torch"), lock)
    for name in unknown:
        print(f"Not in the lock, so pip refuses it: {name}")
    if options != ["--check"]:
        PAGE.write_text(page, encoding="utf-8")
    elif page != PAGE.read_text(encoding="utf-8"):
        sys.exit(f"{PAGE.relative_to(ROOT)} is not what the package index says now. Run `nox -s lock`.")


if __name__ == "__main__":
    main()
