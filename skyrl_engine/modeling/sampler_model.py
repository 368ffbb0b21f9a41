"""A plain transformers model of the weights that are trained: over a backend's own memory, or as a copy. Nothing of the engine is in it.

Samplers compute with it: it has no value head, no adapters and none of the engine's attention, and its rotary frequencies and precision are
those of the run.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from attrs import evolve
from safetensors import safe_open
from torch import Tensor, nn

from skyrl_engine.contracts.kinds.generator import TensorParallelGroup
from skyrl_engine.contracts.values.model import EmptyModelConfig, ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.model_facts.tensor_parallel_plan import refuse_indivisible
from skyrl_engine.model_facts.weight_files import holder_of, weight_files
from skyrl_engine.modeling.causal_lm import split_causal_lm
from skyrl_engine.modeling.divided_sampler import HeldParts, divide, parameters_without_memory
from skyrl_engine.modeling.loading import build_causal_lm, load_causal_lm
from skyrl_engine.modeling.lora import add_adapters, iterate_merged_weights, load_adapters
from skyrl_engine.modeling.matmul_precision import keep_angles_exact
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
    keep_angles_exact(model)
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
    keep_angles_exact(model)
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


def make_divided_model(spec: ModelConfig, device: str, group: TensorParallelGroup) -> tuple[Any, HeldParts]:
    """Make a model of which this rank holds its part on `device`, in the precision that the run computes in, and `fill` gives it values.

    Of its files only buffers are read, and no rank holds the whole. Raises ModelError, and UnsupportedError for a model that the ranks cannot
    divide.
    """
    base = _base_spec(spec)
    config = load_config(base, images=True)
    refuse_indivisible(config, spec.path, group.size)
    with torch.random.fork_rng(devices=()), parameters_without_memory():
        model = build_causal_lm(base, config)
    fix_rotary_frequencies(model, spec.rotary_length)
    keep_angles_exact(model)
    _read_buffers(model, spec)
    if spec.dtype == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        compute_buffers_in(model, torch.bfloat16)
    parts = divide(model, group, device)
    return model.eval().to(device), parts


@torch.no_grad()
def _read_buffers(model: nn.Module, spec: ModelConfig) -> None:
    """Read the buffers that a model's files hold, such as the biases of DeepSeek-V3's routers: streams of weights lack them.

    Raises ModelError where a file does not name one, as the files of models on the hub and pickled ones do not.
    """
    if isinstance(spec, EmptyModelConfig):
        return
    stored = model.state_dict().keys()
    wanted = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    files = weight_files(spec) if wanted else []
    for name, buffer in wanted.items():
        if (file := holder_of(files, name)) is None:
            raise ModelError(
                f"no safetensors file of {spec.path} holds {name}, which ranks that sample together read from it",
                remedy="Download the model as safetensors files, and point model.path at their directory",
            )
        with safe_open(file, "pt") as held:
            buffer.copy_(held.get_tensor(name))


@torch.no_grad()
def fill(model: Any, weights: Iterable[tuple[str, Tensor]], name: str, parts: HeldParts | None = None) -> None:
    """Copy full weights, under their Hugging Face names, into a model of its own; those of a value head are left out. Of a divided model,
    each is cut to this rank's part as it comes. Buffers that files hold may be among them, where steps change these, and keep their values
    where they are not.

    Raises ModelError for names and shapes that do not fit, before any weight changes.
    """
    stored = model.state_dict().keys()
    buffers = {key: buffer for key, buffer in model.named_buffers() if key in stored}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places = {**buffers, **parameters}
    taken: dict[str, Tensor] = {}
    unknown: list[str] = []
    for key, weight in weights:
        if key.startswith(f"{VALUE_HEAD}."):
            continue
        place = places.get(key)
        divided = None if key in buffers else parts
        if place is None or (place.shape if divided is None else divided.whole_shape(place)) != weight.shape:
            unknown.append(key)
        else:
            taken[key] = weight if divided is None else divided.cut(place, weight)
    covered = {id(places[key]) for key in taken}
    lacking = [key for key, place in parameters.items() if id(place) not in covered]
    if wrong := unknown or lacking:
        problem = "has no place, or one of another shape," if unknown else "is not among the weights"
        raise ModelError(
            f"{wrong[0]} {problem} for {name} ({len(wrong)} such tensors)",
            remedy="Sample from the model that is trained, with all its weights",
        )
    for key, weight in taken.items():
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
