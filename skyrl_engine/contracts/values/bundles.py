"""Bundles: samples that may not be separated (a unit in a micro-batch, a group in a mini-batch)."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from attrs import frozen

from skyrl_engine.contracts.values.ragged import IntArray, Ragged


@frozen(eq=False)
class Bundles:
    """Disjoint sets of samples in the order of their first sample; `members` holds positions, ascending inside a bundle."""

    members: Ragged

    @classmethod
    def by_label(cls, samples: IntArray, labels: IntArray) -> "Bundles":
        """One bundle per distinct label; `samples` int64[n] ascending, `labels` int64[n]."""
        if (labels[1:] > labels[:-1]).all():  # the usual case, every sample on its own, needs no sorting
            return cls(Ragged(samples, np.arange(len(samples) + 1, dtype=np.int64)))
        _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
        order = np.argsort(first[inverse], kind="stable")
        sizes = np.bincount(inverse, minlength=len(first))[np.argsort(first)]
        return cls(Ragged(samples[order], np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))))

    def __len__(self) -> int:
        return len(self.members)

    @property
    def sizes(self) -> IntArray:
        """int64[bundles]: samples in each."""
        return self.members.lengths

    @property
    def single(self) -> bool:
        """True if every sample is on its own."""
        return len(self) == len(self.members.values)

    def sums(self, values: IntArray) -> IntArray:
        """int64[bundles]: the sum of `values` (one per sample of the whole batch) over each bundle's samples."""
        if self.single:
            return values[self.members.values]
        return np.add.reduceat(values[self.members.values], self.members.offsets[:-1])

    def maxima(self, values: IntArray) -> IntArray:
        """int64[bundles]: the largest of `values` (one per sample of the whole batch) in each bundle."""
        if self.single:
            return values[self.members.values]
        return np.maximum.reduceat(values[self.members.values], self.members.offsets[:-1])

    def runs(self, starts: Sequence[int]) -> list[IntArray]:
        """Samples (int64, ascending) of consecutive bundles; a run begins at each of `starts`, the first of them 0."""
        offsets = self.members.offsets[[*starts, len(self)]]
        return [np.sort(self.members.values[start:stop]) for start, stop in pairwise(offsets.tolist())]

    def take(self, chosen: IntArray) -> "Bundles":
        return Bundles(self.members.take(chosen))


def inseparable(*ids: IntArray) -> IntArray:
    """int64[N]: equal for samples with an equal entry in any of `ids` (int64[N] each), directly or through others.

    The label is the first such sample.
    """
    count = len(ids[0])
    labels = np.arange(count, dtype=np.int64)
    kinds = []
    for sample_ids in ids:
        values, inverse = np.unique(sample_ids, return_inverse=True)
        if len(values) < count:
            kinds.append((len(values), inverse))
    while True:
        before = labels
        for distinct, inverse in kinds:
            smallest = np.full(distinct, count, dtype=np.int64)
            np.minimum.at(smallest, inverse, labels)
            labels = smallest[inverse]
        labels = labels[labels]  # follow the label to the sample's own: chains of groups and units shorten by half each round
        if np.array_equal(before, labels):
            return labels
