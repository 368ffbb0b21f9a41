"""Epochs over several datasets with weights: which dataset each place of an epoch draws from, a pure function of (seed, epoch).

The share of a dataset in an epoch is its weight's, exactly but for rounding to whole draws. Where in the epoch its draws stand is random. The
draws of a dataset go through it in passes, each in a new random order; an epoch goes on in the pass in which the one before ended. A draw is a
sample, or a group or pair, which stays whole.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from attrs import frozen

from skyrl_engine.config.schema.data import StoppingStrategy
from skyrl_engine.contracts.values.bundles import Bundles
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.errors import DataError

_MOST_DRAWS: Final = 2**28
"""More draws than these in an epoch would take gigabytes for their order."""

_PLACES, _PASSES = 0x6D69, 0x7061  # keep these uses of the run's seed apart from its other uses


@frozen(eq=False)
class DatasetMixture:
    """Datasets by the numbers of their samples or bundles, int64 each, in their order, and how many draws an epoch takes of each."""

    names: tuple[str, ...]
    members: tuple[IntArray, ...]
    draws: tuple[int, ...]

    @classmethod
    def of(
        cls, names: Sequence[str], datasets: IntArray, weights: Sequence[float], stopping: StoppingStrategy, bundles: Bundles | None
    ) -> "DatasetMixture":
        """Mix samples by `weights`, one per dataset; `datasets` int64[N] are the number of each sample's, `bundles` those that stay whole.

        Raises DataError for a dataset with weight and without samples, for bundles that lie in two datasets or are of several sizes, and for
        an epoch of more draws than can be kept in memory.
        """
        if bundles is not None:
            _refuse_unequal_bundles(names, datasets, bundles)
            datasets = datasets[bundles.members.values[bundles.members.offsets[:-1]]]
        members = tuple(np.flatnonzero(datasets == number) for number in range(len(names)))
        shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
        sizes = np.array([len(own) for own in members], dtype=np.float64)
        for name, share, size in zip(names, shares, sizes, strict=True):
            if share and not size:
                raise DataError(
                    f"the dataset {name} has a weight in data.weights and no sample to train on",
                    remedy="Give it the weight 0, or samples: data.max_samples counts from the first dataset on",
                )
        drawn = shares > 0
        lengths = sizes[drawn] / shares[drawn]
        total = float(lengths.min() if stopping == "first_exhausted" else lengths.max())
        if total > _MOST_DRAWS:
            raise DataError(
                f"an epoch over all of every dataset, with data.weights, would draw {total:,.0f} times",
                remedy='Give large datasets more weight, or set data.stopping_strategy = "first_exhausted"',
            )
        draws = np.where(drawn, np.maximum(np.rint(shares * total), 1), 0)
        return cls(tuple(names), members, tuple(int(count) for count in draws))

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> IntArray:
        """int64[draws of an epoch]: the samples or bundles of an epoch, in order. Without `shuffle`, datasets come in turn by their weights."""
        sources = np.repeat(np.arange(len(self.draws), dtype=np.int64), self.draws)
        if shuffle:
            keys = np.random.PCG64(np.random.SeedSequence([seed, epoch, _PLACES])).random_raw(len(sources))
        else:
            keys = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in self.draws])
        sources = sources[np.argsort(keys, kind="stable")]
        order = np.empty(len(sources), dtype=np.int64)
        for source, count in enumerate(self.draws):
            order[sources == source] = self._draw(source, epoch * count, count, seed, shuffle=shuffle)
        return order

    def _draw(self, source: int, first: int, count: int, seed: int, *, shuffle: bool) -> IntArray:
        """int64[count]: draws number `first` and following of a dataset, which passes over it again and again."""
        own = self.members[source]
        if not count:
            return own[:0]
        passes = range(first // len(own), (first + count - 1) // len(own) + 1)
        whole = np.concatenate(
            [own[shuffle_pass(len(own), [seed, source, number, _PASSES])] if shuffle else own for number in passes]
        )
        start = first - passes.start * len(own)
        return whole[start : start + count]

    def __str__(self) -> str:
        total = sum(self.draws)
        return ", ".join(
            f"{name} {count / total:.1%} ({count:,} draws of {len(own):,})"
            for name, own, count in zip(self.names, self.members, self.draws, strict=True)
        )


def shuffle_pass(count: int, entropy: Sequence[int]) -> IntArray:
    """int64[count]: numbers sorted by raw 64-bit draws of PCG64; equal draws keep their places.

    NumPy promises that a bit generator's stream never changes between versions (NEP 19), which it does not promise of
    `Generator.permutation`.
    """
    draws = np.random.PCG64(np.random.SeedSequence(list(entropy))).random_raw(count)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)


def _refuse_unequal_bundles(names: Sequence[str], datasets: IntArray, bundles: Bundles) -> None:
    sizes = np.unique(bundles.sizes)
    if len(sizes) > 1:
        raise DataError(
            f"data.weights draw whole groups of samples, and the groups of {', '.join(names)} have {sizes[0]} to {sizes[-1]} samples",
            remedy="Use groups of one size, or remove data.weights",
        )
    of_bundle = datasets[bundles.members.values].reshape(len(bundles), -1)
    if (of_bundle != of_bundle[:, :1]).any():
        wrong = int(np.argmax((of_bundle != of_bundle[:, :1]).any(1)))
        first, other = (names[number] for number in np.unique(of_bundle[wrong])[:2])
        raise DataError(
            f"a group has samples in {first} and in {other}, and data.weights draw from one dataset at a time",
            remedy="Give groups of several datasets different group_ids, or remove data.weights",
        )
