"""A model over the frozen weights of another: what it trains (adapters, a value head) is its own, all else is the other's memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling.lora import has_adapter_name
from skyrl_engine.modeling.named_tensors import (
    entry,
    keeps_loose_tensors,
    list_named_tensors,
    loose_tensors,
    replace_entries,
    replace_loose_tensors,
)
from skyrl_engine.modeling.value_head import NAME as VALUE_HEAD


@contextmanager
def on_the_cpu_without_memory(model: nn.Module) -> Iterator[None]:
    """Let parameters on the meta device look as if they were on the CPU, so that modules which are added to theirs get values there."""
    stand_ins: dict[int, nn.Parameter] = {}
    places: dict[int, nn.Parameter] = {}
    for place in (parameter for parameter in model.parameters() if parameter.is_meta):
        # one number, shown in the shape of the whole parameter
        stand_in = nn.Parameter(torch.zeros((), dtype=place.dtype).expand(place.shape), requires_grad=place.requires_grad)
        stand_ins[id(place)], places[id(stand_in)] = stand_in, place
    replace_entries(model, stand_ins)
    try:
        yield
    finally:
        for stand_in in stand_ins.values():
            places[id(stand_in)].requires_grad_(stand_in.requires_grad)
        replace_entries(model, places)


def share_weights(model: nn.Module, base: nn.Module, name: str) -> None:
    """Put the memory of `base` in the place of all that `model` does not train: parameters as they are, buffers as copies.

    Tied tensors stay tied. What a model trains is known by its name (`is_own`): modelling code may give the rest values of its own, on any
    device. The two are one model with different adapters, whole or sharded alike. Raises UnsupportedError for a model that keeps tensors
    in addition to parameters and buffers.
    """
    if keeps_loose_tensors(model):
        raise UnsupportedError(
            f"{name} ({type(model).__name__}) keeps tensors that are neither parameters nor buffers, and they cannot be shared",
            remedy="Train one set of adapters at a time",
        )
    base_names = {_base_name(tensor_name): tensor_name for tensor_name, _ in list_named_tensors(base)}
    shared: dict[int, Tensor] = {}
    for tensor_name, _ in list_named_tensors(model):
        if is_own(tensor_name):
            continue
        place = entry(model, tensor_name)
        there = entry(base, base_names[_base_name(tensor_name)])
        if isinstance(place, nn.Parameter):
            shared[id(place)] = nn.Parameter(there.detach(), requires_grad=False)
        else:
            shared[id(place)] = there.detach().clone()
    replace_entries(model, shared)
    replace_loose_tensors(model, loose_tensors(base))


def is_own(name: str) -> bool:
    """Return True for a tensor of an adapter or of a value head, which each model over shared weights has for itself."""
    return has_adapter_name(name) or name.rpartition(".")[0] == VALUE_HEAD


def _base_name(name: str) -> str:
    """Return a tensor's name in the model without adapters."""
    return name.replace(".base_layer.", ".")
