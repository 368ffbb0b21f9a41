"""Compile megatron-core's layers: norms, activations and sums are programs; attention, rotary angles and divided products stay outside.

Those read the lengths of documents as numbers, or speak to other ranks, and torch's compiler would make a program for each length or give up.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from skyrl_engine.modeling.compiling import CompiledForward, compile_forwards, outside
from skyrl_engine_megatron.library import ColumnParallelLinear, RowParallelLinear, attention_layers


class Columns(ColumnParallelLinear):  # type: ignore[misc] # megatron-core is untyped
    """A linear layer divided along its outputs, outside of compiled programs."""

    forward = outside(ColumnParallelLinear.forward)


class Rows(RowParallelLinear):  # type: ignore[misc] # as above
    """A linear layer divided along its inputs, outside of compiled programs."""

    forward = outside(RowParallelLinear.forward)


class BiasedColumns(Columns):
    """Such a layer with a bias, where megatron-core's configuration, which is of all layers, has none."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **{**options, "bias": True})


class BiasedRows(Rows):
    """Such a layer with a bias, where megatron-core's configuration, which is of all layers, has none."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **{**options, "bias": True})


class CompiledLayer(CompiledForward):
    """The `forward` of a layer that is called with names alone, as megatron-core does. `hidden_states` is [tokens, 1, h]."""

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        hidden_T1H: Tensor = options.pop("hidden_states")
        # the stride of a dimension of size 1 means nothing, and a program is for one stride: that of a new dimension
        return super().__call__(*inputs, hidden_T1H.squeeze(1).unsqueeze(1), **options)


def compile_decoders(decoders: Iterable[Any], name: str) -> None:
    """Let every layer of these pieces of the model run as a compiled program, in place; `name` is the model's in errors."""
    if not hasattr(attention_layers.apply_rotary_pos_emb, "_torchdynamo_disable"):
        attention_layers.apply_rotary_pos_emb = outside(attention_layers.apply_rotary_pos_emb)
    compile_forwards([layer for decoder in decoders for layer in decoder.decoder.layers], name, drops=False, forward=CompiledLayer)
