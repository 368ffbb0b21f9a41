"""Computation in a lower precision than that of the weights: which buffers follow it, and a trial before any sharding."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_engine.modeling.causal_lm import all_layers
from skyrl_engine.modeling.scorer import Scorer


@torch.no_grad()
def compute_buffers_in(model: Any, dtype: torch.dtype) -> None:
    """Cast the buffers that transformers makes in `dtype`, in a model of `dtype`; the others, such as rotary frequencies, stay as they are.

    Weights are cast when they are used, buffers are not: those of a linear attention's decay (MiniMax) would meet hidden states of
    another precision.
    """
    with torch.device("meta"):
        like = type(model)._from_config(model.config, dtype=dtype)  # noqa: SLF001 - the classmethod behind AutoModel.from_config
    dtypes = {name: buffer.dtype for name, buffer in like.named_buffers()}
    for name, buffer in list(model.named_buffers()):
        if dtypes.get(name) == dtype and buffer.is_floating_point() and buffer.dtype != dtype:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._buffers[key] = buffer.to(dtype)  # noqa: SLF001 - assigning would not keep what is persistent


@contextmanager
def computing_in(scorer: Scorer, dtype: torch.dtype) -> Iterator[None]:
    """Compute with weights rounded to `dtype` inside this context, as ranks do; the layers' are rounded one layer at a time.

    So the copies take the memory of the embedding, the head and one layer. No gradients.
    """
    layers = all_layers(scorer.decoder)
    within = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [parameter for parameter in scorer.parameters() if id(parameter) not in within]
    values = {id(parameter): parameter.data for parameter in scorer.parameters()}

    def round_weights(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data = parameter.data.to(dtype)

    def restore_weights(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data = values[id(parameter)]

    def round_before(layer: nn.Module, *_: object) -> None:
        round_weights(list(layer.parameters()))

    def restore_after(layer: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        restore_weights(list(layer.parameters()))
        return output

    handles = [layer.register_forward_pre_hook(round_before) for layer in layers]
    handles += [layer.register_forward_hook(restore_after) for layer in layers]
    round_weights(outside)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        restore_weights(list(scorer.parameters()))
