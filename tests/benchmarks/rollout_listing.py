"""Bars of looking at a journal of 1,000,000 attempts: CPU seconds and resident memory of `skyrl-engine rollouts list` and `rollouts show`.

The journal has 1,000 steps of 125 groups of 8 attempts with short lists of tokens, so that nearly all of the work is that per record. It is
written as a run writes it, in a process of its own: a child's resident memory counts what its parent had when it was started. Run with
`nox -s bench`; `python tests/benchmarks/rollout_listing.py STEPS` takes fewer steps.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring.bars import compare_with_bar
from measuring.cpu_time import machine

STEPS, GROUPS, MEMBERS = 1000, 125, 8
TOKENS = 8
CPU_SECONDS = 15.0
RESIDENT_MB = 200.0

COMMANDS = (
    ("list",),
    ("list", "--json"),
    ("show", "--best", "--limit", "1"),
    ("show", "--worst", "--limit", "10"),
    ("show", "--failed", "--limit", "10"),
    ("show", "--limit", "10"),
)


def write_journal(folder: Path, steps: int, *, groups: int = GROUPS, members: int = MEMBERS) -> None:
    """Groups in which some attempts fail or are cut off; a tenth of them is dropped, and every step trains on its others."""
    import numpy as np

    from skyrl_engine.contracts.values.ragged import offsets_of
    from skyrl_engine.contracts.values.rollout import SEGMENT_PROMPT, SEGMENT_SAMPLED, Group, Trajectory, VersionSpans
    from skyrl_engine.rollout.arrow_codec import LearnedAttempt
    from skyrl_engine.rollout.journal import open_journal

    draw = np.random.default_rng(0)
    advantages, logprobs = np.full(TOKENS, 0.5, dtype=np.float32), np.full(TOKENS, -0.71, dtype=np.float32)

    def attempt(ticket: int, member: int, version: int) -> Trajectory:
        rewards = np.zeros(TOKENS)
        rewards[-1] = round(draw.random(), 3)
        status = str(draw.choice(("finished", "truncated", "failed"), p=(0.8, 0.1, 0.1)))
        return Trajectory(
            ticket=ticket,
            member=member,
            token_ids=draw.integers(0, 50_000, 2 * TOKENS, dtype=np.int32),
            kinds=np.array([SEGMENT_PROMPT, SEGMENT_SAMPLED], dtype=np.uint8),
            segment_offsets=offsets_of([TOKENS, TOKENS]),
            logprobs=np.full(TOKENS, -0.7, dtype=np.float32),
            versions=VersionSpans.one(version, TOKENS),
            rewards=rewards,
            status=status,
            cause="timed out after 60 s" if status == "failed" else None,
            start_version=version,
            stops=("stop",),
            parts={"exact": 1.0},
            seconds={"queue": 0.1, "generate": 1.2},
        )

    with open_journal(folder, run="benchmark") as journal:
        for step in range(steps):
            tickets = range(step * groups, (step + 1) * groups)
            for ticket in tickets:
                attempts = tuple(attempt(ticket, member, step) for member in range(members))
                dropped = None if groups == 1 or ticket % 10 else "zero_variance"
                journal.append(Group(ticket, "spell", f"task-{ticket % 5000}", step, attempts, dropped))
            trained = [ticket for ticket in tickets if groups == 1 or ticket % 10]
            learned = [LearnedAttempt(ticket, member, advantages, logprobs) for ticket in trained for member in range(members)]
            journal.record_step(step + 1, trained, learned)


def run(run_directory: Path, command: tuple[str, ...]) -> tuple[float, float]:
    """CPU seconds and most resident megabytes of a command, from the start of the interpreter to its end."""
    program = Path(sys.executable).with_name("skyrl-engine")
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [str(program), "rollouts", command[0], str(run_directory), *command[1:]], stdout=output, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        shown = output.tell()
    if process.returncode or not shown:
        raise SystemExit(f"rollouts {' '.join(command)} showed {shown} bytes and ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def write_apart(run_directory: Path, steps: int) -> None:
    """Write a journal in a process whose memory is not this one's."""
    subprocess.run([sys.executable, __file__, "write", str(run_directory / "rollouts"), str(steps)], check=True)


def main(steps: int = STEPS) -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        few, many = Path(folder, "few"), Path(folder, "many")
        write_apart(few, 1)
        write_apart(many, steps)
        print(f"journal of {steps * GROUPS * MEMBERS:,} attempts: {sum(f.stat().st_size for f in many.rglob('*')) / 2**20:,.0f} MB")
        for command in COMMANDS:
            _, least = run(few, command)
            seconds, resident = run(many, command)
            print(
                f"rollouts {' '.join(command)}: {seconds:.1f} s CPU {compare_with_bar(seconds, at_most=CPU_SECONDS)}, "
                f"{resident:.0f} MB {compare_with_bar(resident, at_most=RESIDENT_MB)}, of which {least:.0f} MB for 1,000 attempts too"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write_journal(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(*map(int, sys.argv[1:2]))
