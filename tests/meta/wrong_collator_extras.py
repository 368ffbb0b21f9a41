"""Collators that are each wrong in one way about images or expert routes."""

import numpy as np
from attrs import evolve
from collators_made_wrong import Delegating, DelegatingPacked, FieldChange


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


class CapturesThroughTheGaps(DelegatingPacked):
    """Routes of a sample's whole piece of the row, alignment included."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "router_padding_mask" in batch.fields:
            for row, bounds in enumerate(batch.cu_seqlens):
                batch["router_padding_mask"][row, : bounds[-1]] = False
        return batch


class RunsRoutesTogether(DelegatingPacked):
    """All routes of a row one after the other from its first column: wrong after a sample whose routes are a prefix."""

    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        if "expert_routes" in batch.fields:
            for routes, mask in zip(batch["expert_routes"], batch["router_padding_mask"], strict=True):
                order = mask.to(int).argsort(stable=True)
                routes[:] = routes[order]
                mask[:] = mask[order]
        return batch
