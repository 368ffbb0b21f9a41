"""How many times less CPU the padded collator takes than the loops that define it. Both start from the same columns.

Rounds are interleaved in one process, so that a busy or throttled machine slows both alike; the figure is the ratio of median CPU times.
Run with `nox -s bench`.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.plan import one_sample_per_row
from skyrl_engine.contracts.ragged import offsets_of
from skyrl_engine_collators.padded import reference
from skyrl_engine_collators.padded.collator import PaddedCollator

ROUNDS = 5
BATCHES = {"SFT, 8 samples": (8, 0), "SFT, 128 samples": (128, 0), "RL, 128 samples, 4 columns": (128, 4)}


def main() -> None:
    print(f"{processor()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, NumPy {np.__version__}; {ROUNDS} rounds")
    for name, (samples, extra_columns) in BATCHES.items():
        columns = columns_of(samples, extra_columns)
        whole = one_sample_per_row(np.arange(samples), int(columns.lengths.tokens.max()), int(columns.lengths.actions.max()))
        collator = PaddedCollator(pad_token_id=0)
        fast, slow = interleaved(
            lambda columns=columns, collator=collator: collator.collate(columns),
            lambda columns=columns, whole=whole: (
                reference.build_fields(columns, whole, 0),
                reference.gather_index(columns, whole),
            ),
        )
        print(
            f"{name} ({len(columns.input_ids)} tokens): {fast * 1e3:.2f} ms against {slow * 1e3:.0f} ms, {slow / fast:.0f} times less"
        )


def columns_of(samples: int, extra_columns: int) -> SampleColumns:
    """Samples of 32 to 1024 tokens, most of them short, half of each the response."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(5.5, 0.8, samples), 32, 1024).astype(np.int64)
    total = int((lengths // 2).sum())
    return SampleColumns.create(
        input_ids=generator.integers(1, 32000, int(lengths.sum())),
        token_offsets=offsets_of(lengths),
        action_offsets=offsets_of(lengths // 2),
        columns={f"column_{number}": generator.random(total, dtype=np.float32) for number in range(extra_columns)},
    )


def interleaved(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Median CPU seconds of either, over rounds that run one after the other."""
    for work in (first, second):
        work()  # imports and caches
    times = [(cpu_seconds(first), cpu_seconds(second)) for _ in range(ROUNDS)]
    return statistics.median(pair[0] for pair in times), statistics.median(pair[1] for pair in times)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of one call; as many calls as fill a hundredth of a second, so that the clock's grain does not show."""
    calls, spent = 0, 0.0
    started = time.process_time()
    while spent < 0.01:
        work()
        calls += 1
        spent = time.process_time() - started
    return spent / calls


def processor() -> str:
    """The processor's name where the system tells, its architecture elsewhere."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


if __name__ == "__main__":
    main()
