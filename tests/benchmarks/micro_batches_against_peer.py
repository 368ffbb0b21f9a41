"""CPU time to build micro-batches as a training step does, against a peer that collates the batch once and takes views of its rows.

1,024 padded samples of 16 to 256 tokens for 8 data-parallel ranks. The peer's side: its whole collate of Python lists, and views of its rows
for every micro-batch. Ours: `plan`, and for every micro-batch of every rank `build` of the model's inputs and the gather index into fresh
memory, dropped as they go; columns are made before. "through the rank's iterator" adds what a rank makes of a micro-batch before the backend
gets it: labels, positions and weights of the tokens that carry loss, which the peer's side leaves out. Rounds are interleaved in one process
on one thread; figures are ratios of the least CPU times. Run with `nox -s peers`; `measuring/peer.py` says where the peer comes from.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine
from measuring.peer import columns_of, peer_module

from skyrl_engine.contracts.kinds.collator import MODEL_INPUTS, Collator
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import Owner
from skyrl_engine.spans import Spans
from skyrl_engine.workers.batch import ShardBatch
from skyrl_engine.workers.dispatch import Shard, cut
from skyrl_engine_collators.padded.collator import PaddedCollator

SAMPLES, RANKS = 1024, 8
BARS = {4: 2.0, 8: 3.5, 32: 8.0, 128: 12.0}
"""Rows per micro-batch, and how many times less the CPU time is: plugins/collators/README.md."""
ROUNDS = 15
OURS, ITERATED, PEER = "plan and build", "through the rank's iterator", "peer"


def main() -> None:
    peer = peer_module()
    if peer is None:
        return
    torch.set_num_threads(1)
    print(f"{machine()}, NumPy {np.__version__}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    batch = peer.make_batch("padded", SAMPLES, "short", 0)
    columns = columns_of("padded", batch)
    for rows, bar in BARS.items():
        times = interleave(works(peer, batch, columns, rows), ROUNDS)
        ratio = times[PEER] / times[OURS]
        print(
            f"{rows} rows per micro-batch: peer {times[PEER] * 1e3:.2f} ms, plan and build {times[OURS] * 1e3:.2f} ms, "
            f"{ratio:.1f} times less {compare_with_bar(ratio, at_least=bar)}; "
            f"through the rank's iterator {times[ITERATED] * 1e3:.2f} ms, {times[PEER] / times[ITERATED]:.1f} times less"
        )


def works(peer: Any, batch: Any, columns: SampleColumns, rows: int) -> dict[str, Callable[[], None]]:
    """Each side's work on one training batch."""
    collator, layout = PaddedCollator(), Layout(dp=RANKS, micro_batch_rows=rows)
    (mini_batch,) = collator.plan(columns.lengths, layout).mini_batches
    shards = list(cut(columns, mini_batch, np.ones(int(columns.action_offsets[-1])), ()))
    return {
        PEER: partial(collate_and_view, peer, batch, rows),
        OURS: partial(plan_and_build, collator, columns, layout),
        ITERATED: partial(plan_and_iterate, collator, columns, layout, shards),
    }


def collate_and_view(peer: Any, batch: Any, rows: int) -> None:
    whole = peer.padded(batch, pad_id=0)
    for first in range(0, SAMPLES, rows):
        _ = {name: values[first : first + rows] for name, values in whole.items() if hasattr(values, "shape")}


def plan_and_build(collator: Collator, columns: SampleColumns, layout: Layout) -> None:
    for micro_batch in collator.plan(columns.lengths, layout).micro_batches:
        collator.build(columns, micro_batch, fields=MODEL_INPUTS)


def plan_and_iterate(collator: Collator, columns: SampleColumns, layout: Layout, shards: list[Shard]) -> None:
    """The plan, and every rank's pass over its own shard; cutting shards is not counted."""
    collator.plan(columns.lengths, layout)
    for shard in shards:
        for _ in ShardBatch(shard, BoundPlugin(collator, Owner("collator padded", "none"), "collator", "padded"), "loss", Spans()):
            pass


if __name__ == "__main__":
    main()
