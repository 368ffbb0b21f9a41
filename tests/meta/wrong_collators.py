"""Collators that are each wrong in one way: ours, spoilt in one place."""

import numpy as np
from attrs import evolve

from skyrl_engine.contracts import BatchPlan, GatherIndex, MicroBatchPlan, MiniBatchPlan, Ragged
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.padded.collator import PaddedCollator


class Delegating:
    """`padded`, to be spoilt in one place."""

    rows = "padded"
    carries = PaddedCollator.carries

    def __init__(self):
        self.inner = PaddedCollator(pad_token_id=7)

    def plan(self, lengths, layout):
        return self.inner.plan(lengths, layout)

    def build(self, columns, micro_batch, *, fields=None):
        return self.inner.build(columns, micro_batch, fields=fields)


def changed(plan, change):
    """The plan with `change` applied to the ranks of every mini-batch."""
    return BatchPlan(tuple(MiniBatchPlan(change(mini.ranks)) for mini in plan.mini_batches), plan.layout, plan.sample_ids)


class DropsASample(Delegating):
    def plan(self, lengths, layout):
        def drop(ranks):
            first = ranks[0][0]
            if not len(first.samples):
                return ranks
            offsets = np.minimum(first.row_offsets, len(first.samples) - 1)
            return ((MicroBatchPlan(first.samples[:-1], offsets, first.width, first.action_width), *ranks[0][1:]), *ranks[1:])

        return changed(super().plan(lengths, layout), drop)


class LeavesRanksUneven(Delegating):
    def plan(self, lengths, layout):
        return changed(
            super().plan(lengths, layout), lambda ranks: tuple(tuple(mb for mb in rank if len(mb.samples)) for rank in ranks)
        )


class CutsUnits(Delegating):
    def plan(self, lengths, layout):
        return super().plan(evolve(lengths, unit_ids=np.arange(len(lengths))), layout)


class CutsGroups(Delegating):
    def plan(self, lengths, layout):
        return super().plan(evolve(lengths, group_ids=np.arange(len(lengths))), layout)


class IgnoresTheBudget(Delegating):
    def plan(self, lengths, layout):
        return super().plan(lengths, evolve(layout, micro_batch_tokens=None))


class IgnoresTheMiniBatchSize(Delegating):
    def plan(self, lengths, layout):
        return super().plan(lengths, evolve(layout, mini_batch_size=None))


class PlansRowsTooNarrow(Delegating):
    """Rows as wide as their responses."""

    def plan(self, lengths, layout):
        return super().plan(evolve(lengths, tokens=lengths.actions), layout)


class PlansDifferentlyEachTime(Delegating):
    calls = 0

    def plan(self, lengths, layout):
        type(self).calls += 1
        return changed(super().plan(lengths, layout), lambda ranks: ranks[:: -1 if self.calls % 2 else 1])


class CarriesSomethingUnheardOf(Delegating):
    carries = frozenset({"vision", "sound"})


class ScoresFromTheTokenItself(Delegating):
    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        gather = GatherIndex(batch.gather.actions, batch.gather.rows, batch.gather.columns + 1)
        return evolve(batch, gather=gather)


class ScoresTheFirstToken(Delegating):
    """Gives an entry to every action, the first token of a sample included: at full width that is column -1."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        actions = np.diff(columns.action_offsets)[micro_batch.samples]
        rows = np.repeat(np.arange(micro_batch.rows)[np.diff(micro_batch.row_offsets) == 1], actions)
        columns_of = [micro_batch.width - count + place - 1 for count in actions for place in range(count)]
        gather = GatherIndex(np.arange(len(rows)), rows, np.asarray(columns_of, dtype=np.int64))
        return evolve(batch, gather=gather)


class FieldChange(Delegating):
    field = ""

    def change(self, array):
        raise NotImplementedError

    def build(self, columns, micro_batch, *, fields=None):
        import torch

        batch = super().build(columns, micro_batch, fields=fields)
        if self.field not in batch.fields:
            return batch
        changed = torch.from_numpy(np.ascontiguousarray(self.change(batch[self.field].numpy().copy())))
        return evolve(batch, fields={**batch.fields, self.field: changed})


class LosesNegativeZeros(FieldChange):
    field = "rewards"

    def change(self, array):
        return array + 0.0


class GivesDoubles(FieldChange):
    field = "loss_weight"

    def change(self, array):
        return array.astype(np.float64)


class CountsPositionsFromTheEdge(FieldChange):
    field = "position_ids"

    def change(self, array):
        return np.broadcast_to(np.arange(array.shape[1]), array.shape).copy()


class AlignsLeft(FieldChange):
    field = "loss_weight"

    def change(self, array):
        return np.ascontiguousarray(array[:, ::-1])


class CutsIdsTo32Bits(FieldChange):
    field = "input_ids"

    def change(self, array):
        return array.astype(np.int32).astype(np.int64)


class BuildsIntoTheSameMemory(Delegating):
    """Keeps one tensor per field and shape, and writes it again in every build."""

    def __init__(self):
        super().__init__()
        self.memory = {}

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        kept = {name: self.memory.setdefault((name, field.shape), field) for name, field in batch.fields.items()}
        for name, field in batch.fields.items():
            kept[name].copy_(field)
        return evolve(batch, fields=kept)


class CountsItsBuilds(Delegating):
    """Pads with the number of the build."""

    builds = 0

    def build(self, columns, micro_batch, *, fields=None):
        self.builds += 1
        batch = super().build(columns, micro_batch, fields=fields)
        if "input_ids" in batch.fields and "attention_mask" in batch.fields:
            batch["input_ids"][batch["attention_mask"] == 0] = self.builds
        return batch


class PadsWithTheNumberOfRows(Delegating):
    """Padding, which nobody looks at, differs with the rows beside it."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "input_ids" in batch.fields and "attention_mask" in batch.fields:
            batch["input_ids"][batch["attention_mask"] == 0] = micro_batch.rows
        return batch


class TurnsRowsWithTheBatch(Delegating):
    """Weights of a micro-batch of one row lie elsewhere than those of several."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if micro_batch.rows == 1 and "loss_weight" in batch.fields:
            batch["loss_weight"][:] = batch["loss_weight"].flip(1)
        return batch


class InventsAColumn(FieldChange):
    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if fields is None and "rewards" not in batch.fields:
            return evolve(batch, fields={**batch.fields, "rewards": batch["loss_weight"] * 0})
        return batch


class IgnoresTheFieldsAskedFor(Delegating):
    def build(self, columns, micro_batch, **_asked):
        return super().build(columns, micro_batch)


class PadsRoutesWithZeros(Delegating):
    """Zeros are right where topk is 1."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "expert_routes" in batch.fields:
            batch["expert_routes"][batch["router_padding_mask"]] = 0
        return batch


class TakesRoutesForASuffix(Delegating):
    """Rows at the last tokens of a sample, as response fields are."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "expert_routes" in batch.fields:
            lengths = columns.extras["expert_routes"].lengths[micro_batch.samples]
            tokens = np.diff(columns.token_offsets)[micro_batch.samples]
            for row, shift in zip(np.flatnonzero(np.diff(micro_batch.row_offsets)), tokens - lengths, strict=True):
                for name in ("expert_routes", "router_padding_mask"):
                    batch[name][row] = batch[name][row].roll(int(shift), 0)
        return batch


class MasksNoRoute(FieldChange):
    field = "router_padding_mask"

    def change(self, array):
        return array & False


class MasksPaddingAlone(Delegating):
    """Takes tokens without captured routes for captured."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "router_padding_mask" not in batch.fields:
            return batch
        return evolve(batch, fields={**batch.fields, "router_padding_mask": batch["attention_mask"] == 0})


class NarrowsRoutes(FieldChange):
    field = "expert_routes"

    def change(self, array):
        return array.astype(np.uint8)


class WidensRoutes(FieldChange):
    field = "expert_routes"

    def change(self, array):
        return array.astype(np.int64)


class LeavesOutRoutes(Delegating):
    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        return evolve(batch, fields={name: field for name, field in batch.fields.items() if name != "expert_routes"})


class ReversesImages(FieldChange):
    field = "pixel_values"

    def change(self, array):
        return array[::-1]


class SharesImagesEvenly(Delegating):
    """Bounds that would be right if all samples had equally many patches."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "pixel_values" not in batch.fields:
            return batch
        even = np.linspace(0, len(batch["pixel_values"]), len(micro_batch.samples) + 1).astype(np.int64)
        return evolve(batch, ragged_offsets={**batch.ragged_offsets, "pixel_values": even})


class LeavesOutWhoseImagesTheyAre(Delegating):
    def build(self, columns, micro_batch, *, fields=None):
        return evolve(super().build(columns, micro_batch, fields=fields), ragged_offsets={})


class AlignsTokenTypesLeft(Delegating):
    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "mm_token_type_ids" in batch.fields:
            for row, padding in enumerate((batch["attention_mask"] == 0).sum(1).tolist()):
                batch["mm_token_type_ids"][row] = batch["mm_token_type_ids"][row].roll(-padding)
        return batch


class DelegatingPacked(Delegating):
    """`packed`, to be spoilt in one place."""

    rows = "packed"

    def __init__(self):
        self.inner = PackedCollator(pad_token_id=7)


class CapturesThroughTheGaps(DelegatingPacked):
    """Routes of a sample's whole piece of the row, alignment included."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "router_padding_mask" in batch.fields:
            for row, bounds in enumerate(batch.cu_seqlens):
                batch["router_padding_mask"][row, : bounds[-1]] = False
        return batch


class RunsRoutesTogether(DelegatingPacked):
    """All routes of a row one after the other from its first column: wrong behind a sample whose routes are a prefix."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "expert_routes" in batch.fields:
            for routes, mask in zip(batch["expert_routes"], batch["router_padding_mask"], strict=True):
                order = mask.to(int).argsort(stable=True)
                routes[:] = routes[order]
                mask[:] = mask[order]
        return batch


class SaysItPads(DelegatingPacked):
    rows = "padded"


class ForgetsTheAlignment(DelegatingPacked):
    def build(self, columns, micro_batch, *, fields=None):
        return super().build(columns, evolve(micro_batch, alignment=1), fields=fields)


class LeavesOutTheBounds(DelegatingPacked):
    def build(self, columns, micro_batch, *, fields=None):
        return evolve(super().build(columns, micro_batch, fields=fields), cu_seqlens=None)


class BoundsTrueLengths(DelegatingPacked):
    """Right in rows without alignment only."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        return evolve(batch, cu_seqlens=Ragged.from_list([np.append(0, row.cumsum()) for row in batch.sequence_lengths], np.int32))


class CountsPositionsThroughTheRow(DelegatingPacked, FieldChange):
    field = "position_ids"

    def change(self, array):
        return np.broadcast_to(np.arange(array.shape[1]), array.shape).copy()


class WeighsTheTokenItself(DelegatingPacked, FieldChange):
    """Weights one slot late: the last of a sample lands on its neighbour."""

    field = "loss_weight"

    def change(self, array):
        return np.roll(array, 1, axis=1)


class ShowsTheSamples(Delegating):
    """A row of one sample is that sample's own memory."""

    def build(self, columns, micro_batch, *, fields=None):
        import torch

        batch = super().build(columns, micro_batch, fields=fields)
        if micro_batch.rows != 1 or not len(micro_batch.samples) or "input_ids" not in batch.fields:
            return batch
        (sample,) = micro_batch.samples
        held = columns.input_ids[columns.token_offsets[sample] : columns.token_offsets[sample + 1]]
        if len(held) != micro_batch.width:
            return batch
        return evolve(batch, fields={**batch.fields, "input_ids": torch.from_numpy(held)[None]})


class TurnsTwoBuffers(Delegating):
    """Every second build writes into the same memory."""

    def __init__(self):
        super().__init__()
        self.memory, self.builds = {}, 0

    def build(self, columns, micro_batch, *, fields=None):
        self.builds += 1
        batch = super().build(columns, micro_batch, fields=fields)
        kept = {name: self.memory.setdefault((self.builds % 2, name, field.shape), field) for name, field in batch.fields.items()}
        for name, field in batch.fields.items():
            kept[name].copy_(field)
        return evolve(batch, fields=kept)


class KeepsOneGatherIndex(Delegating):
    def __init__(self):
        super().__init__()
        self.memory = {}

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        kept = self.memory.setdefault(len(batch.gather.columns), batch.gather.columns.copy())
        kept[:] = batch.gather.columns
        return evolve(batch, gather=evolve(batch.gather, columns=kept))


class SwapsColumns(Delegating):
    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if not {"rewards", "advantages"} <= batch.fields.keys():
            return batch
        swapped = {"rewards": batch["advantages"], "advantages": batch["rewards"]}
        return evolve(batch, fields={**batch.fields, **swapped})


class TakesWeightsForAMask(FieldChange):
    field = "loss_weight"

    def change(self, array):
        return (array != 0).astype(np.float32)


class WeighsPadding(Delegating):
    """1 where there is no response token, for a division later on."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "response_mask" in batch.fields and "loss_weight" in batch.fields:
            batch["loss_weight"][batch["response_mask"] == 0] = 1.0
        return batch


class CountsPositionsInABytes(FieldChange):
    field = "position_ids"

    def change(self, array):
        return array.astype(np.uint8).astype(np.int64)


class KnowsSixteenSamples(Delegating):
    """Tables of a fixed size: the seventeenth sample is planned as the first."""

    def plan(self, lengths, layout):
        plan = super().plan(lengths, layout)
        return changed(plan, lambda ranks: tuple(tuple(evolve(each, samples=each.samples % 16) for each in rank) for rank in ranks))


class NeedsASample(Delegating):
    def build(self, columns, micro_batch, *, fields=None):
        assert len(micro_batch.samples), "nothing to build"
        return super().build(columns, micro_batch, fields=fields)


class PlansByCount(Delegating):
    """Remembers the plan of so many samples."""

    def __init__(self):
        super().__init__()
        self.plans = {}

    def plan(self, lengths, layout):
        return self.plans.setdefault(len(lengths), super().plan(lengths, layout))


class AtTheTokens(Delegating):
    """Odd and right: loss weights and columns as wide as the rows, each number at its token."""

    def build(self, columns, micro_batch, *, fields=None):
        import torch

        batch = super().build(columns, micro_batch, fields=fields)
        mask, made = batch.fields.get("response_mask"), {}
        for name, field in batch.fields.items():
            if name != "loss_weight" and name not in columns.columns:
                continue
            wide = torch.zeros(micro_batch.rows, micro_batch.width)
            wide[:, micro_batch.width - field.shape[1] :] = field
            made[name] = wide
        return evolve(batch, fields={**batch.fields, **made}) if mask is not None or made else batch


class RoundsWidths(Delegating):
    """Odd and right: wider rows than are needed, where no budget forbids it."""

    def plan(self, lengths, layout):
        plan = super().plan(lengths, layout)
        if layout.micro_batch_tokens is not None:
            return plan
        return changed(
            plan,
            lambda ranks: tuple(tuple(evolve(each, width=-(-each.width // 8) * 8) for each in rank) for rank in ranks),
        )
