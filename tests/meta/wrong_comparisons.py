"""Environments that compare attempts, with one fault each."""

import os
import random
import tempfile

from environment_of_sums import Episode, Plain

from skyrl_engine.contracts import EnvironmentClaims, StepResult


class NothingYetEpisode(Episode):
    """Pays when the group is compared."""

    def step(self, action):
        return StepResult(0.0)


class Longest(Plain):
    """Right: the share of the others that are shorter; equal texts are a tie."""

    claims = EnvironmentClaims(pass_threshold=None, compares=True)
    episode = NothingYetEpisode
    solve = None

    def compare(self, task, attempts):
        return [StepResult(value) for value in self.values([len(attempt.text) for attempt in attempts])]

    def values(self, lengths):
        return [sum(own > other for other in lengths) / (len(lengths) - 1) for own in lengths]


class LeavesOneOut(Longest):
    def compare(self, task, attempts):
        return super().compare(task, attempts)[1:]


class ReturnsNumbers(Longest):
    def compare(self, task, attempts):
        return [result.reward for result in super().compare(task, attempts)]


class DividesByTheSpread(Longest):
    """Equal texts have no spread."""

    def values(self, lengths):
        return [own / (max(lengths) - min(lengths)) for own in lengths]


class SetInInfoOfComparison(Longest):
    def compare(self, task, attempts):
        return [StepResult(0.0, info={"texts": {attempt.text}}) for attempt in attempts]


class PrefersTheFirst(Longest):
    def values(self, lengths):
        return [value + (0.1 if place == 0 else 0.0) for place, value in enumerate(super().values(lengths))]


class RanksTies(Longest):
    """Sorts, and so has an order of equal texts."""

    def values(self, lengths):
        order = sorted(range(len(lengths)), key=lambda place: lengths[place])
        return [float(order.index(place)) for place in range(len(lengths))]


class ElectsOne(Longest):
    """The first of the longest is a success."""

    def compare(self, task, attempts):
        results = super().compare(task, attempts)
        best = max(range(len(results)), key=lambda place: results[place].reward)
        return [StepResult(0.0, success=place == best) for place in range(len(results))]


class RemembersTheLongest(Longest):
    """Rewards are shares of the longest text that it has ever seen."""

    def values(self, lengths):
        self.longest = max(1, getattr(self, "longest", 0), *lengths)
        return [own / self.longest for own in lengths]


class OwnNoiseOfComparison(Longest):
    def values(self, lengths):
        return [value + random.Random().random() for value in super().values(lengths)]


class GlobalNoiseOfComparison(Longest):
    def compare(self, task, attempts):
        random.random()
        return super().compare(task, attempts)


class ShufflesItsList(Longest):
    """Right rewards, of a list that it has turned around."""

    def compare(self, task, attempts):
        results = super().compare(task, attempts)
        attempts.reverse()
        return results


class AddsToTheTask(Longest):
    def compare(self, task, attempts):
        task.data["judged"] = len(attempts)
        return super().compare(task, attempts)


class ComparesByHash(Longest):
    def compare(self, task, attempts):
        return [StepResult(float(hash(attempt.text) % 1000)) for attempt in attempts]


class ComparesElsewhere(Longest):
    def compare(self, task, attempts):
        os.chdir(tempfile.gettempdir())
        return super().compare(task, attempts)
