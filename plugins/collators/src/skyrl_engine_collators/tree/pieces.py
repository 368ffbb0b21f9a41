"""The samples of a mini-batch as trees of common prefixes, and how trees that are too large for a row are cut into pieces."""

import itertools
from collections.abc import Iterable

import numpy as np
from attrs import frozen

from skyrl_engine.contracts import IntArray, SampleLengths, offsets_of, range_minima

DEEPEST = 64
"""Branches below each other at which a tree is cut one by one; below that it is cut into units at once."""


@frozen(eq=False)
class Forest:
    """n samples, neighbours where they share a prefix. All int64[n], by place in that order.

    `samples` are their positions in the batch, `tokens` their lengths, `shared` what each has in common with the one before, `units` their
    units; samples of a unit are never separated. `ends` int64[n+1] are running sums of the tokens that are not shared.
    """

    samples: IntArray
    tokens: IntArray
    shared: IntArray
    units: IntArray
    ends: IntArray

    @classmethod
    def of(cls, samples: IntArray, lengths: SampleLengths, shared: IntArray) -> "Forest":
        tokens = lengths.tokens[samples]
        return cls(samples, tokens, shared, lengths.unit_ids[samples], offsets_of(tokens - shared))

    @property
    def size(self) -> int:
        """Tokens of all samples, those that are shared counted once."""
        return int(self.ends[-1])

    def shared_among(self, places: IntArray) -> IntArray:
        """Return int64[k]: what each sample at these ascending places has in common with the one before it among them; 0 for the first."""
        return range_minima(self.shared, places)

    def size_of(self, places: IntArray) -> int:
        """Return the tokens of the samples at these ascending places, those that are shared among them counted once."""
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == len(places):
            return int(self.ends[last + 1] - self.ends[first] + self.shared[first])
        return int(self.tokens[places].sum() - self.shared_among(places).sum())

    def cut(self, limit: int) -> list[IntArray]:
        """Return pieces, each the ascending places of whole units, of at most `limit` tokens where a piece is more than one unit.

        A tree that fits is one piece. A larger one is cut at its shallowest branches, where the least is computed twice, and its parts in turn;
        neighbouring parts are joined while they fit.
        """
        everything = np.arange(len(self.samples), dtype=np.int64)
        trees = np.cumsum(self.shared == 0) - 1
        return [piece for tree in self._connect(everything, trees) for piece in self._cut(tree, limit)]

    def _cut(self, places: IntArray, limit: int, depth: int = 0) -> list[IntArray]:
        if len(places) == 1 or self.size_of(places) <= limit or (self.units[places] == self.units[places[0]]).all():
            return [places]
        each = np.arange(len(places), dtype=np.int64)
        shared = self.shared_among(places)
        branches = shared == shared[1:].min()
        branches[0] = True
        parts = self._connect(places, each if depth == DEEPEST else np.cumsum(branches) - 1)
        if len(parts) == 1:  # units tie all of them together
            parts = self._connect(places, each)
        return self._join((piece for part in parts for piece in self._cut(part, limit, depth + 1)), limit)

    def _join(self, pieces: Iterable[IntArray], limit: int) -> list[IntArray]:
        joined: list[IntArray] = []
        size = 0
        for piece in pieces:
            if joined:
                together, added = self._together(joined[-1], piece, size)
                if added <= limit:
                    joined[-1], size = together, added
                    continue
            joined.append(piece)
            size = self.size_of(piece)
        return joined

    def _together(self, one: IntArray, other: IntArray, size: int) -> tuple[IntArray, int]:
        """Return both pieces as one, and its size; `size` is that of the first."""
        if one[-1] < other[0]:
            between = int(self.shared[int(one[-1]) + 1 : int(other[0]) + 1].min())
            return np.concatenate([one, other]), size + self.size_of(other) - between
        together = np.sort(np.concatenate([one, other]))
        return together, self.size_of(together)

    def _connect(self, places: IntArray, parts: IntArray) -> list[IntArray]:
        """Return the places of each part, parts that hold samples of one unit as one; `parts` int64[n] count up from 0 with the places."""
        units = self.units[places]
        _, unit_of = np.unique(units, return_inverse=True)
        first = np.full(int(unit_of.max(initial=-1)) + 1, len(parts), dtype=np.int64)
        np.minimum.at(first, unit_of, parts)
        if (first[unit_of] == parts).all():  # the usual case: no unit lies in two parts
            bounds = np.append(np.flatnonzero(np.append(True, parts[1:] != parts[:-1])), len(parts))
            return [places[start:stop] for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
        owner = list(range(int(parts[-1]) + 1))

        def find(part: int) -> int:
            while owner[part] != part:
                owner[part] = part = owner[owner[part]]
            return part

        for part, smallest in {*zip(parts.tolist(), first[unit_of].tolist(), strict=True)}:
            one, other = sorted((find(part), find(smallest)))
            owner[other] = one
        roots = np.asarray([find(part) for part in range(len(owner))], dtype=np.int64)[parts]
        order = np.argsort(roots, kind="stable")
        counts = np.unique(roots, return_counts=True)[1]
        bounds = offsets_of(counts).tolist()
        return [places[order[start:stop]] for start, stop in itertools.pairwise(bounds)]
