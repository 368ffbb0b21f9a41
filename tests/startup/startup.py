"""CPU seconds of `skyrl-engine --help` and `plugins list --json`, compiled once, and what they import. Fails above the budget.

Also what fine-tuning on one rank imports; `nox -s bench` measures its start. Run with `nox -s startup`.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

BUDGET_SECONDS = 0.25
REPETITIONS = 5
COMMANDS = (["--help"], ["plugins", "list", "--json"])
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""As for an installed engine, whose modules were compiled by pip."""

HEAVY = {"torch", "ray", "transformers", "datasets", "pyarrow", "numpy", "cattrs", "rich"}

UNUSED_BY_A_RUN = {"pandas", "ray", "datasets", "peft", "torch.nn.attention.varlen"}
"""A run of one rank in this process, on the CPU, over a file and without adapters, has no use for them; each costs tenths of a second."""


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
    with tempfile.TemporaryDirectory() as folder:
        unused = sorted(list_imported(write_run(program, Path(folder))) & UNUSED_BY_A_RUN)
    print(f"skyrl-engine sft imports {', '.join(unused) or 'nothing that it does not use'}")
    return 0 if ok and not unused else 1


def write_run(program: str, folder: Path) -> list[str]:
    """Write a tiny model and two samples; return the command that trains on them for a step."""
    from skyrl_engine.modeling.tiny import write_model, write_tokenizer

    rows = [{"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": "1 + 2 =", "completion": " 3"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_model(folder / "model", tokenizer=write_tokenizer(folder / "model", [text for row in rows for text in row.values()]))
    files = ["--model", str(folder / "model"), "--data", str(folder / "train.jsonl"), "--output", str(folder / "run")]
    return [program, "sft", *files, "--steps", "1", "--quiet", "run.device=cpu", f"data.cache={folder / 'cache'}"]


def plugin_packages() -> set[str]:
    """Top-level packages of every installed plugin but the engine's own."""
    found = entry_points()
    values = [point.value for group in found.groups if group.startswith("skyrl_engine.") for point in found.select(group=group)]
    return {value.partition(":")[0].partition(".")[0] for value in values} - {"skyrl_engine"}


def list_imported(command: list[str]) -> set[str]:
    """Modules and their top-level packages that the command's process imports, as the interpreter itself reports them."""
    ran = subprocess.run(command, env={**ENVIRONMENT, "PYTHONPROFILEIMPORTTIME": "1"}, capture_output=True, text=True, check=False)
    timings = [line for line in ran.stderr.splitlines() if line.startswith("import time:")]
    if ran.returncode:
        errors = "\n".join(line for line in ran.stderr.splitlines() if line not in timings)
        raise SystemExit(f"{errors}\n{' '.join(command)} ended with exit code {ran.returncode}")
    modules = {line.rpartition("|")[2].strip() for line in timings}
    return modules | {module.partition(".")[0] for module in modules}


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
