"""CPU time of collation against a peer's collators over the same samples: from Python lists, and from columns.

Rounds are interleaved in one process on one thread; figures are ratios of the least CPU times. "lists in" makes columns of Python lists, plans,
and builds every field; "columns in" plans and builds every field; "model inputs" plans and builds the model's inputs and the gather index. All
of them build the batch as one micro-batch, as a peer does; `micro_batches_against_peer.py` builds micro-batches as a training step does.
Run with `nox -s peers`; `measuring/peer.py` says where the peer comes from.
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

from skyrl_engine.contracts.kinds.collator import MODEL_INPUTS
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine_collators import kernels
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.padded.collator import PaddedCollator

CASES = (
    ("trajectory", 1024, "short", 0),
    ("trajectory", 1024, "long", 0),
    ("padded", 1024, "short", 0),
    ("packed", 1024, "short", 2048),
    ("trajectory", 16384, "short", 0),
    ("padded", 16384, "short", 0),
    ("packed", 16384, "short", 8192),
)
HEADLINE = (("trajectory", 1024, "short", 0), ("padded", 1024, "short", 0), ("packed", 1024, "short", 2048))
BARS = {"trajectory": 3.0, "padded": 4.0, "packed": 5.0}
"""Headline bars: plugins/collators/README.md."""
ROUNDS = {1024: 9, 16384: 5}
EIGHT_RANKS = Layout(dp=8)


def main() -> None:
    peer = peer_module()
    if peer is None:
        return
    torch.set_num_threads(1)
    engines = ["numpy", *(["native"] if has_native() else [])]
    print(f"{machine()}, NumPy {np.__version__}, torch {torch.__version__}")
    print("CPU time of the peer, and how many times less ours is; plan and gather index included")
    headline = {}
    for case in CASES:
        times = measure(peer, case, engines)
        theirs = times.pop("peer")
        ratios = {name: theirs / seconds for name, seconds in times.items()}
        headline[case] = ratios.get("lists in, native", ratios["lists in, numpy"])
        listed = ", ".join(f"{name} {ratio:.1f}x" for name, ratio in ratios.items())
        print(f"{case[0]} {case[1]} {case[2]}: peer {theirs * 1e3:.1f} ms; {listed}")
    shown = ", ".join(
        f"{case[0]} {headline[case]:.1f}x {compare_with_bar(headline[case], at_least=BARS[case[0]])}" for case in HEADLINE
    )
    print(f"headline, Python lists to dense tensors by the public constructors as they are, {engines[-1]}, 1024 samples: {shown}")


def measure(peer: Any, case: tuple[str, int, str, int], engines: list[str]) -> dict[str, float]:
    """Least CPU seconds of every way to make the batch."""
    kind, size, lengths, capacity = case
    batch = peer.make_batch(kind, size, lengths, 0)
    collator = PackedCollator(max_tokens_per_microbatch=capacity) if kind == "packed" else PaddedCollator()
    columns, layout = columns_of(kind, batch), EIGHT_RANKS if kind == "packed" else Layout()

    def build(source: Callable[[], SampleColumns], fields: tuple[str, ...] | None = None) -> None:
        source_columns = source()
        collator.build(source_columns, collator.plan(source_columns.lengths, layout).joined, fields=fields)

    works: dict[str, Callable[[], object]] = {"peer": peer.bound_call(peer.Case(*case), batch)}
    for engine in engines:
        works[f"lists in, {engine}"] = partial(on_engine, engine, partial(build, partial(columns_of, kind, batch)))
        works[f"columns in, {engine}"] = partial(on_engine, engine, partial(build, lambda: columns))
        works[f"model inputs, {engine}"] = partial(on_engine, engine, partial(build, lambda: columns, MODEL_INPUTS))
    return interleave(works, ROUNDS[size])


def on_engine(engine: str, work: Callable[[], object]) -> None:
    os.environ[kernels.VARIABLE] = engine
    work()


def has_native() -> bool:
    try:
        kernels.load()
    except ImportError as problem:
        print(f"no compiled kernels here ({problem}); NumPy alone is measured")
        return False
    return True


if __name__ == "__main__":
    main()
