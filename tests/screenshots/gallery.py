"""The gallery's five runs and their reports: `python tests/screenshots/gallery.py [--runs FOLDER]`.

Runs the commands of docs/gallery.md in FOLDER, in their order, but those whose --output is there, and writes docs/gallery.
"""

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE, REPORTS = ROOT / "docs" / "gallery.md", ROOT / "docs" / "gallery"
RUNS = ROOT / "runs" / "gallery"
WORLD = ROOT / "docs" / "examples" / "open_the_box.py"
PROGRAM = Path(sysconfig.get_path("scripts")) / "skyrl-engine"
REPORTED = {
    "sft": "first/run",
    "rl": "first/rl",
    "preference": "first/dpo",
    "distillation": "first/distilled",
    "tools": "boxes/rl",
}
"""Run by the name of its report."""

LARGEST = 300_000
"""Bytes of a report, without the library that draws."""


def list_commands() -> list[list[str]]:
    """Return the commands of the page that write a folder, as words; all have an --output."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return [words for words in lines if words[:2] != ["skyrl-engine", "report"]]


def make_runs(folder: Path) -> None:
    """Run the commands of the page, but those whose directory is there."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(WORLD, folder)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for words in list_commands():
        if not (folder / words[words.index("--output") + 1]).exists():
            print("$", shlex.join(words), flush=True)
            program = sys.executable if words[0] == "python" else str(PROGRAM)
            subprocess.run([program, *words[1:]], cwd=folder, check=True, env=environment)


def write_reports(folder: Path) -> None:
    """Write docs/gallery, without the places of whoever runs this. A report that is too large ends the program."""
    REPORTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as aside:
        for name, run in REPORTED.items():
            page = Path(aside) / f"{name}.html"
            command = [str(PROGRAM), "report", run, "--output", str(page), "--script", str(page.with_name(library_name()))]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            text = (
                page.read_text(encoding="utf-8").replace(f"{folder.resolve()}/", "").replace(platform.platform(), platform.system())
            )
            target = REPORTS / page.name
            target.write_text(text, encoding="utf-8")
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size:,} bytes")
            if target.stat().st_size > LARGEST:
                sys.exit(f"{target.relative_to(ROOT)} has more than {LARGEST:,} bytes")


def library_name() -> str:
    """Return the name of the file, beside the reports, that holds the library which draws: with its version, as reports fit one alone."""
    import bokeh

    return f"bokeh-{bokeh.__version__}.min.js"


def write_library() -> None:
    """Put the library beside the reports: out of the installed wheel, since the repository does not hold it."""
    import bokeh

    source = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
    REPORTS.joinpath(library_name()).write_bytes(source.read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=RUNS, help="Folder of the runs.")
    parser.add_argument("--library", action="store_true", help="Only put the library that draws beside the reports.")
    arguments = parser.parse_args()
    if not arguments.library:
        make_runs(arguments.runs.absolute())
        write_reports(arguments.runs.absolute())
    write_library()
    return 0


if __name__ == "__main__":
    sys.exit(main())
