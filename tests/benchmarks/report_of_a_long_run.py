"""Bars of the report of a run of 100,000 steps and 1,000,000 attempts: CPU seconds, and bytes of the page.

A real run of one step of reinforcement is lengthened: its records of metrics are repeated under further steps, each number moved a little, and
its journal is written anew, ten attempts a step, as `rollout_listing.py` writes one. Run with `nox -s bench`;
`python tests/benchmarks/report_of_a_long_run.py STEPS` takes fewer steps.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from first_rollout import cpu_seconds
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine

from skyrl_engine.cli.demo.recipe import Exchange
from skyrl_engine.cli.demo.tiny import make_model

STEPS, MEMBERS = 100_000, 10
CPU_SECONDS, MEGABYTES = 20.0, 5.0
PROGRAM = str(Path(sys.executable).with_name("skyrl-engine"))


def train(folder: Path) -> Path:
    """Run one step of reinforcement; return its run directory."""
    run = folder / "run"
    make_model(folder / "model", [Exchange(f"Spell {word} backward", word[::-1]) for word in ("one", "two", "three", "four")])
    command = [
        PROGRAM,
        "rl",
        "--quiet",
        "--model",
        str(folder / "model"),
        "--output",
        str(run),
        "--env",
        "reasoning_gym:spell_backward",
    ]
    sizes = ["--steps", "1", "--groups", "2", "--group-size", "2", "--max-tokens", "16", "rl.max_prompt_tokens=256"]
    cpu_seconds([*command, *sizes, "run.device=cpu", "checkpoint.at_end=false", "run.report=false"], folder)
    return run


def lengthen(run: Path, steps: int) -> None:
    """Repeat the step's record of metrics under `steps` numbers, and write a journal of as many steps."""
    import numpy as np

    draw = np.random.default_rng(0)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    step = next(record for record in records if record["kind"] == "step")
    names = [name for name, value in step["metrics"].items() if isinstance(value, float)]
    with (run / "metrics.jsonl").open("w") as lines:
        print(json.dumps(records[0] | {"total_steps": steps}), file=lines)
        for number in range(1, steps + 1):
            moved = dict(zip(names, (draw.standard_normal(len(names)) * 0.1).tolist(), strict=True))
            metrics = {name: value + moved.get(name, 0.0) for name, value in step["metrics"].items()}
            print(json.dumps(step | {"step": number, "total_steps": steps, "metrics": metrics}), file=lines)
    rollouts = run / "rollouts"
    for entry in rollouts.iterdir():
        entry.unlink()
    subprocess.run([sys.executable, __file__, "write", str(rollouts), str(steps)], check=True)


def main(steps: int = STEPS) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = train(folder)
        few = cpu_seconds([PROGRAM, "report", str(run)], folder)
        lengthen(run, steps)
        seconds, size = cpu_seconds([PROGRAM, "report", str(run)], folder), (run / "report.html").stat().st_size / 1e6
        print(
            f"report of {steps:,} steps, {steps * MEMBERS:,} attempts: {seconds:.1f} CPU s {compare_with_bar(seconds, at_most=CPU_SECONDS)}"
        )
        print(f"  the page: {size:.2f} MB {compare_with_bar(size, at_most=MEGABYTES)}")
        print(f"  of a run of one step: {few:.1f} CPU s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        from rollout_listing import write_journal

        write_journal(Path(sys.argv[2]), int(sys.argv[3]), groups=1, members=MEMBERS)
    else:
        main(*map(int, sys.argv[1:2]))
