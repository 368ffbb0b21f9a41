"""Run what needs CUDA devices and write one report: tests, backends side by side, profiles of steps with their reading, speed.

    nox -s gpu [-- --report gpu-report.md]

Without a device it lists what it would run, and that is all.
"""

import argparse
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from attrs import frozen

ROOT: Final = Path(__file__).parents[2]
BACKENDS: Final = ("fsdp", "deepspeed", "megatron")
PATIENCE: Final = 3 * 3600
"""Seconds that a part may take."""


@frozen
class Part:
    """A program of the report, and what its section is called."""

    title: str
    command: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The command as a user types it."""
        return shlex.join(["python", *self.command])


def list_marked_files() -> list[str]:
    """Return the test files with tests that need a device."""
    files = sorted(path for folder in ("tests", "plugins", "contrib") for path in (ROOT / folder).rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]


def list_parts(ranks: int) -> list[Part]:
    """Return every part in its order, for so many devices."""
    several = sorted({1, max(1, ranks)})
    return [
        Part("Tests", ("-m", "pytest", "-m", "gpu", "-rsfE", "-q", *list_marked_files())),
        *(
            Part(
                f"Backends side by side, {count} rank{'s' * (count > 1)}",
                (_benchmark("backends_side_by_side"), "--ranks", str(count)),
            )
            for count in several
        ),
        *(
            Part(
                f"A step of {backend}, {count} rank{'s' * (count > 1)}", (_running("step_profile"), backend, "--ranks", str(count))
            )
            for backend in BACKENDS
            for count in several
        ),
        Part("Speed of training", (_benchmark("steps_on_cuda"),)),
    ]


def list_tests() -> list[str]:
    """Return the names of the tests that need a device, as pytest collects them."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", *list_marked_files()]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE)
    return [line for line in found.stdout.splitlines() if "::" in line]


def run_part(part: Part) -> tuple[bool, str]:
    """Run a part; return whether it succeeded, and its section."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *part.command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        good, printed = done.returncode == 0, done.stdout if done.returncode == 0 else f"{done.stdout}\n{done.stderr[-8000:]}"
    except subprocess.TimeoutExpired:
        good, printed = False, f"no end after {PATIENCE} s"
    seconds = time.monotonic() - begin
    word = "done" if good else "FAILED"
    return good, f"## {part.title}\n\n`{part.shown}`: {word} in {seconds:.0f} s\n\n```text\n{printed.strip()}\n```\n"


def describe_machine() -> str:
    """Name the devices and the versions that a report is about."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}, torch {torch.__version__}, Python {platform.python_version()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 where a part failed; the report has the others all the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--report", type=Path, default=ROOT / "gpu-report.md", help="the file that is written")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        tests = list_tests()
        print(f"torch sees no CUDA device here. On a machine with one, this would write {options.report.name} of")
        for part in list_parts(1):
            print(f"- {part.title}: {part.shown if part.title != 'Tests' else f'{len(tests)} tests'}")
        print("\n".join(f"    {name}" for name in tests))
        return 0
    sections, failed = [f"# The first GPU\n\n{describe_machine()}\n"], []
    for part in list_parts(torch.cuda.device_count()):
        print(f"{part.title} ...", flush=True)
        good, section = run_part(part)
        sections.append(section)
        failed += [] if good else [part.title]
        # after each part, so that a machine that is taken away leaves what was found
        options.report.write_text("\n".join(sections), encoding="utf-8")
    print(f"{options.report}: {len(sections) - 1} parts, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _benchmark(name: str) -> str:
    return f"tests/benchmarks/{name}.py"


def _running(name: str) -> str:
    return f"tests/running/{name}.py"


if __name__ == "__main__":
    sys.exit(main())
