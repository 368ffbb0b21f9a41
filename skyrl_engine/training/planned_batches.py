"""Mini-batches that a plan is made of: the heaviest of a run, and samples that are assumed by their lengths alone."""

from collections.abc import Iterable, Iterator

import numpy as np

from skyrl_engine.contracts.values.plan import SampleLengths
from skyrl_engine.contracts.values.ragged import IntArray


def cut_batches(count: int, size: int, seed: int) -> Iterator[IntArray]:
    """Yield mini-batches int64[size] of the numbers of `count` samples, each once, in an order that is the same for equal seeds.

    The last one is filled up with samples of another pass.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    batches = -(-count // size)
    passes = [generator.permutation(count) for _ in range(-(-batches * size // count))]
    order = np.concatenate(passes)
    for batch in range(batches):
        yield order[batch * size : (batch + 1) * size]


def find_heavy_batches(batches: Iterable[IntArray], tokens: IntArray) -> list[IntArray]:
    """Return the mini-batches that may take most memory, of samples with `tokens` int64[N]: with most tokens, and with the longest sample."""
    most: tuple[int, IntArray] | None = None
    longest: tuple[int, IntArray] | None = None
    for batch in batches:
        lengths = tokens[batch]
        if most is None or lengths.sum() > most[0]:
            most = int(lengths.sum()), batch
        if longest is None or lengths.max() > longest[0]:
            longest = int(lengths.max()), batch
    assert most is not None, "there is a mini-batch"
    assert longest is not None, "there is a mini-batch"
    return [most[1]] if np.array_equal(most[1], longest[1]) else [most[1], longest[1]]


def lengths_of(tokens: IntArray, actions: IntArray, *, unit: int = 1, group: int = 1) -> SampleLengths:
    """Describe samples of `tokens` int64[N], `actions` int64[N] of them responses, in units and groups of so many that follow each other."""
    numbers = np.arange(len(tokens), dtype=np.int64)
    return SampleLengths(tokens, actions, sample_ids=numbers, group_ids=numbers // group, unit_ids=numbers // unit)
