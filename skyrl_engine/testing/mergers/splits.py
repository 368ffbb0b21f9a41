"""Splits for mergers: a batch's outputs, split over mini-batches, ranks and micro-batches as the engine's backends would return them."""

from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
from attrs import evolve, field, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.values.outputs import PADDING_SAMPLE, BatchOutput, Metric, RankOutput
from skyrl_engine.contracts.values.plan import BatchPlan, Layout, MiniBatchPlan, one_sample_per_row
from skyrl_engine.contracts.values.ragged import IntArray, Ragged, offsets_of
from skyrl_engine.contracts.values.topology import RankCoords, Topology

FIELDS = ("logprobs", "token_loss", "entropy", "values", "a_field_of_my_own")

SPECIAL = (0.0, -0.0, float("nan"), float("inf"), float("-inf"), float(np.finfo(np.float32).smallest_subnormal), 3.4e38)


@frozen(eq=False)
class Split:
    """`whole` is what merging `outputs` by `plan` must give. `padded` says that ranks return padding samples among their own.

    Values are any float32 numbers, and ids any of 63 bits; metrics are of small whole numbers, so that sums are exact in any order.
    """

    whole: BatchOutput
    plan: BatchPlan
    topology: Topology
    outputs: tuple[RankOutput, ...]
    padded: bool = False

    def but(self, outputs: Iterable[RankOutput]) -> "Split":
        """Return the split with other outputs."""
        return evolve(self, outputs=tuple(outputs))

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {getattr(self.topology, name)}" for name in ("dp", "tp", "cp", "pp"))
        lines = [
            f"samples {_ids(self.whole.sample_ids)} in {_format_count(len(self.plan.mini_batches), 'mini-batch')} over {sizes}"
        ]
        lines += [
            f"rank {output.coords.rank} (dp {output.coords.dp}, tp {output.coords.tp}, cp {output.coords.cp}, pp {output.coords.pp}) returns "
            f"{_ids(output.sample_ids)}"
            for output in self.outputs
        ]
        return "\n".join(lines)


def _ids(ids: IntArray) -> str:
    return ", ".join("padding" if sample_id == PADDING_SAMPLE else str(sample_id) for sample_id in ids.tolist()) or "nothing"


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es'}"


@st.composite
def splits(
    draw: st.DrawFn, *, dp: int = 1, replicas: bool = False, padded: bool = False, shuffled: bool = False, mini_batches: int = 1
) -> Split:
    """Draw splits of up to six samples, now and then of up to twenty.

    Each argument allows one more thing: data-parallel ranks up to `dp`, tensor, context and pipeline replicas, padding
    samples, plans that put samples in another order than the caller's, and several mini-batches.
    """
    few = st.sampled_from((1, 2))
    sizes = {name: draw(few) for name in ("tp", "cp", "pp")} if replicas else {}
    topology = Topology(dp=draw(st.integers(1, dp)), **sizes)
    count = draw(st.integers(1, draw(st.sampled_from((6, 6, 6, 20)))))
    numbers = np.arange(count, dtype=np.int64)
    whole = _draw_whole(draw, numbers)
    order = np.asarray(draw(st.permutations(range(count))), dtype=np.int64) if shuffled else numbers
    parts = np.array_split(order, draw(st.integers(1, min(mini_batches, count))))
    plan = _make_plan(parts, topology, draw(st.integers(1, 2)), whole.sample_ids)
    results = _RankResults(whole, plan, topology, [draw(st.booleans()) for _ in range(count)] if padded else [])
    outputs = results.outputs()
    if shuffled:
        outputs = [outputs[place] for place in draw(st.permutations(range(len(outputs))))]
    return Split(whole, plan, topology, tuple(outputs), padded=any(PADDING_SAMPLE in output.sample_ids for output in outputs))


def _make_plan(minis: Sequence[IntArray], topology: Topology, cuts: int, sample_ids: IntArray) -> BatchPlan:
    """Deal each mini-batch's samples to data-parallel ranks, and cut every rank's into so many micro-batches."""
    return BatchPlan(
        tuple(
            MiniBatchPlan(
                tuple(
                    tuple(one_sample_per_row(part, 8, 8) for part in np.array_split(rank, cuts))
                    for rank in np.array_split(mini, topology.dp)
                )
            )
            for mini in minis
        ),
        Layout(dp=topology.dp, tp=topology.tp, cp=topology.cp, pp=topology.pp),
        sample_ids,
    )


MANY = 528
"""More than 64 samples for each of four ranks in each of two mini-batches."""


def make_many() -> Split:
    """Return a split of `MANY` samples of up to 62 scored tokens, 31 in the mean, in two mini-batches over four data-parallel ranks."""
    numbers, topology = np.arange(MANY, dtype=np.int64), Topology(dp=4)
    lengths = numbers * 37 % 63
    lengths[-1] += 31 * MANY - lengths.sum()
    scored = Ragged.from_list([np.arange(length) for length in lengths], np.int32)
    values = np.arange(len(scored.values), dtype=np.float32)
    whole = BatchOutput(numbers * 3 + 1, lengths, scored, {"logprobs": Ragged(values, scored.offsets)}, metrics_of(numbers))
    plan = _make_plan(np.array_split(numbers[::-1], 2), topology, 2, whole.sample_ids)
    return Split(whole, plan, topology, tuple(_RankResults(whole, plan, topology).outputs()))


def make_unsplit(whole: BatchOutput) -> Split:
    """Return the split of a batch that one rank returns whole."""
    numbers, topology = np.arange(len(whole.sample_ids), dtype=np.int64), Topology()
    plan = _make_plan([numbers], topology, 1, whole.sample_ids)
    return Split(whole, plan, topology, tuple(_RankResults(whole, plan, topology).outputs()))


def grid() -> list[Split]:
    """Return splits of twelve samples over every count of mini-batches and data-parallel ranks up to three, with replicas and without."""
    numbers = np.arange(12, dtype=np.int64)
    scored = Ragged.from_list([np.arange(length) for length in numbers % 3], np.int32)
    values = np.arange(len(scored.values), dtype=np.float32)
    whole = BatchOutput(numbers * 3 + 1, numbers % 3, scored, {"logprobs": Ragged(values, scored.offsets)}, metrics_of(numbers))
    cases = []
    for count, dp, (tp, cp, pp) in product((1, 2, 3), (1, 2, 3), ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))):
        topology = Topology(dp=dp, tp=tp, cp=cp, pp=pp)
        plan = _make_plan(np.array_split(numbers, count), topology, 1, whole.sample_ids)
        cases.append(Split(whole, plan, topology, tuple(_RankResults(whole, plan, topology).outputs())))
    return cases


def list_with_idle_rank() -> list[Split]:
    """Return splits of two samples over three data-parallel ranks, of which each in turn has no sample, returns no field and has a metric."""
    numbers = np.arange(2, dtype=np.int64)
    whole = evolve(_make_two_token_output(numbers), metrics={**metrics_of(numbers), "of_idle": Metric.max(7)})
    cases = []
    for idle in range(3):
        hands = [one_sample_per_row(numbers[[0]], 8, 8), one_sample_per_row(numbers[[1]], 8, 8)]
        hands.insert(idle, one_sample_per_row(numbers[:0], 1, 0))
        topology = Topology(dp=3)
        plan = BatchPlan((MiniBatchPlan(tuple((hand,) for hand in hands)),), Layout(dp=3), whole.sample_ids)
        outputs = _RankResults(whole, plan, topology).outputs()
        outputs[idle] = evolve(RankOutput.empty(outputs[idle].coords), metrics={"of_idle": Metric.max(7)})
        cases.append(Split(whole, plan, topology, tuple(outputs)))
    return cases


def list_mini_batches() -> list[Split]:
    """Return the mini-batches of a batch of six samples as splits of their own: their plans know the ids of the others."""
    numbers, topology = np.arange(6, dtype=np.int64), Topology(dp=2)
    batch = _make_two_token_output(numbers)
    cases = []
    for plan in _make_plan(np.array_split(numbers[::-1], 2), topology, 1, batch.sample_ids):
        own = np.sort(np.concatenate([micro_batch.samples for micro_batch in plan.micro_batches]))
        part = RankOutput(batch.sample_ids, batch.action_lengths, batch.scored, batch.fields).take(own)
        whole = BatchOutput(part.sample_ids, part.action_lengths, part.scored, part.fields, metrics_of(own))
        cases.append(Split(whole, plan, topology, tuple(_RankResults(batch, plan, topology).outputs())))
    return cases


def make_with_fractions() -> Split:
    """Return a split over three data-parallel ranks whose metrics add up to other bits in another order."""
    numbers, topology = np.arange(3, dtype=np.int64), Topology(dp=3)
    whole = _make_two_token_output(numbers)
    plan = _make_plan([numbers], topology, 1, whole.sample_ids)
    outputs = _RankResults(whole, plan, topology).outputs()
    shares = (0.1, 0.2, 0.3)
    return Split(
        whole,
        plan,
        topology,
        tuple(
            evolve(output, metrics={"a_sum": Metric.sum(share), "a_mean": Metric.mean(share, 1)})
            for output, share in zip(outputs, shares, strict=True)
        ),
    )


def _make_two_token_output(numbers: IntArray) -> BatchOutput:
    """Return outputs of two scored tokens per sample."""
    scored = Ragged.from_list([np.arange(2)] * len(numbers), np.int32)
    values = np.arange(len(scored.values), dtype=np.float32)
    return BatchOutput(
        numbers * 3 + 1, np.full(len(numbers), 2), scored, {"logprobs": Ragged(values, scored.offsets)}, metrics_of(numbers)
    )


def _draw_whole(draw: st.DrawFn, numbers: IntArray) -> BatchOutput:
    """Draw outputs of so many samples: none per token, or some of `FIELDS` in any order."""
    names = draw(st.permutations(FIELDS))[: draw(st.integers(0, len(FIELDS)))]
    scored_lengths = draw(st.lists(st.integers(0, 3), min_size=len(numbers), max_size=len(numbers)))
    scored = Ragged.from_list([np.arange(length) * 2 for length in scored_lengths], np.int32)
    if not names:
        scored = Ragged(np.zeros(0, np.int32), offsets_of(np.zeros_like(numbers)))
    count = len(scored.values)
    extreme = draw(st.booleans())
    fields = {}
    for place, name in enumerate(names):
        values = np.arange(count, dtype=np.float32) * (-1) ** place + place
        if extreme and count:
            values[draw(st.integers(0, count - 1))] = draw(st.sampled_from(SPECIAL) | st.floats(width=32))
        fields[name] = Ragged(values, scored.offsets)
    actions = np.asarray([2 * length for length in scored_lengths], dtype=np.int64)
    return BatchOutput(draw(_sample_ids(len(numbers))), actions, scored, fields, metrics_of(numbers))


def _sample_ids(count: int) -> "st.SearchStrategy[IntArray]":
    """Ids as callers give them: small and rising, falling, closer than float64 can tell apart, and any beyond 32 bits."""
    rising = np.arange(count, dtype=np.int64) * 3 + 1
    close = 2**60 + np.arange(count, dtype=np.int64)[::-1]
    any_ids = st.lists(st.integers(2**60, 2**63 - 1), min_size=count, max_size=count, unique=True)
    return st.one_of(
        st.just(rising), st.just(rising[::-1].copy()), st.just(close), any_ids.map(lambda ids: np.asarray(ids, dtype=np.int64))
    )


def metrics_of(numbers: IntArray) -> dict[str, Metric]:
    """Return one metric per reduction, one that samples of odd numbers alone have, and NaN of the first; computed from the samples' numbers.

    Nothing gives a mean of nothing and a sum of nothing: what a loss gives for a micro-batch without a token. The largest number is below 0
    and the smallest above, so that neither is 0 where a merger starts from 0.
    """
    values = numbers * 3 + 1
    metrics = {"a_sum": Metric.sum(int(values.sum())), "a_mean": Metric.mean(int(values.sum()), len(values))}
    if len(numbers):
        metrics |= {"a_min": Metric.min(int(values.min())), "a_max": Metric.max(int(-values.min()))}
    if (odd := values[numbers % 2 == 1]).size:
        metrics["of_some"] = Metric.mean(int(odd.sum()), len(odd))
    if 0 in numbers:
        metrics["not_a_number"] = Metric.max(float("nan"))
    return metrics


@frozen(eq=False)
class _RankResults:
    """The results of a world's ranks: last pipeline stages return outputs, other stages none, and replicas return the same."""

    whole: BatchOutput
    plan: BatchPlan
    topology: Topology
    padding: list[bool] = field(factory=list)

    def outputs(self) -> list[RankOutput]:
        coords = [self.topology.coords(rank) for rank in range(self.topology.world_size)]
        return [self._of(number, rank_coords) for number in range(len(self.plan.mini_batches)) for rank_coords in coords]

    def _of(self, number: int, coords: RankCoords) -> RankOutput:
        if not coords.last_stage:
            return RankOutput.empty(coords)
        everything = RankOutput(self.whole.sample_ids, self.whole.action_lengths, self.whole.scored, self.whole.fields)
        parts = []
        for micro_batch in self.plan.mini_batches[number].ranks[coords.dp]:
            own = everything.take(micro_batch.samples)
            parts.append(evolve(own, metrics=metrics_of(micro_batch.samples)))
            if any(self.padding[sample] for sample in micro_batch.samples.tolist() if self.padding):
                parts.append(self._padding())
        return RankOutput.concat(parts, coords)

    def _padding(self) -> RankOutput:
        count = 1 if self.whole.fields else 0
        scored = Ragged(np.zeros(count, dtype=np.int32), offsets_of([count]))
        fields = {name: Ragged(np.full(count, 99, np.float32), scored.offsets) for name in self.whole.fields}
        return RankOutput(np.array([PADDING_SAMPLE]), np.array([1]), scored, fields)
