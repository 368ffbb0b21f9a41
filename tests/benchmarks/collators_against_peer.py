"""CPU time of collation against a peer's collators over the same samples: from Python lists, and from columns into reused memory.

The peer is a module that the environment variable SKYRL_ENGINE_PEER_COLLATORS names by its path; it offers `make_batch`, `Case`,
`bound_call`. Without it there is nothing to compare with, and this says so. Rounds are interleaved in one process on one thread; figures
are ratios of median CPU times, and "copy" is a plain copy of the bytes that a build writes. Run with `nox -s bench`.
"""

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skyrl_engine.contracts.buffers import ReusableBuffers
from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.plan import Layout, MicroBatchPlan, one_sample_per_row
from skyrl_engine_collators import kernels
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.packed.planner import joined
from skyrl_engine_collators.padded.collator import PaddedCollator

PEER = "SKYRL_ENGINE_PEER_COLLATORS"
CASES = (
    ("trajectory", 1024, "short", 0),
    ("trajectory", 1024, "long", 0),
    ("padded", 1024, "short", 0),
    ("packed", 1024, "short", 2048),
    ("trajectory", 16384, "short", 0),
    ("padded", 16384, "short", 0),
    ("packed", 16384, "short", 8192),
)
ROUNDS = {1024: 9, 16384: 5}
ONE_RANK, EIGHT_RANKS = Layout(), Layout(dp=8)


def main() -> None:
    path = os.environ.get(PEER)
    if not path:
        print(f"no comparison with a peer: {PEER} does not name its module")
        return
    torch.set_num_threads(1)
    peer = module_at(Path(path))
    engines = ["numpy", *(["native"] if has_native() else [])]
    print("CPU time of the peer, and how many times less ours is; plan and gather index included, the copy beside")
    for case in CASES:
        times = measured(peer, case, engines)
        theirs = times.pop("peer")
        ratios = ", ".join(f"{name} {theirs / seconds:.1f}x" for name, seconds in times.items())
        print(f"{case[0]} {case[1]} {case[2]}: peer {theirs * 1e3:.1f} ms; {ratios}")


def measured(peer: Any, case: tuple[str, int, str, int], engines: list[str]) -> dict[str, float]:
    """Median CPU seconds of every way to make the batch."""
    kind, size, lengths, capacity = case
    batch = peer.make_batch(kind, size, lengths, 0)
    collator = PackedCollator(max_tokens_per_microbatch=capacity) if kind == "packed" else PaddedCollator()
    columns, buffers = from_lists(kind, batch), ReusableBuffers(generations=1)
    outputs = [tensor.numpy() for tensor in collator.build(columns, planned(collator, columns)).fields.values()]
    copies = [array.copy() for array in outputs]

    def build(source: Callable[[], SampleColumns]) -> None:
        given = source()
        collator.build(given, planned(collator, given), out=buffers)

    def copy() -> None:
        for output, kept in zip(outputs, copies, strict=True):
            np.copyto(output, kept)

    works: dict[str, Callable[[], object]] = {"peer": peer.bound_call(peer.Case(*case), batch)}
    for engine in engines:
        works[f"columns in, {engine}"] = partial(on_engine, engine, partial(build, lambda: columns))
        works[f"lists in, {engine}"] = partial(on_engine, engine, partial(build, partial(from_lists, kind, batch)))
    return interleaved({**works, "copy of the output": copy}, ROUNDS[size])


def from_lists(kind: str, batch: Any) -> SampleColumns:
    if kind == "trajectory":
        return SampleColumns.from_rollouts(**batch, reader=kernels.read_lists)
    return SampleColumns.from_lists(
        reader=kernels.read_lists,
        input_ids=[example["input_ids"] for example in batch],
        num_actions=[example["num_actions"] for example in batch],
        loss_mask=[example["loss_mask"] for example in batch],
    )


def planned(collator: PaddedCollator | PackedCollator, columns: SampleColumns) -> MicroBatchPlan:
    """All rows in one micro-batch, as the peer makes them."""
    if isinstance(collator, PackedCollator):
        return joined(collator.plan(columns.lengths, EIGHT_RANKS))
    lengths = columns.lengths
    return one_sample_per_row(np.arange(len(columns)), int(lengths.tokens.max()), int(lengths.actions.max()))


def on_engine(engine: str, work: Callable[[], None]) -> None:
    os.environ[kernels.VARIABLE] = engine
    work()


def interleaved(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    for work in works.values():
        work()  # imports and pages
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(cpu_seconds(work))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of one call; as many calls as fill a hundredth of a second."""
    calls, spent = 0, 0.0
    started = time.process_time()
    while spent < 0.01:
        work()
        calls += 1
        spent = time.process_time() - started
    return spent / calls


def has_native() -> bool:
    try:
        kernels.load()
    except ImportError as problem:
        print(f"no compiled kernels here ({problem}); NumPy alone is measured")
        return False
    return True


def module_at(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("peer_collators", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its classes look themselves up here
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
