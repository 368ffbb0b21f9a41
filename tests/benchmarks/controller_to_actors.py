"""CPU time of the controller: two Ray actors get what they build 80 MB of dense rows from, against building those 80 MB and pickling them.

1,024 rollouts with responses of 256 to 2,048 tokens are on the controller as columns. The engine's way: plan, weigh, cut one shard of columns
per data-parallel rank, put each, and have two actors build every field of their own rows and hold them; counted is what the controller
spends on it until both have answered, once every page of the object store was in use before: the first use of a page costs up to ten times
the copying, and a run pays it once; so the store is a small one here. The other way: the dense batch is made on the controller and pickled,
once by the peer's collator from the lists it takes, and once by our own from the same columns. CPU time of this process with all its
threads, rounds interleaved, the least of each. Run with `nox -s peers`; `measuring/peer.py` says where the peer comes from.
"""

import pickle
from functools import partial
from typing import Any

import numpy as np
import torch
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine
from measuring.peer import columns_of, peer_module

from skyrl_engine.contracts.kinds.collator import DenseBatch
from skyrl_engine.contracts.values.buffers import ReusableJoin
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout, one_sample_per_row
from skyrl_engine.testing.subject import part_of
from skyrl_engine.workers.dispatch import Shard, batch_structure, compact_weights, cut
from skyrl_engine.workers.parcel import Parcel
from skyrl_engine.workers.ray_cluster import import_ray
from skyrl_engine_collators.padded.collator import PaddedCollator
from skyrl_engine_reducers.plugin import MeanConfig, token_mean

JOIN = ReusableJoin()
REDUCER = token_mean.skyrl_engine_make_reducer(MeanConfig())
CASE = ("trajectory", 1024, "long")
RANKS, ROUNDS, FIRST_STEPS = 2, 7, 20
STORE_BYTES = 200_000_000
BAR = 20.0
"""CPU time of the peer over ours: plugins/collators/README.md."""
MICRO_BATCH_TOKENS = 65_536


class Builder:
    """A data-parallel rank that holds the dense rows of the last shard it was given."""

    def __init__(self) -> None:
        self._collator = PaddedCollator()
        self._held: list[DenseBatch] = []

    def build(self, sent: Parcel) -> tuple[int, int]:
        """Rows and bytes of the dense batches that are now held."""
        shard: Shard = sent.unpack()
        self._held = [self._collator.build(shard.columns, micro_batch) for micro_batch in shard.micro_batches]
        tensors = [tensor for batch in self._held for tensor in batch.fields.values()]
        return sum(micro_batch.rows for micro_batch in shard.micro_batches), sum(tensor.nbytes for tensor in tensors)


def main() -> None:
    peer = peer_module()
    if peer is None:
        return
    torch.set_num_threads(1)
    batch = peer.make_batch(*CASE, 0)
    columns = columns_of("trajectory", batch)
    ray = import_ray()
    ray.init(address="local", num_cpus=RANKS, include_dashboard=False, log_to_driver=False, object_store_memory=STORE_BYTES)
    try:
        actors = [ray.remote(Builder).options(num_cpus=1).remote() for _ in range(RANKS)]

        def send() -> list[tuple[int, int]]:
            return hand_out(ray, actors, columns)

        for _ in range(FIRST_STEPS):
            held = send()
        assert sum(rows for rows, _ in held) >= len(columns), "the actors do not hold every sample"
        works = {
            "ours": send,
            "the peer": partial(pickle_batch, peer.bound_call(peer.Case(*CASE), batch)),
            "our own collator": partial(pickle_batch, partial(collate, columns)),
        }
        dense = len(pickle_batch(works["the peer"].args[0])) / 1e6
        times = interleave(works, ROUNDS)
    finally:
        ray.shutdown()
    print(
        f"{machine()}, ray {ray.__version__}; {RANKS} actors, {sum(size for _, size in held) / 1e6:.0f} MB held, {dense:.0f} MB pickled"
    )
    ours = times.pop("ours")
    for name, seconds in times.items():
        bar = compare_with_bar(seconds / ours, at_least=BAR) if name == "the peer" else ""
        print(
            f"controller CPU {ours * 1e3:.1f} ms against {seconds * 1e3:.1f} ms to build by {name} and pickle: "
            f"{seconds / ours:.1f}x less {bar}"
        )


def hand_out(ray: Any, actors: list[Any], columns: SampleColumns) -> list[tuple[int, int]]:
    """Plan, weigh, cut, put, call, and wait for both."""
    plan = PaddedCollator().plan(columns.lengths, Layout(dp=RANKS, micro_batch_tokens=MICRO_BATCH_TOKENS))
    (mini_batch,) = plan.mini_batches
    weights = compact_weights(part_of(REDUCER, "token_mean", "reducer"), batch_structure(columns, mini_batch, None, JOIN))
    shards = cut(columns, mini_batch, weights, columns.columns, JOIN)
    placed = map(ray.put, map(Parcel.of, shards))
    return ray.get([actor.build.remote(reference) for actor, reference in zip(actors, placed, strict=True)])


def collate(columns: SampleColumns) -> dict[str, torch.Tensor]:
    """All rows at one width, in fresh memory."""
    lengths = columns.lengths
    whole = one_sample_per_row(np.arange(len(columns)), int(lengths.tokens.max()), int(lengths.actions.max()))
    return dict(PaddedCollator().build(columns, whole).fields)


def pickle_batch(build: Any) -> bytes:
    return pickle.dumps(build(), protocol=pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main()
