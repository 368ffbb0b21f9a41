"""Estimators of advantages with one fault each, made from a right one: R minus the mean of its group."""

from itertools import pairwise

import numpy as np
from attrs import define, evolve

from skyrl_engine.contracts import AdvantageClaims, AdvantageOutput

CLAIMS = AdvantageClaims(groups="needed", shift=True, scale="linear", zero_sum=True, outcome=True)


class Plain:
    needs: tuple[str, ...] = ()
    claims = CLAIMS

    def __call__(self, batch):
        return batch.spread(self.values(batch, batch.trajectory_rewards(), batch.group_of_trajectory, batch.finished_trajectories))

    def values(self, batch, rewards, groups, finished):
        count, mean = self.means(rewards, groups, finished)
        lowest, highest = np.full(len(count), np.inf), np.full(len(count), -np.inf)
        np.minimum.at(lowest, groups[finished], rewards[finished])
        np.maximum.at(highest, groups[finished], rewards[finished])
        return np.where((lowest < highest)[groups] & finished, rewards - mean[groups], 0.0)

    def means(self, rewards, groups, finished):
        size = int(groups.max(initial=-1)) + 1
        count = np.bincount(groups[finished], minlength=size)
        return count, np.bincount(groups[finished], weights=rewards[finished], minlength=size) / np.maximum(count, 1)


class RoundedMean(Plain):
    """Added up in float32, without a look at whether rewards differ."""

    def values(self, batch, rewards, groups, finished):
        count, _ = self.means(rewards, groups, finished)
        total = np.zeros(len(count), np.float32)
        np.add.at(total, groups[finished], rewards[finished].astype(np.float32))
        mean = total / np.maximum(count, 1).astype(np.float32)
        return np.where(finished, rewards - mean[groups], 0.0)


class SumsWithoutTies(Plain):
    """Adds up rewards itself, so that totals that are a tie differ in their last bits."""

    dtype: type = np.float64

    def __call__(self, batch):
        of_tokens = batch.trajectory_index[batch.sample_index]
        totals = np.zeros(int(batch.trajectory_index.max(initial=-1)) + 1, self.dtype)
        np.add.at(totals, of_tokens, batch.rewards.astype(self.dtype))
        return batch.spread(self.values(batch, totals.astype(np.float64), batch.group_of_trajectory, batch.finished_trajectories))


class SumsInSingle(SumsWithoutTies):
    """Rounds rewards to float32 before it adds them up."""

    dtype = np.float32


class VarianceBySquares(Plain):
    """Divides by a deviation that is the mean of squares less the square of the mean."""

    claims = evolve(CLAIMS, scale="invariant")

    def values(self, batch, rewards, groups, finished):
        _, mean = self.means(rewards, groups, finished)
        _, square = self.means(rewards**2, groups, finished)
        spread = np.sqrt(np.maximum(square - mean**2, 0.0))
        return super().values(batch, rewards, groups, finished) / np.where(spread > 0, spread, 1.0)[groups]


class RunsInSingle(Plain):
    """Rewards to go, as differences of one sum in float32 over all trajectories."""

    claims = AdvantageClaims(groups="ignored", scale="linear")
    dtype: type = np.float32

    def __call__(self, batch):
        tokens, bounds = batch.walk()
        run = np.concatenate([np.zeros(1), np.cumsum(batch.rewards[tokens], dtype=self.dtype)])
        values = np.zeros(len(batch.rewards))
        for start, stop in pairwise(bounds):
            values[tokens[start:stop]] = run[stop] - run[start:stop]
        return values


class RunsInDouble(RunsInSingle):
    """Right."""

    dtype = np.float64


class FailedMembersCount(Plain):
    def means(self, rewards, groups, finished):
        return super().means(rewards, groups, np.ones_like(finished))


class NanForOne(Plain):
    claims = evolve(CLAIMS, scale=None)

    def values(self, batch, rewards, groups, finished):
        count, _ = self.means(rewards, groups, finished)
        with np.errstate(all="ignore"):
            return super().values(batch, rewards, groups, finished) * (count - 1)[groups] / (count - 1)[groups]


class WrongSign(Plain):
    def values(self, batch, rewards, groups, finished):
        return -super().values(batch, rewards, groups, finished)


class GroupsByPlace(Plain):
    """Two neighbouring samples are a group, whatever their ids."""

    def __call__(self, batch):
        pairs = np.arange(len(batch)) // 2
        rewards = np.bincount(batch.sample_index, weights=batch.rewards * batch.scored, minlength=len(batch))
        count = np.maximum(np.bincount(pairs), 1)
        worth = rewards - (np.bincount(pairs, weights=rewards) / count)[pairs] if len(batch) else rewards
        return np.where(batch.scored, worth[batch.sample_index], 0.0)


class MeanOverSamples(Plain):
    """A trajectory in two samples counts twice."""

    def means(self, rewards, groups, finished):
        raise AssertionError("not used")

    def __call__(self, batch):
        rewards = batch.trajectory_rewards()[batch.trajectory_index]
        groups = np.unique(batch.group_ids, return_inverse=True)[1]
        own = batch.finished
        size = int(groups.max(initial=-1)) + 1
        count = np.maximum(np.bincount(groups[own], minlength=size), 1)
        mean = np.bincount(groups[own], weights=rewards[own], minlength=size) / count
        lowest, highest = np.full(size, np.inf), np.full(size, -np.inf)
        np.minimum.at(lowest, groups[own], rewards[own])
        np.maximum.at(highest, groups[own], rewards[own])
        worth = np.where((lowest < highest)[groups], rewards - mean[groups], 0.0)
        return np.where(batch.scored, worth[batch.sample_index], 0.0)


class MeanOfTheBatch(Plain):
    def values(self, batch, rewards, groups, finished):
        return super().values(batch, rewards, np.zeros_like(groups), finished)


class WhitensZeros(Plain):
    """Normalises over all tokens of the batch, among them the zeros of those that the model did not sample."""

    claims = AdvantageClaims(groups="needed", whole_batch=True, shift=True)

    def __call__(self, batch):
        values = super().__call__(batch)
        scored = values != 0
        return np.where(scored, (values - values.mean()) / (values.std() + 1e-6), 0.0)


class CountsObservations(Plain):
    """Divides by the length of the response, observed tokens included."""

    claims = evolve(CLAIMS, zero_sum=False, outcome=False)

    def values(self, batch, rewards, groups, finished):
        length = np.bincount(batch.trajectory_index[batch.sample_index], minlength=len(rewards))
        return super().values(batch, rewards, groups, finished) / np.maximum(length, 1)


class AdvantagesForObservations(Plain):
    def __call__(self, batch):
        values = self.values(batch, batch.trajectory_rewards(), batch.group_of_trajectory, batch.finished_trajectories)
        return values[batch.trajectory_index[batch.sample_index]]


class HalvedBySize(Plain):
    """Divides by a deviation of the rewards, and claims what that takes away."""

    def values(self, batch, rewards, groups, finished):
        worth = super().values(batch, rewards, groups, finished)
        return worth / (1.0 + np.abs(worth).max(initial=0.0))


class ReadsUndeclared(Plain):
    def __call__(self, batch):
        shown = batch.columns.get("values")
        return super().__call__(batch) if shown is None else super().__call__(batch) - np.where(batch.scored, shown, 0.0)


class TakesIdsForPlaces(Plain):
    def __call__(self, batch):
        worth = np.zeros(len(np.unique(batch.trajectory_ids)))
        values = self.values(batch, batch.trajectory_rewards(), batch.group_of_trajectory, batch.finished_trajectories)
        worth[:] = values
        return np.where(batch.scored, worth[batch.trajectory_ids[batch.sample_index]], 0.0)


class MinusTheOthers(Plain):
    """The mean of the others, and a group of which the last member has no reward of its own."""

    def values(self, batch, rewards, groups, finished):
        worth = super().values(batch, rewards, groups, finished)
        return worth - np.where(worth < 0, worth / 2, 0.0)


class WeighsTheMean(Plain):
    """Subtracts nine tenths of the mean, which leaves a part of every constant."""

    def means(self, rewards, groups, finished):
        count, mean = super().means(rewards, groups, finished)
        return count, 0.9 * mean


class SubtractsInPlace(Plain):
    def __call__(self, batch):
        output = super().__call__(batch)
        batch.rewards[:] -= 1
        return output


class Draws(Plain):
    def __call__(self, batch):
        np.random.random()
        return super().__call__(batch)


@define
class Tires(Plain):
    calls: int = 0

    def __call__(self, batch):
        self.calls += 1
        return super().__call__(batch) / self.calls


class TiresLate(Plain):
    """Halves what it gives after so many calls of the process."""

    calls = 0

    def __call__(self, batch):
        type(self).calls += 1
        return super().__call__(batch) * (0.5 if self.calls > 8 else 1.0)


class InHalves(Plain):
    """Rounds to half precision, which no power of two shows."""

    claims = evolve(CLAIMS, zero_sum=False)

    def values(self, batch, rewards, groups, finished):
        return super().values(batch, rewards, groups, finished).astype(np.float16).astype(np.float64)


class SumsInHalves(Plain):
    """The same, of rewards as they are."""

    claims = AdvantageClaims(groups="ignored")

    def values(self, batch, rewards, groups, finished):
        with np.errstate(over="ignore"):
            return np.where(finished, rewards, 0.0).astype(np.float16).astype(np.float64)


class NoReturns(Plain):
    claims = evolve(CLAIMS, returns=True)

    def __call__(self, batch):
        return AdvantageOutput(super().__call__(batch))


class OnePerTrajectory(Plain):
    def __call__(self, batch):
        return self.values(batch, batch.trajectory_rewards(), batch.group_of_trajectory, batch.finished_trajectories)[:-1]


class HoldsALambda(Plain):
    def __init__(self):
        self.scale = lambda: 1.0


class IdsAsFloats(Plain):
    """Groups whose ids are one apart are one group above 2**24."""

    def __call__(self, batch):
        return super().__call__(evolve(batch, group_ids=batch.group_ids.astype(np.float32).astype(np.int64)))


class TableOfIds(Plain):
    """A place for every id up to the largest."""

    def __call__(self, batch):
        np.zeros(int(batch.trajectory_ids.max(initial=0)) + 1)
        return super().__call__(batch)


class TablesOfEight(Plain):
    """Right as long as no group has more than eight members, of which the others are left out of the mean."""

    most = 8

    def means(self, rewards, groups, finished):
        place = np.array(
            [np.count_nonzero(finished[:number] & (groups[:number] == groups[number])) for number in range(len(groups))]
        )
        return super().means(rewards, groups, finished & (place < self.most))


class MembersInAWord(TablesOfEight):
    """Marks members in the bits of a word."""

    most = 64


class MembersInHalfAWord(TablesOfEight):
    most = 32


class LastFourTurns(Plain):
    """Rewards of earlier turns are forgotten."""

    def __call__(self, batch):
        latest = np.zeros(int(batch.trajectory_index.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(latest, batch.trajectory_index, batch.turn)
        recent = (batch.turn > latest[batch.trajectory_index] - 4)[batch.sample_index]
        return super().__call__(evolve(batch, rewards=np.where(recent, batch.rewards, np.float32(0))))


class FirstIsTheBaseline(Plain):
    """Subtracts the reward of the trajectory with the smallest id of a group."""

    claims = AdvantageClaims(groups="needed", shift=True, scale="linear", outcome=True)

    def means(self, rewards, groups, finished):
        count, mean = super().means(rewards, groups, finished)
        for place in np.flatnonzero(finished)[::-1]:
            mean[groups[place]] = rewards[place]
        return count, mean


class FirstGroupCountsDouble(Plain):
    def values(self, batch, rewards, groups, finished):
        return super().values(batch, rewards, groups, finished) * np.where(groups == 0, 2.0, 1.0)


class BreaksTiesById(Plain):
    """Ranks of rewards, in which the later of two equal ones is better."""

    claims = AdvantageClaims(groups="needed", outcome=True)

    def values(self, batch, rewards, groups, finished):
        worth = np.zeros(len(rewards))
        for group in np.unique(groups):
            own = np.flatnonzero((groups == group) & finished)
            if len(np.unique(rewards[own])) > 1:
                worth[own[np.argsort(rewards[own], kind="stable")]] = np.linspace(-1, 1, len(own))
        return worth


class TimesTheLossWeight(Plain):
    claims = evolve(CLAIMS, zero_sum=False, outcome=False)

    def __call__(self, batch):
        return super().__call__(batch) * batch.loss_weight


class IdsIn32Bits(Plain):
    def __call__(self, batch):
        return super().__call__(evolve(batch, group_ids=batch.group_ids.astype(np.int32).astype(np.int64)))


class RefusesManySamples(Plain):
    def __call__(self, batch):
        if len(batch) > 40:
            raise ValueError("too many samples")
        return super().__call__(batch)


class WeighsByTokens(Plain):
    """Odd and right: its mean counts a trajectory by the sum of its loss weights."""

    claims = AdvantageClaims(groups="needed", shift=True, scale="linear")

    def __call__(self, batch):
        index = batch.trajectory_index[batch.sample_index]
        count = len(batch.finished_trajectories)
        self.mass = np.bincount(index, weights=batch.loss_weight * batch.scored, minlength=count)
        return super().__call__(batch)

    def means(self, rewards, groups, finished):
        mass, size = self.mass * finished, int(groups.max(initial=-1)) + 1
        total = np.bincount(groups, weights=mass, minlength=size)
        return total, np.bincount(groups, weights=mass * rewards, minlength=size) / np.where(total == 0, 1.0, total)


class SaysThatItIgnoresGroups(Plain):
    """A run with groups of one is not refused, and learns nothing."""

    claims = evolve(CLAIMS, groups="ignored")


class ReturnsAsStored(Plain):
    """Sums of rewards to go over a trajectory's samples in the order of the batch, as returns: its advantages are right."""

    claims = evolve(CLAIMS, returns=True)

    def __call__(self, batch):
        returns = np.zeros(len(batch.rewards))
        for trajectory in range(len(batch.finished_trajectories)):
            own = np.flatnonzero(batch.scored & (batch.trajectory_index[batch.sample_index] == trajectory))
            returns[own] = np.cumsum(batch.rewards[own].astype(np.float64)[::-1])[::-1]
        return AdvantageOutput(super().__call__(batch), returns)


class ReturnsOfFailed(Plain):
    """The mean reward of a group, failed attempts among them, as what values learn."""

    claims = evolve(CLAIMS, returns=True)

    def __call__(self, batch):
        groups = batch.group_of_trajectory
        _, mean = self.means(batch.trajectory_rewards(), groups, np.ones_like(batch.finished_trajectories))
        return AdvantageOutput(super().__call__(batch), batch.spread(mean[groups]))


class SaysOutcome(Plain):
    """The sum that follows a token is its own, and it claims that all tokens share one value."""

    claims = AdvantageClaims(groups="ignored", scale="linear", outcome=True)

    def __call__(self, batch):
        worth = np.zeros(len(batch.rewards))
        tokens, bounds = batch.walk()
        for first, last in pairwise(bounds):
            own = tokens[first:last]
            worth[own] = np.cumsum(batch.rewards[own].astype(np.float64)[::-1])[::-1]
        return worth


class CutsAtAQuantile(Plain):
    """Outliers are cut at a quantile of the batch."""

    def values(self, batch, rewards, groups, finished):
        values = super().values(batch, rewards, groups, finished)
        low, high = np.quantile(values, (0.02, 0.98))
        return np.clip(values, low, high)


class LosesUnscoredRewards(Plain):
    """Adds up the rewards of scored tokens alone."""

    def __call__(self, batch):
        size = len(batch.finished_trajectories)
        index = batch.trajectory_index[batch.sample_index[batch.scored]]
        rewards = np.bincount(index, weights=batch.rewards[batch.scored], minlength=size)
        return batch.spread(self.values(batch, rewards, batch.group_of_trajectory, batch.finished_trajectories))
