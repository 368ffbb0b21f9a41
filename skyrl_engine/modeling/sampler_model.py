"""A plain transformers model of the weights that are trained: over a backend's own memory, or as a copy. Nothing of the engine is in it.

Samplers compute with it: it has no value head, no adapters and none of the engine's attention, and its rotary frequencies and precision are
those of the run.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.modeling.causal_lm import split_causal_lm
from skyrl_engine.modeling.loading import build_causal_lm, load_causal_lm
from skyrl_engine.modeling.lora import add_adapters, iterate_merged_weights, load_adapters
from skyrl_engine.modeling.named_tensors import keeps_loose_tensors
from skyrl_engine.modeling.precision import compute_buffers_in
from skyrl_engine.modeling.rotary_frequencies import fix_rotary_frequencies
from skyrl_engine.modeling.value_head import NAME as VALUE_HEAD
from skyrl_engine.modeling.vision import language_part


def model_over(spec: ModelConfig, storage: Mapping[str, Tensor]) -> Any:
    """Return a model whose parameters and buffers are the tensors of `storage`, as `SharesStorage.storage` gives them: no copy.

    Whatever changes that memory changes the model. Raises ModelError for a tensor that is missing there or has another shape.
    """
    model = _skeleton(_base_spec(spec))
    fix_rotary_frequencies(model, spec.rotary_length)
    missing = [name for name, tensor in list_tensors(model) if name not in storage or storage[name].shape != tensor.shape]
    if missing:
        raise ModelError(
            f"the backend shows no memory of {missing[0]} of {spec.path}, or of another shape ({len(missing)} such tensors)",
            remedy="Let storage() of the backend give every parameter and buffer of the model, or None",
        )
    for name, _ in list_tensors(model):
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        shown = storage[name].detach()
        if key in module._parameters:  # noqa: SLF001 - assigning would copy, or forget what is persistent
            module._parameters[key] = nn.Parameter(shown, requires_grad=False)  # noqa: SLF001 - as above
        else:
            module._buffers[key] = shown  # noqa: SLF001 - as above
    return model.eval()


def load_sampler_model(spec: ModelConfig, device: str) -> Any:
    """Load a model of its own, in the precision that the run computes in; `fill` gives it other weights. Raises ModelError."""
    model = load_causal_lm(_base_spec(spec), images=True)
    fix_rotary_frequencies(model, spec.rotary_length)
    if spec.dtype == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        compute_buffers_in(model, torch.bfloat16)
    return model.requires_grad_(requires_grad=False).eval().to(device)


@torch.no_grad()
def iterate_stored_weights(spec: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Read a model's full weights from its files, on the CPU, with those of an existing adapter merged. Raises ModelError."""
    model = load_causal_lm(_base_spec(spec), images=True)
    if spec.lora is not None:
        add_adapters(model, language_part(split_causal_lm(model).decoder), spec, seed=0)
        load_adapters(model, spec)
    yield from iterate_merged_weights(model, lambda parameter: parameter.detach())


@torch.no_grad()
def fill(model: Any, weights: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Copy full weights, under their Hugging Face names, into a model of its own; those of a value head are left out.

    Raises ModelError for names and shapes that do not fit, before any weight changes.
    """
    places = dict(model.named_parameters(remove_duplicate=False))
    weights_by_name = {key: weight for key, weight in weights if not key.startswith(f"{VALUE_HEAD}.")}
    unknown = [key for key, weight in weights_by_name.items() if key not in places or places[key].shape != weight.shape]
    covered = {id(places[key]) for key in weights_by_name if key in places}
    lacking = [key for key, place in places.items() if id(place) not in covered]
    if wrong := unknown or lacking:
        problem = "has no place, or one of another shape," if unknown else "is not among the weights"
        raise ModelError(
            f"{wrong[0]} {problem} for {name} ({len(wrong)} such tensors)",
            remedy="Sample from the model that is trained, with all its weights",
        )
    for key, weight in weights_by_name.items():
        places[key].copy_(weight)


def _base_spec(spec: ModelConfig) -> ModelConfig:
    """Return the model without what training adds. `value_head` stays: it says that weights of that name are no mistake."""
    return evolve(spec, lora=None, activation_checkpointing=False)


def list_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List parameters and buffers by name, tied ones under each of their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _skeleton(spec: ModelConfig) -> Any:
    """Make the model without values; with values to throw away where it keeps tensors that nothing would fill."""
    config = load_config(spec, images=True)
    with torch.device("meta"):
        model = build_causal_lm(spec, config)
    if keeps_loose_tensors(model):
        with torch.random.fork_rng(devices=()):
            model = build_causal_lm(spec, config)
    return model
