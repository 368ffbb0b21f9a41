"""CPU time of the loops that define the padded collator over its own. Both start from the same columns.

Rounds are interleaved in one process, so that a busy or throttled machine slows both alike; the figure is the ratio of the least CPU times.
Run with `nox -s bench`.
"""

from functools import partial

import numpy as np
from measuring.cpu_time import interleave, machine

from skyrl_engine.contracts.kinds.collator import collate
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import MicroBatchPlan, one_sample_per_row
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine_collators.padded import loops
from skyrl_engine_collators.padded.collator import PaddedCollator

ROUNDS = 5
BATCHES = {"SFT, 8 samples": (8, 0), "SFT, 128 samples": (128, 0), "RL, 128 samples, 4 columns": (128, 4)}


def main() -> None:
    print(f"{machine()}, NumPy {np.__version__}; {ROUNDS} rounds")
    for name, (samples, extra_columns) in BATCHES.items():
        columns = columns_of(samples, extra_columns)
        whole = one_sample_per_row(np.arange(samples), int(columns.lengths.tokens.max()), int(columns.lengths.actions.max()))
        collator = PaddedCollator(pad_token_id=0)

        def run_loops(columns: SampleColumns = columns, whole: MicroBatchPlan = whole) -> None:
            loops.build_fields(columns, whole, 0)
            loops.gather_index(columns, whole)

        times = interleave({"ours": partial(collate, collator, columns), "loops": run_loops}, ROUNDS)
        ours, theirs = times["ours"], times["loops"]
        tokens = len(columns.input_ids)
        print(f"{name} ({tokens} tokens): {ours * 1e3:.2f} ms against {theirs * 1e3:.0f} ms, {theirs / ours:.0f} times less")


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


if __name__ == "__main__":
    main()
