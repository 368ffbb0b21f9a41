"""Group filters with one fault each, made from a right one: a group of equal rewards is dropped."""

import math
import random
from typing import ClassVar

import numpy as np
from attrs import define, field


class Plain:
    def __call__(self, group):
        return "zero_variance" if group.rewards.max() == group.rewards.min() else None


class AnswersYes:
    """True and False, as in other engines, where a text is due."""

    def __call__(self, group):
        return bool(group.rewards.max() == group.rewards.min())


class EmptyReason(Plain):
    def __call__(self, group):
        return "" if super().__call__(group) else None


class ReasonOfTheEngine(Plain):
    def __call__(self, group):
        return "failed" if super().__call__(group) else None


class NeedsTwo:
    """The deviation with n - 1, which a group of one does not have."""

    def __call__(self, group):
        with np.errstate(all="raise"):
            return "zero_variance" if group.rewards.var(ddof=1) == 0 else None


class ReadsTokens(Plain):
    """No filter is shown them."""

    def __call__(self, group):
        return "empty" if any(len(ids) == 0 for ids in group.token_ids) else super().__call__(group)


class LooksAtTheFirst:
    def __call__(self, group):
        return "first_failed" if group.rewards[0] <= 0 else None


class ComparesNeighbours:
    def __call__(self, group):
        return "falling" if (np.diff(group.rewards) < 0).any() else None


@define
class DropsRepeats(Plain):
    """Keeps the first of two groups alike."""

    seen: list[float] = field(factory=list)

    def __call__(self, group):
        mean = float(np.sort(group.rewards).mean())
        if mean in self.seen:
            return "seen"
        self.seen.append(mean)
        return None


@define
class LimitsDrops(Plain):
    """Drops three groups, and then no more."""

    left: int = 3

    def __call__(self, group):
        if self.left == 0 or Plain.__call__(self, group) is None:
            return None
        self.left -= 1
        return "zero_variance"


class DropsAtRandom:
    def __call__(self, group):
        return "unlucky" if random.random() < 0.5 else None


class DrawsFromNumpy(Plain):
    """The answer is right, and the run's random state is another one afterwards."""

    def __call__(self, group):
        np.random.random()
        return super().__call__(group)


class NumberInTheReason:
    def __call__(self, group):
        return f"mean {group.rewards.mean():.4g} of {len(group.rewards)}"[:60]


class RoundedMeanInTheReason:
    def __call__(self, group):
        mean = math.fsum(group.rewards) / len(group.rewards)
        return f"mean {mean:.1f}" if mean < 1 else None


class NamesTheEnvironment:
    def __call__(self, group):
        return f"old, of {group.environment}" if group.staleness > 2 else None


class TakesALogarithm(Plain):
    """Takes that of a reward whose least value its author knows."""

    def __call__(self, group):
        return "low" if math.log(group.rewards.min() + 150) < 4 else super().__call__(group)


class RoundsTheMean:
    """Is as far from its bound as the order of a sum decides."""

    def __call__(self, group):
        return "low" if group.rewards.mean() < 0.5 else None


class DropsEveryFortieth:
    """Drops every fortieth group of the process, whichever filter is asked."""

    calls = 0

    def __call__(self, group):
        type(self).calls += 1
        return "every_fortieth" if self.calls % 40 == 0 else None


class SizeInTheReason:
    def __call__(self, group):
        return f"flat, of {len(group.rewards)}" if group.rewards.max() == group.rewards.min() else None


class SortsInPlace(Plain):
    def __call__(self, group):
        group.rewards.sort()
        return super().__call__(group)


class ForgetsTheGroup(Plain):
    """Marks in the view what it dropped."""

    def __call__(self, group):
        group.truncated[:] = True
        return super().__call__(group)


class HoldsALambda(Plain):
    def __init__(self):
        self.equal = lambda rewards: rewards.max() == rewards.min()


class KnowsEight(Plain):
    """A table of weights for groups of up to eight."""

    weights = np.arange(8)[::-1] / 8

    def __call__(self, group):
        assert self.weights[len(group.rewards) - 1] >= 0
        return super().__call__(group)


class KnowsTwoEnvironments(Plain):
    """A table of the environments that its author tried."""

    least: ClassVar = {"first": 1, "second": 1}

    def __call__(self, group):
        return super().__call__(group) if len(group.rewards) >= self.least[group.environment] else "small"


class KnowsFourAges(Plain):
    def __call__(self, group):
        return (None, None, None, "old")[group.staleness] or super().__call__(group)


class RefusesThirtyTwo(Plain):
    def __call__(self, group):
        if len(group.rewards) == 32:
            raise ValueError("no room for 32")
        return super().__call__(group)


class LooksAtEight(Plain):
    def __call__(self, group):
        first = group.rewards[:8]
        return "zero_variance" if len(group.rewards) > 8 and first.max() == first.min() else super().__call__(group)


class CutsLongAttempts(Plain):
    """Clears the rewards of long attempts of large groups."""

    def __call__(self, group):
        if len(group.rewards) > 8:
            group.rewards[group.lengths > 8] = 0
        return super().__call__(group)


class ByQuantiles:
    """Odd and right: groups whose middle half is of one reward."""

    def __call__(self, group):
        low, high = np.quantile(np.sort(group.rewards), (0.25, 0.75))
        return "middle_alike" if low == high and len(group.rewards) > 3 else None


class GivesEightReasons:
    """Odd and right: a reason for every kind of group that it knows."""

    def __call__(self, group):
        if group.rewards.max() == group.rewards.min():
            return f"all_{'right' if group.success.all() else 'wrong' if not group.success.any() else 'alike'}"
        if group.truncated.all():
            return "truncated"
        if group.lengths.max() < 40:
            return "short"
        return (
            "old" if group.staleness > 6 else "small" if len(group.rewards) < 3 else "long" if group.lengths.min() > 400 else None
        )


class ByEnvironment:
    """Odd and right: old groups of one environment."""

    def __call__(self, group):
        return "old" if group.environment == "second" and group.staleness > 1 else None


class NamesTheStaleness:
    def __call__(self, group):
        return f"stale_{group.staleness}" if group.staleness > 1 else None


class DeviationOfNothing:
    """Equal rewards have a deviation of 0, but for rounding."""

    def __call__(self, group):
        return "zero_variance" if np.sort(group.rewards).std() == 0 else None


class VarianceInHalves:
    def __call__(self, group):
        with np.errstate(all="ignore"):
            return "zero_variance" if not np.sort(group.rewards).astype(np.float16).var() > 0 else None


class RangeInSingle:
    def __call__(self, group):
        return "zero_variance" if np.ptp(group.rewards.astype(np.float32)) == 0 else None
