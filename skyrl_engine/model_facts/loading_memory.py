"""Bytes of tensors in host memory while a model is loaded, from shapes alone. No torch."""

from collections.abc import Hashable
from typing import Final

from skyrl_engine.contracts.values.state_layout import StateLayout
from skyrl_engine.model_facts.rank_memory import ModelShape

_FEWEST_LAYERS: Final = 2
"""Fewest layers that are read to be checked (`modeling.layer_kinds`)."""


def count_loading_bytes(shape: ModelShape, layout: StateLayout) -> int:
    """Count what rank 0 holds in host memory at most while a model is loaded, in the precision of masters.

    Where it reads the model whole, that is all weights. Where every rank reads its part, it first checks the first layers, as many as show
    every kind, between embedding and head; ranks hold one tensor at a time beside what they keep. Adapters are counted as weights.
    """
    numbers = [each for each in shape.parameters if not each.is_tied]
    if layout.loading == "whole":
        return sum(each.count for each in numbers) * shape.master_bytes
    layers = count_layers_of_every_kind(shape)
    checked = sum(each.count for each in numbers if each.place != "layer" or each.layer < layers)
    return max(checked, *(each.count for each in numbers)) * shape.master_bytes


def count_layers_of_every_kind(shape: ModelShape) -> int:
    """Count the first layers of a model that show every kind of its layers, by their shapes and their types in the configuration."""
    types = getattr(shape.config.get_text_config(decoder=True), "layer_types", None) or ()
    tensors: dict[int, set[Hashable]] = {}
    for each in shape.parameters:
        if each.place == "layer":
            tensors.setdefault(each.layer, set()).add(
                (f".{each.name}.".replace(f".{each.layer}.", ".", 1), each.rows, each.columns)
            )
    kinds = [(frozenset(tensors.get(layer, ())), types[layer] if layer < len(types) else None) for layer in range(shape.layers)]
    return min(shape.layers, max(_FEWEST_LAYERS, 1 + max((kinds.index(kind) for kind in set(kinds)), default=0)))
