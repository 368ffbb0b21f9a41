"""Mergers that are wrong on purpose, one fault each."""

import numpy as np
from attrs import evolve

from skyrl_engine import OutputError
from skyrl_engine.contracts import PADDING_SAMPLE, BatchOutput, Metric, Ragged, RankOutput


class Plain:
    """The slow obvious merger, right in everything; spoilt below."""

    def collecting(self, outputs):
        return sorted((output for output in outputs if output.coords.collects), key=lambda output: output.coords.dp)

    def without_padding(self, whole):
        return whole.take(np.flatnonzero(whole.sample_ids != PADDING_SAMPLE))

    def check(self, whole, expected):
        if sorted(whole.sample_ids.tolist()) != sorted(expected.tolist()):
            raise OutputError("the samples are not those of the plan", remedy="Return each of them once")

    def places(self, whole, expected):
        found = {sample: place for place, sample in reversed(list(enumerate(whole.sample_ids.tolist())))}
        return [found[sample] for sample in expected.tolist() if sample in found]

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
        """In the caller's order; what nobody planned comes last."""
        planned = {sample: place for place, sample in enumerate(expected.tolist())}
        ids = whole.sample_ids.tolist()
        return sorted(range(len(ids)), key=lambda place: planned.get(ids[place], len(planned)))


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
        of_replicas = [output for output in outputs if output.coords.last_stage and output.coords.cp == 0]
        return sorted(of_replicas, key=lambda output: output.coords.dp)


class KeepsPadding(Trusting):
    def without_padding(self, whole):
        return whole


class MetricsAsTheyArrive(Plain):
    """Adds up the numbers of ranks in the order in which they answer: other bits on another day."""

    def collecting(self, outputs):
        return [output for output in outputs if output.coords.collects]


class OrderOfArrival(MetricsAsTheyArrive):
    def places(self, whole, expected):
        return range(len(whole.sample_ids))


class OrderOfRanks(Plain):
    """Right as long as ids are given out in the order in which the plan deals them to ranks."""

    def places(self, whole, expected):
        return range(len(whole.sample_ids))


class ForgetsTheValues(Plain):
    """Puts ids into order and leaves the values where they were."""

    def merge(self, outputs, plan):
        merged = super().merge(outputs, plan)
        whole = self.without_padding(RankOutput.concat(self.collecting(outputs)))
        return evolve(merged, scored=whole.scored, fields=whole.fields)


class Doubles(Plain):
    def merge(self, outputs, plan):
        merged = super().merge(outputs, plan)
        return evolve(
            merged, fields={name: Ragged(field.values.astype(np.float64), field.offsets) for name, field in merged.fields.items()}
        )


class MeanOfMeans(Plain):
    def metrics(self, outputs, whole):
        parts = [output.metrics["a_mean"] for output in outputs if "a_mean" in output.metrics]
        means = [part.result for part in parts if part.count]
        return {**whole.metrics, "a_mean": Metric.mean(float(np.mean(means)), 1)} if means else whole.metrics


class MeanOfRanks(Plain):
    """The mean of the means, over as many things as there are."""

    def metrics(self, outputs, whole):
        parts = [output.metrics["a_mean"] for output in outputs if "a_mean" in output.metrics and output.metrics["a_mean"].count]
        if not parts:
            return whole.metrics
        count = whole.metrics["a_mean"].count
        return {**whole.metrics, "a_mean": Metric.mean(float(np.mean([part.result for part in parts])) * count, count)}


class LargestFromZero(Plain):
    def metrics(self, outputs, whole):
        most = max([0.0, *(output.metrics["a_max"].value for output in outputs if "a_max" in output.metrics)])
        return {**whole.metrics, "a_max": Metric.max(most)}


class ExtremesOfTheFirstRank(Plain):
    def metrics(self, outputs, whole):
        return {
            **whole.metrics,
            **{name: metric for name, metric in outputs[0].metrics.items() if metric.reduction in ("min", "max")},
        }


class DropsWhatIsNotFinite(Plain):
    def metrics(self, outputs, whole):
        return {name: metric for name, metric in whole.metrics.items() if np.isfinite(metric.result) or metric.reduction == "mean"}


class ForgetsIdleRanks(Plain):
    def metrics(self, outputs, whole):
        return RankOutput.concat([output for output in outputs if len(output.sample_ids)]).metrics


class FieldsOfTheFirstRank(Plain):
    def merge(self, outputs, plan):
        merged = super().merge(outputs, plan)
        names = self.collecting(outputs)[0].fields
        return evolve(merged, fields={name: field for name, field in merged.fields.items() if name in names})


class ExpectsTheWholeBatch(Plain):
    """Right where all mini-batches come in one call."""

    def check(self, whole, expected):
        if sorted(whole.sample_ids.tolist()) != sorted(self.planned.tolist()):
            raise OutputError("the samples are not those of the plan", remedy="Return each of them once")

    def merge(self, outputs, plan):
        self.planned = plan.sample_ids
        return super().merge(outputs, plan)


class ThroughFloat64(Plain):
    """Looks ids up as floats: those above 2^53 fall together."""

    def places(self, whole, expected):
        found = {float(sample): place for place, sample in enumerate(whole.sample_ids.tolist())}
        return [found[float(sample)] for sample in expected.tolist()]


class RemembersPlaces(Plain):
    """Takes samples from where they lay when the same ids came before."""

    def __init__(self):
        self.known = {}

    def places(self, whole, expected):
        return self.known.setdefault(expected.tobytes(), super().places(whole, expected))


class RefusesTwoMiniBatchesOfTwo(Plain):
    def merge(self, outputs, plan):
        if len(plan.mini_batches) == 2 and len(outputs) == 4:
            raise OutputError("two mini-batches of two ranks", remedy="Return one")
        return super().merge(outputs, plan)


class ForgetsEveryTwentieth(Plain):
    """Loses the metrics of every twentieth batch of the process."""

    calls = 0

    def merge(self, outputs, plan):
        type(self).calls += 1
        merged = super().merge(outputs, plan)
        return evolve(merged, metrics={}) if self.calls % 20 == 0 else merged


class SumsByName(Plain):
    """A rule that looks at the name: what does not end in mean is a sum."""

    def metrics(self, outputs, whole):
        most = sum(output.metrics["a_max"].value for output in outputs if "a_max" in output.metrics)
        return {**whole.metrics, "a_max": Metric.max(most)}


class CountsReplicas(Plain):
    def merge(self, outputs, plan):
        merged = super().merge(outputs, plan)
        filled = sorted((output for output in outputs if output.metrics), key=lambda output: output.coords.rank)
        return evolve(merged, metrics=RankOutput.concat(filled).metrics)


class SilentWhereOneIsMissing(Plain):
    def check(self, whole, expected):
        if not set(whole.sample_ids.tolist()) <= set(expected.tolist()) or len(set(whole.sample_ids.tolist())) < len(
            whole.sample_ids
        ):
            raise OutputError("a sample came twice, or was never planned", remedy="Return each of them once")


class SilentWhereTheLastIsMissing(Plain):
    """Looks for every planned sample but the last: its loop ended too soon."""

    def check(self, whole, expected):
        ids = whole.sample_ids.tolist()
        lost = [sample for sample in expected.tolist()[:-1] if sample not in ids]
        if lost or len(set(ids)) < len(ids) or not set(ids) <= set(expected.tolist()):
            raise OutputError("the samples are not those of the plan", remedy="Return each of them once")


class CountsSamples(Plain):
    """Compares how many samples come with how many were planned."""

    def check(self, whole, expected):
        if len(whole.sample_ids) != len(expected) or not set(whole.sample_ids.tolist()) <= set(expected.tolist()):
            raise OutputError("the samples are not those of the plan", remedy="Return each of them once")


class SeesRepeatsOfARank(Plain):
    """Refuses what one rank returns twice, and not what two ranks return."""

    def merge(self, outputs, plan):
        for output in outputs:
            real = output.sample_ids[output.sample_ids != PADDING_SAMPLE]
            if len(np.unique(real)) < len(real):
                raise OutputError("a rank returns a sample twice", remedy="Return each of them once")
        return super().merge(outputs, plan)

    def check(self, whole, expected):
        if set(whole.sample_ids.tolist()) != set(expected.tolist()):
            raise OutputError("samples are missing or were never planned", remedy="Return each of them once")


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
        merged = super().merge(outputs, plan)
        for output in outputs:
            output.sample_ids[:] = 0
        return merged


class HoldsALambda(Plain):
    def __init__(self):
        self.key = lambda output: output.coords.dp


class RefusesTwoRanks(Plain):
    """Written for one data-parallel rank."""

    def collecting(self, outputs):
        collected = super().collecting(outputs)
        if len({output.coords.dp for output in collected}) > 1:
            raise OutputError("outputs come from several ranks", remedy="Train on one")
        return collected


class RoomForThirty(Plain):
    most = 30

    def places(self, whole, expected):
        room = np.zeros(self.most, dtype=np.int64)
        room[: len(expected)] = super().places(whole, expected)
        return room[: len(expected)]


class RoomForAWord(RoomForThirty):
    """A place for each sample of a mini-batch that 64 bits can mark."""

    most = 64


class RefusesEmptyRanks(Plain):
    def collecting(self, outputs):
        collected = super().collecting(outputs)
        if any(not len(output.sample_ids) for output in collected):
            raise OutputError("a rank returns no sample", remedy="Give every rank one")
        return collected


class NeedsValuesPerToken(Plain):
    def merge(self, outputs, plan):
        assert any(output.fields for output in outputs), "nothing per token"
        return super().merge(outputs, plan)


class TableOfIds(Plain):
    """One slot for every id up to the largest."""

    def places(self, whole, expected):
        table = np.zeros(int(whole.sample_ids.max()) + 1, dtype=np.int64)
        table[whole.sample_ids] = np.arange(len(whole.sample_ids))
        return table[expected]


class DividesEveryPart(Plain):
    """The mean of every rank first, also of one without a sample."""

    def metrics(self, outputs, whole):
        for output in outputs:
            for metric in output.metrics.values():
                assert metric.reduction != "mean" or metric.value / metric.count is not None
        return whole.metrics


class CutsIdsTo32Bits(Plain):
    def merge(self, outputs, plan):
        merged = super().merge(outputs, plan)
        return evolve(merged, sample_ids=merged.sample_ids.astype(np.int32).astype(np.int64))


class OrderOfIds(Plain):
    """Right as long as callers number samples as they come."""

    def places(self, whole, expected):
        return np.argsort(whole.sample_ids)


class FieldChange(Plain):
    """Every field as `change` makes it."""

    def merge(self, outputs, plan):
        merged = super().merge(outputs, plan)
        return evolve(
            merged, fields={name: Ragged(self.change(field.values), field.offsets) for name, field in merged.fields.items()}
        )


class ThroughHalfPrecision(FieldChange):
    def change(self, values):
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)


class MendsNaN(FieldChange):
    def change(self, values):
        return np.nan_to_num(values)


class LosesNegativeZeros(FieldChange):
    def change(self, values):
        return values + np.float32(0)


class KnowsTwoFields(Plain):
    def merge(self, outputs, plan):
        merged = super().merge(outputs, plan)
        return evolve(merged, fields={name: field for name, field in merged.fields.items() if name in ("logprobs", "token_loss")})


class MetricsOfTheFirstRank(Plain):
    """Looks for the names that the first rank reports."""

    def metrics(self, outputs, whole):
        names = next((output.metrics.keys() for output in outputs), ())
        return {name: metric for name, metric in whole.metrics.items() if name in names}


class MeansAsSums(Plain):
    """Divides means, and hands the result on as if it were a sum."""

    def metrics(self, outputs, whole):
        return {name: Metric.sum(metric.result) if metric.reduction == "mean" else metric for name, metric in whole.metrics.items()}


class ReusesItsMemory(Plain):
    def __init__(self):
        self.memory = {}

    def merge(self, outputs, plan):
        merged = super().merge(outputs, plan)
        fields = {}
        for name, field in merged.fields.items():
            buffer = self.memory.setdefault((name, len(field.values)), np.zeros_like(field.values))
            buffer[:] = field.values
            fields[name] = Ragged(buffer, field.offsets)
        return evolve(merged, fields=fields)


class TakesTurnsWithBuffers(Plain):
    """Lends three blocks of memory in turn."""

    def __init__(self):
        self.blocks = [np.zeros(4096, np.float32) for _ in range(3)]

    def merge(self, outputs, plan):
        merged = super().merge(outputs, plan)
        self.blocks = [*self.blocks[1:], self.blocks[0]]
        fields, start = {}, 0
        for name, field in merged.fields.items():
            lent = self.blocks[0][start : start + len(field.values)]
            lent[:] = field.values
            fields[name], start = Ragged(lent, field.offsets), start + len(field.values)
        return evolve(merged, fields=fields)


class AddsUpOverCalls(Plain):
    def __init__(self):
        self.total = 0.0

    def metrics(self, outputs, whole):
        self.total += whole.metrics["a_sum"].value if "a_sum" in whole.metrics else 0.0
        return {**whole.metrics, "a_sum": Metric.sum(self.total)}


class SampleBySample(Plain):
    """Odd and right: takes one sample after the other, and joins them."""

    def merge(self, outputs, plan):
        merged = super().merge(outputs, plan)
        whole = RankOutput(merged.sample_ids, merged.action_lengths, merged.scored, merged.fields)
        joined = RankOutput.concat([whole.take([place]) for place in range(len(merged))])
        return evolve(merged, scored=joined.scored, fields=joined.fields)


class FieldsByName(Plain):
    """Odd and right: fields and metrics in the order of their names."""

    def merge(self, outputs, plan):
        merged = super().merge(outputs, plan)
        return evolve(merged, fields=dict(sorted(merged.fields.items())), metrics=dict(sorted(merged.metrics.items())))


class CountsItsCalls(Plain):
    """Odd and right: keeps a number that changes nothing."""

    calls = 0

    def merge(self, outputs, plan):
        self.calls += 1
        return super().merge(list(outputs)[::-1], plan)
