"""Mergers that are wrong on purpose, one fault each."""

import numpy as np
from attrs import evolve

from skyrl_engine import OutputError
from skyrl_engine.contracts import PADDING_SAMPLE, BatchOutput, Metric, Ragged, RankOutput


class Plain:
    """The slow obvious merger, right in everything; spoilt below."""

    def collecting(self, outputs):
        return [output for output in outputs if output.coords.collects]

    def without_padding(self, whole):
        return whole.take(np.flatnonzero(whole.sample_ids != PADDING_SAMPLE))

    def check(self, whole, expected):
        if sorted(whole.sample_ids.tolist()) != sorted(expected.tolist()):
            raise OutputError("the samples are not those of the plan", remedy="Return each of them once")

    def places(self, whole, expected):
        found = {each: place for place, each in reversed(list(enumerate(whole.sample_ids.tolist())))}
        return [found[each] for each in expected.tolist() if each in found]

    def metrics(self, outputs, whole):
        return whole.metrics

    def merge(self, outputs, plan):
        collected = self.collecting(outputs)
        whole = self.without_padding(RankOutput.concat(collected))
        self.check(whole, plan.expected_ids)
        whole = whole.take(self.places(whole, plan.expected_ids))
        return BatchOutput(whole.sample_ids, whole.action_lengths, whole.scored, whole.fields, self.metrics(collected, whole))


class Trusting(Plain):
    def check(self, whole, expected):
        pass

    def places(self, whole, expected):
        return np.argsort(whole.sample_ids, kind="stable")


class DropsRanksAboveZero(Trusting):
    def collecting(self, outputs):
        return [output for output in super().collecting(outputs) if output.coords.dp == 0]


class DropsTheLastSample(Trusting):
    def places(self, whole, expected):
        return super().places(whole, expected)[:-1]


class KeepsTheFirstMiniBatch(Trusting):
    def collecting(self, outputs):
        return list({output.coords.rank: output for output in reversed(super().collecting(outputs))}.values())


class KeepsTensorReplicas(Trusting):
    def collecting(self, outputs):
        return [output for output in outputs if output.coords.last_stage and output.coords.cp == 0]


class KeepsPadding(Trusting):
    def without_padding(self, whole):
        return whole


class OrderOfArrival(Plain):
    def places(self, whole, expected):
        return range(len(whole.sample_ids))


class OrderOfRanks(Plain):
    """Right as long as ids are given out in the order in which the plan deals them to ranks."""

    def places(self, whole, expected):
        return range(len(whole.sample_ids))

    def collecting(self, outputs):
        return sorted(super().collecting(outputs), key=lambda output: output.coords.dp)


class ForgetsTheValues(Plain):
    """Puts ids into order and leaves the values where they were."""

    def merge(self, outputs, plan):
        made = super().merge(outputs, plan)
        whole = self.without_padding(RankOutput.concat(self.collecting(outputs)))
        return evolve(made, scored=whole.scored, fields=whole.fields)


class Doubles(Plain):
    def merge(self, outputs, plan):
        made = super().merge(outputs, plan)
        return evolve(
            made, fields={name: Ragged(each.values.astype(np.float64), each.offsets) for name, each in made.fields.items()}
        )


class MeanOfMeans(Plain):
    def metrics(self, outputs, whole):
        means = [output.metrics["a_mean"].result for output in outputs if "a_mean" in output.metrics]
        return {**whole.metrics, "a_mean": Metric.mean(float(np.mean(means)), 1)}


class SumsByName(Plain):
    """A rule that looks at the name: what does not end in mean is a sum."""

    def metrics(self, outputs, whole):
        most = sum(output.metrics["a_max"].value for output in outputs if "a_max" in output.metrics)
        return {**whole.metrics, "a_max": Metric.max(most)}


class CountsReplicas(Plain):
    def merge(self, outputs, plan):
        made = super().merge(outputs, plan)
        filled = [output for output in outputs if output.metrics]
        return evolve(made, metrics=RankOutput.concat(filled).metrics)


class SilentWhereOneIsMissing(Plain):
    def check(self, whole, expected):
        if not set(whole.sample_ids.tolist()) <= set(expected.tolist()) or len(set(whole.sample_ids.tolist())) < len(
            whole.sample_ids
        ):
            raise OutputError("a sample came twice, or was never planned", remedy="Return each of them once")


class SilentWhereOneIsDoubled(Plain):
    def check(self, whole, expected):
        if set(whole.sample_ids.tolist()) != set(expected.tolist()):
            raise OutputError("samples are missing or were never planned", remedy="Return each of them once")


class SilentWhereOneIsUnexpected(Plain):
    def check(self, whole, expected):
        ids = whole.sample_ids.tolist()
        if not set(ids) >= set(expected.tolist()) or len(set(ids)) < len(ids):
            raise OutputError("samples are missing or came twice", remedy="Return each of them once")


class WritesInPlace(Plain):
    def merge(self, outputs, plan):
        made = super().merge(outputs, plan)
        for output in outputs:
            output.sample_ids[:] = 0
        return made


class HoldsALambda(Plain):
    def __init__(self):
        self.key = lambda output: output.coords.dp
