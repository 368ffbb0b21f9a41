"""Collators whose builds are each wrong in one way."""

import numpy as np
from attrs import evolve
from collators_made_wrong import Delegating, DelegatingPacked, FieldChange
from torch import from_numpy

from skyrl_engine.contracts import GatherIndex, Ragged


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
    """Padding, which nobody looks at, differs with the rows next to it."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "input_ids" in batch.fields and "attention_mask" in batch.fields:
            batch["input_ids"][batch["attention_mask"] == 0] = micro_batch.rows
        return batch


class TurnsRowsWithTheBatch(Delegating):
    """Weights of a micro-batch of one row are elsewhere than those of several."""

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

    buffers = 2

    def __init__(self):
        super().__init__()
        self.memory, self.builds = {}, 0

    def build(self, columns, micro_batch, *, fields=None):
        self.builds += 1
        batch = super().build(columns, micro_batch, fields=fields)
        kept = {
            name: self.memory.setdefault((self.builds % self.buffers, name, field.shape), field)
            for name, field in batch.fields.items()
        }
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


class NeedsASample(Delegating):
    def build(self, columns, micro_batch, *, fields=None):
        assert len(micro_batch.samples), "nothing to build"
        return super().build(columns, micro_batch, fields=fields)


class TurnsWideColumns(Delegating):
    """The k numbers of every token in reverse, where a column has several."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        turned = {name: field.flip(-1) for name, field in batch.fields.items() if name in columns.columns and field.ndim == 3}
        return evolve(batch, fields={**batch.fields, **turned})


class PadsWithTheLabelsMask(Delegating):
    """Padding of labels, which no embedding has a row for."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "input_ids" in batch.fields and "attention_mask" in batch.fields:
            batch["input_ids"][batch["attention_mask"] == 0] = -100
        return batch


class PositionsOfPadding(Delegating):
    """As a sum of the mask minus 1 gives them."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "position_ids" in batch.fields and "attention_mask" in batch.fields:
            batch["position_ids"][:] = batch["attention_mask"].cumsum(-1) - 1
        return batch


class CountsPositionsTo511(FieldChange):
    field = "position_ids"

    def change(self, array):
        return array.clip(max=511)


class WritesIntoTheSamples(Delegating):
    """Mends numbers where they come from."""

    def build(self, columns, micro_batch, *, fields=None):
        for column in columns.columns.values():
            np.nan_to_num(column, copy=False)
        return super().build(columns, micro_batch, fields=fields)


class WeightsThatLearn(Delegating):
    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        return evolve(batch, fields={name: field.float().requires_grad_() for name, field in batch.fields.items()})


class GivesADictionary(Delegating):
    """As collators of other libraries do."""

    def build(self, columns, micro_batch, *, fields=None):
        return dict(super().build(columns, micro_batch, fields=fields).fields)


class GivesListsOfPlaces(Delegating):
    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        return evolve(batch, gather=GatherIndex(batch.gather.actions.tolist(), batch.gather.rows, batch.gather.columns))


class TurnsEightBuffers(TurnsTwoBuffers):
    """A ring of eight, as many as a pipeline was thought to hold."""

    buffers = 8


class LeavesWideColumnsOut(Delegating):
    """Odd and right: lays one number per token over its rows, and no more."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        return evolve(
            batch, fields={name: field for name, field in batch.fields.items() if field.ndim < 3 or name not in columns.columns}
        )


class AtTheTokens(Delegating):
    """Odd and right: loss weights and columns as wide as the rows, each number at its token."""

    def build(self, columns, micro_batch, *, fields=None):
        import torch

        batch = super().build(columns, micro_batch, fields=fields)
        mask, masked = batch.fields.get("response_mask"), {}
        for name, field in batch.fields.items():
            if name != "loss_weight" and name not in columns.columns:
                continue
            wide = torch.zeros(micro_batch.rows, micro_batch.width, *field.shape[2:], dtype=field.dtype)
            wide[:, micro_batch.width - field.shape[1] :] = field
            masked[name] = wide
        return evolve(batch, fields={**batch.fields, **masked}) if mask is not None or masked else batch


class RemembersSampleIds(Delegating):
    """Keeps what it built of samples of these ids and lengths, whose tokens may be others in the next batch."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def build(self, columns, micro_batch, *, fields=None):
        arrays = (columns.sample_ids, np.diff(columns.token_offsets), np.diff(columns.action_offsets))
        key = (*(array[micro_batch.samples].tobytes() for array in arrays), micro_batch.rows, micro_batch.width, str(fields))
        batch = self.known.setdefault(key, super().build(columns, micro_batch, fields=fields))
        return evolve(batch, fields={name: field.clone() for name, field in batch.fields.items()})


class PreparesByTurn(Delegating):
    """Hands out what it prepared next, whatever is asked for."""

    def __init__(self):
        super().__init__()
        self.ready, self.columns = [], None

    def build(self, columns, micro_batch, *, fields=None):
        if self.ready and self.columns is columns and micro_batch.place:
            return self.ready.pop(0)
        self.ready = [super(PreparesByTurn, self).build(columns, later, fields=fields) for later in micro_batch.following[:2]]
        self.columns = columns
        return super().build(columns, micro_batch, fields=fields)


class PreparesByPlace(Delegating):
    """Finds what it prepared by place alone: a changed copy of the plan gets the rows of the plan."""

    def __init__(self):
        super().__init__()
        self.ready, self.columns = {}, None

    def build(self, columns, micro_batch, *, fields=None):
        if self.columns is columns and micro_batch.place in self.ready:
            return self.ready.pop(micro_batch.place)
        following = micro_batch.following[:2]
        self.ready = {later.place: super(PreparesByPlace, self).build(columns, later, fields=fields) for later in following}
        self.columns = columns
        return super().build(columns, micro_batch, fields=fields)


class ZerosForWhatIsMissing(Delegating):
    """Gives zeros where a column is asked for that the samples do not have."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        missing = [name for name in (*(fields or ()),) if name in ("rewards", "advantages") and name not in columns.columns]
        zeros = {name: np.zeros((micro_batch.rows, micro_batch.action_width), np.float32) for name in missing}
        return evolve(batch, fields={**batch.fields, **{name: from_numpy(array) for name, array in zeros.items()}})


class HandsOutTwice(Delegating):
    def __init__(self):
        super().__init__()
        self.last = (None, None, None, None)

    def build(self, columns, micro_batch, *, fields=None):
        if self.last[0] is not columns or self.last[1] is not micro_batch or self.last[2] != fields:
            self.last = (columns, micro_batch, fields, super().build(columns, micro_batch, fields=fields))
        return self.last[3]


class BoundsTheWidth(DelegatingPacked):
    """The last sample of a row reaches to its end."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        bounds = batch.cu_seqlens.values.copy()
        bounds[batch.cu_seqlens.offsets[1:][np.diff(batch.cu_seqlens.offsets) > 1] - 1] = micro_batch.width
        return evolve(batch, cu_seqlens=Ragged(bounds, batch.cu_seqlens.offsets))
