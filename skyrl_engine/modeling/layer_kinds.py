"""The kinds of a decoder's layers, and its shortening to the first of them."""

import copy
from collections.abc import Callable, Hashable
from typing import Any, Final

from torch import nn

from skyrl_engine.modeling.causal_lm import split_causal_lm, transformer_layers
from skyrl_engine.modeling.vision import language_part

_FEWEST: Final = 2
"""Fewest layers that a model is shortened to: one would not show what a layer makes of another's output."""

_NUMBERS: Final = {"layer_idx", "layer_id", "layer_index", "layer_number", "idx"}
"""Attributes that number a layer and say nothing of its kind."""


def shorten(config: Any, layers: int) -> None:
    """Change a `transformers` configuration, in place, to that of the decoder's first `layers` layers."""
    text = config.get_text_config(decoder=True)
    name = text.attribute_map.get("layer_types", "layer_types")
    # some compute it of the number of layers
    if getattr(text, name, None) is not None and not isinstance(getattr(type(text), name, None), property):
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers


def shorten_to_kinds(config: Any, build: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return a configuration of the first layers, as many as show every kind, and a model of it without values; `build` makes one.

    Where such a model is not the beginning of the whole one, tensor by tensor, it is the whole one.
    """
    whole = build(copy.deepcopy(config))
    kinds = _list_kinds(whole)
    layers = max(_FEWEST, 1 + max((kinds.index(kind) for kind in set(kinds)), default=0))
    if layers >= len(kinds):
        return config, whole
    shorter = copy.deepcopy(config)
    try:
        shorten(shorter, layers)
        first = build(copy.deepcopy(shorter))
    except Exception:  # noqa: BLE001 - configurations of any kind: what cannot be shortened is checked whole
        return config, whole
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    begins = _list_kinds(first) == kinds[:layers] and all(
        shapes.get(name) == tensor.shape for name, tensor in first.state_dict().items()
    )
    return (shorter, first) if begins else (config, whole)


def _list_kinds(model: Any) -> list[Hashable]:
    """Describe the decoder's layers by the classes, plain attributes and shapes of their modules."""
    return [_describe(layer) for layer in transformer_layers(language_part(split_causal_lm(model).decoder))]


def _describe(layer: nn.Module) -> Hashable:
    modules = []
    for name, module in layer.named_modules():
        plain = sorted(
            (key, repr(value))
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and key not in _NUMBERS
        )
        modules.append((name, type(module).__qualname__, tuple(plain)))
    return tuple(modules), tuple((name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items())
