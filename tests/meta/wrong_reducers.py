"""Reducers that are wrong on purpose, one fault each."""

import random

import numpy as np

from skyrl_engine import DataError


class Plain:
    """A mean over sequences of each one's mean over tokens, right in everything; spoilt below."""

    empty_sequence = "count"
    batch_local = False

    def weights(self, structure):
        if (structure.loss_weight < 0).any():
            raise DataError("a loss weight is negative", remedy="Make it 0 or more")
        return self.of(structure, structure.loss_weight.astype(np.float64))

    def of(self, structure, weight):
        mass = np.where(structure.mass == 0, 1.0, structure.mass)
        return weight / (len(structure) * mass)[structure.sequence_index]


class NanWithoutLoss(Plain):
    """0 / 0 for a sequence without loss."""

    def of(self, structure, weight):
        with np.errstate(invalid="ignore"):
            return weight / (len(structure) * structure.mass)[structure.sequence_index]


class Single(Plain):
    def of(self, structure, weight):
        return super().of(structure, weight).astype(np.float32)


class Strided(Plain):
    def of(self, structure, weight):
        return np.repeat(super().of(structure, weight), 2)[::2]


class IgnoresTheLastSequence(Plain):
    """An offset is one too short, in a batch of two or more."""

    def of(self, structure, weight):
        last = len(structure) - 1
        return super().of(structure, weight) * ((structure.sequence_index != last) | (last == 0))


class CountsTokensOfNoLoss(Plain):
    """Divides 1, not the token's weight."""

    def of(self, structure, weight):
        return super().of(structure, np.ones_like(weight))


class DividesPerMicroBatch(Plain):
    def of(self, structure, weight):
        mass = np.bincount(structure.micro_batch, weights=structure.mass)
        return weight / (np.where(mass == 0, 1, mass) * len(mass))[structure.micro_batch][structure.sequence_index]


class TakesNeighboursForAGroup(Plain):
    """Finds groups by where the label changes: sequences of one group must be neighbours."""

    def of(self, structure, weight):
        runs = np.cumsum(np.append(0, np.diff(structure.group_ids) != 0))
        mass = np.bincount(runs, weights=structure.mass)
        return weight / (np.where(mass == 0, 1, mass) * len(mass))[runs][structure.sequence_index]


class TakesLabelsForPlaces(Plain):
    """The number of groups is taken for one more than the largest label."""

    def of(self, structure, weight):
        mass = np.bincount(structure.group_ids, weights=structure.mass)
        return weight / (np.where(mass == 0, 1, mass) * len(mass))[structure.group_ids][structure.sequence_index]


class TruncatesFractions(Plain):
    def of(self, structure, weight):
        mass = np.maximum(np.bincount(structure.sequence_index, weights=weight.astype(np.int64), minlength=len(structure)), 1)
        return weight / (len(structure) * mass)[structure.sequence_index]


class NeverBelowOne(Plain):
    """The published max(mass, 1), which is right for masks and wrong for fractions."""

    def of(self, structure, weight):
        return weight / (len(structure) * np.maximum(structure.mass, 1))[structure.sequence_index]


class OneTooMany(Plain):
    """Exact for the number of sequences that its author tried, which is three."""

    def of(self, structure, weight):
        return super().of(structure, weight) * len(structure) / 3


class SkipsButCounts(Plain):
    empty_sequence = "skip"


class CountsEmptyTwice(Plain):
    def of(self, structure, weight):
        return super().of(structure, weight) * len(structure) / (len(structure) + np.count_nonzero(structure.empty))


class TakesNegatives(Plain):
    def weights(self, structure):
        return self.of(structure, structure.loss_weight.astype(np.float64))


class DividesInPlace(Plain):
    def weights(self, structure):
        weights = super().weights(structure)
        structure.micro_batch[:] = 0
        return weights


class Tires(Plain):
    """Weighs less from call to call."""

    def __init__(self):
        self.calls = 0

    def of(self, structure, weight):
        self.calls += 1
        return super().of(structure, weight) / self.calls


class TiresLate(Plain):
    """The same, after some calls."""

    def __init__(self):
        self.calls = 0

    def of(self, structure, weight):
        self.calls += 1
        return super().of(structure, weight) / (2 if self.calls > 8 else 1)


class CountsInABytesRoom(Plain):
    """Sums masks in their own type, which holds no more than 255."""

    def of(self, structure, weight):
        mass = np.zeros(len(structure), structure.loss_weight.dtype)
        np.add.at(mass, structure.sequence_index, structure.loss_weight)
        return weight / (len(structure) * np.where(mass == 0, 1.0, mass))[structure.sequence_index]


class HalvesMany(Plain):
    """Right up to twenty sequences."""

    def of(self, structure, weight):
        return super().of(structure, weight) * (0.5 if len(structure) > 20 else 1.0)


class HalvesLargeGroups(Plain):
    """Right up to groups of 64."""

    def of(self, structure, weight):
        return super().of(structure, weight) * (
            0.5 if np.bincount(np.unique(structure.group_ids, return_inverse=True)[1]).max() > 64 else 1.0
        )


class ByDomain(Plain):
    """Odd and right: reads texts, of which those that begin with "math" count double."""

    needs = ("sample:domain",)

    def of(self, structure, weight):
        twice = np.char.startswith(structure.sample_values["domain"], "math")
        weighed = weight * np.where(twice, 2.0, 1.0)[structure.sequence_index]
        return weighed / (weighed.sum() or 1.0)


class ByFirstDomain(ByDomain):
    """Tells the domain of the first sequence from the others."""

    def of(self, structure, weight):
        domain = structure.sample_values["domain"]
        twice = np.char.equal(domain, domain[0])
        weighed = weight * np.where(twice, 2.0, 1.0)[structure.sequence_index]
        return weighed / (weighed.sum() or 1.0)


class ByGenre(ByDomain):
    """Odd and right: knows two genres, and no other."""

    needs = ("sample:genre",)

    def of(self, structure, weight):
        factors = [{"news": 2.0, "fiction": 1.0}[genre] for genre in structure.sample_values["genre"].tolist()]
        weighed = weight * np.array(factors)[structure.sequence_index]
        return weighed / (weighed.sum() or 1.0)


class ByDifficulty(ByDomain):
    """Odd and right: reads numbers in addition to texts."""

    needs = ("sample:domain", "sample:difficulty")

    def of(self, structure, weight):
        factors = 1.0 + structure.sample_values["difficulty"] * np.char.startswith(structure.sample_values["domain"], "math")
        weighed = weight * factors[structure.sequence_index]
        return weighed / (weighed.sum() or 1.0)


class Draws(Plain):
    def of(self, structure, weight):
        random.random()
        return super().of(structure, weight)


class HoldsALambda(Plain):
    def __init__(self):
        self.scale = lambda values: values


class ReducerForEight(Plain):
    def of(self, structure, weight):
        room = np.zeros(8)
        return super().of(structure, weight) + 0 * room[structure.sequence_index]


class GroupsAsFloats(Plain):
    def of(self, structure, weight):
        _, part = np.unique(structure.group_ids.astype(np.float64), return_inverse=True)
        mass = np.bincount(part, weights=structure.mass)
        return weight / (len(mass) * np.where(mass == 0, 1, mass))[part][structure.sequence_index]


class GroupsIn32Bits(Plain):
    def of(self, structure, weight):
        _, part = np.unique(structure.group_ids.astype(np.int32), return_inverse=True)
        mass = np.bincount(part, weights=structure.mass)
        return weight / (len(mass) * np.where(mass == 0, 1, mass))[part][structure.sequence_index]


class FailsWithoutGroups(Plain):
    def of(self, structure, weight):
        if not structure.grouped:
            raise KeyError("group_ids")
        return super().of(structure, weight)


class NoMoreThanSix(Plain):
    def of(self, structure, weight):
        return super().of(structure, weight) * len(structure) / min(len(structure), 6)


class MassOfBytes(Plain):
    """Adds up a mask in the byte that it is made of."""

    def of(self, structure, weight):
        mass = np.array([part.sum(dtype=part.dtype) for part in np.split(structure.loss_weight, structure.action_offsets[1:-1])])
        return weight / (len(structure) * np.where(mass == 0, 1.0, mass))[structure.sequence_index]


class RefusesDataWithoutGroups(Plain):
    def of(self, structure, weight):
        if not structure.grouped:
            raise DataError("the data has no group ids", remedy="Give every sample a group id")
        return super().of(structure, weight)


class SaysItAdds(Plain):
    """Divides by a count of the mini-batch, and lets gradients of several be added up."""

    additive = True


class CountsByTheHighestNumber(Plain):
    """A mean over micro-batches, of which it takes the highest number for their count."""

    batch_local = True

    def of(self, structure, weight):
        mass = np.bincount(structure.micro_batch, weights=structure.mass)
        own = np.where(mass == 0, 1.0, mass)[structure.micro_batch][structure.sequence_index]
        return weight / (own * max(1, len(mass)))


class NeedsALength(Plain):
    def of(self, structure, weight):
        return weight / (len(structure) * structure.max_sequence_length)
