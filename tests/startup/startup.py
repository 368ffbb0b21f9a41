"""CPU seconds of `skyrl-engine --help` and `plugins list --json`, compiled once, and what they import. Fails above the budget.

Run with `nox -s startup`.
"""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

BUDGET_SECONDS = 0.25
REPETITIONS = 5
COMMANDS = (["--help"], ["plugins", "list", "--json"])
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""As for an installed engine, whose modules were compiled by pip."""

HEAVY = {"torch", "ray", "transformers", "datasets", "pyarrow", "numpy", "cattrs", "rich"}


def main() -> int:
    program = str(Path(sys.executable).with_name("skyrl-engine"))
    forbidden = HEAVY | plugin_packages()
    ok = True
    for arguments in COMMANDS:
        command = [program, *arguments]
        modules = list_imported(command)
        heavy = sorted(modules & forbidden)
        seconds = min(cpu_seconds(command) for _ in range(REPETITIONS))
        ok = ok and not heavy and seconds <= BUDGET_SECONDS
        print(
            f"skyrl-engine {' '.join(arguments)}: {seconds:.3f} s CPU (least of {REPETITIONS}, budget {BUDGET_SECONDS} s)", end=", "
        )
        print(f"imports {', '.join(heavy)}" if heavy else "imports no plugin and nothing heavy")
    return 0 if ok else 1


def plugin_packages() -> set[str]:
    """Top-level packages of every installed plugin but the engine's own."""
    found = entry_points()
    values = [point.value for group in found.groups if group.startswith("skyrl_engine.") for point in found.select(group=group)]
    return {value.partition(":")[0].partition(".")[0] for value in values} - {"skyrl_engine"}


def list_imported(command: list[str]) -> set[str]:
    """Top-level packages that the command's process imports, as the interpreter itself reports them."""
    ran = subprocess.run(command, env={**ENVIRONMENT, "PYTHONPROFILEIMPORTTIME": "1"}, capture_output=True, text=True, check=False)
    timings = [line for line in ran.stderr.splitlines() if line.startswith("import time:")]
    if ran.returncode:
        errors = "\n".join(line for line in ran.stderr.splitlines() if line not in timings)
        raise SystemExit(f"{errors}\n{' '.join(command)} ended with exit code {ran.returncode}")
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in timings}


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
