"""Parameters and buffers of a model by name, and others in their place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


def list_named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers by name, shared ones once, in the same order on every rank."""
    return [*((name, parameter.detach()) for name, parameter in model.named_parameters()), *model.named_buffers()]


def entry(model: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of this name itself, not a copy."""
    owner_name, _, key = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    place = owner._parameters[key] if key in owner._parameters else owner._buffers[key]  # noqa: SLF001 - torch offers no other access to a shared entry
    assert place is not None
    return place


def replace_entries(model: nn.Module, replacements: Mapping[int, Tensor]) -> None:
    """Replace tensors in every module that holds them; `replacements` is by the old tensor's id. Shared tensors stay shared."""
    for module in model.modules():
        for entries in (module._parameters, module._buffers):  # noqa: SLF001 - assigning attributes would not keep shared entries shared
            for key, value in entries.items():
                if value is not None and id(value) in replacements:
                    entries[key] = replacements[id(value)]  # type: ignore[assignment] # a parameter where there was one


@contextmanager
def keep_ties(model: nn.Module) -> Iterator[None]:
    """Let all names of a parameter hold the new one where it is replaced under one of them in this context.

    Whoever shards a part of the model sees only the names inside that part.
    """
    names: dict[int, list[str]] = {}
    before: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        before[id(parameter)] = parameter
    yield
    for key, shared in names.items():
        if len(shared) > 1:
            held = [entry(model, name) for name in shared]
            now = next((tensor for tensor in held if tensor is not before[key]), before[key])
            replace_entries(model, {id(tensor): now for tensor in held})


def loose_tensors(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return the tensors that modules hold as plain attributes, neither parameters nor buffers, by module and attribute."""
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def keeps_loose_tensors(model: nn.Module) -> bool:
    """Return True if a module of a skeleton holds a meta tensor that is neither parameter nor buffer, so that nothing fills it."""
    return any(tensor.is_meta for tensor in loose_tensors(model).values())


def replace_loose_tensors(model: nn.Module, replacements: Mapping[tuple[str, str], Tensor]) -> None:
    """Replace those of the `loose_tensors` of `model` that `replacements` holds."""
    for name, key in loose_tensors(model).keys() & replacements.keys():
        setattr(model.get_submodule(name), key, replacements[name, key])
