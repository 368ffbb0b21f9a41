"""Write whole weights as a Hugging Face directory, in the precision of the run."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from skyrl_engine.contracts.values.model import ComputeDtype, ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.loading import load_scorer, load_skeleton, quiet_progress
from skyrl_engine.modeling.lora import has_adapters, iterate_merged_weights, list_trained_parameters, write_adapters


def write_pretrained(
    model: Any, directory: Path, weights: Mapping[str, Tensor] | None = None, *, precision: ComputeDtype | None = None
) -> None:
    """Write the model's configuration and `weights`, named as `collect_export_tensors` names them (None: the model's own); adapters as PEFT.

    Weights are rounded to `precision`, that which the run computed in (None: they stay as they are); adapters are not, which are small. The
    configuration names the precision of the written weights, in which transformers loads them. Raises ModelError.
    """
    if precision is not None and weights is not None and not has_adapters(model):
        weights = _round_weights(model, weights, getattr(torch, precision))
    try:
        with quiet_progress(), _skip_unwrapping():
            if has_adapters(model):
                write_adapters(model, directory, collect_export_tensors(model) if weights is None else weights)
                return
            model.save_pretrained(directory, state_dict=None if weights is None else dict(weights))
            if weights is not None:
                _name_precision(model.config, directory, weights)
    except OSError as error:
        raise ModelError(
            f"the model cannot be written to {directory}: {error}", remedy="Make room there or choose another place"
        ) from error


def collect_export_tensors(model: Any) -> dict[str, Tensor]:
    """Return the tensors to export by name, as this rank holds them: the state dictionary or, with adapters, the trained parameters."""
    return dict(list_trained_parameters(model)) if has_adapters(model) else model.state_dict(keep_vars=True)


def write_merged(spec: ModelConfig, directory: Path, precision: ComputeDtype) -> None:
    """Write the base model `spec.path` with the adapter `spec.lora.path` merged into its weights, rounded to `precision`.

    The sum is of the base weights as they were trained with, in `spec.dtype`, and is taken in the adapters' precision. Raises ModelError.
    """
    adapted, _ = load_scorer(evolve(spec, activation_checkpointing=False), images=True)
    plain, _ = load_skeleton(evolve(spec, activation_checkpointing=False, lora=None), images=True)
    plain.generation_config = adapted.generation_config
    buffers = dict(adapted.named_buffers())
    own_buffers = {name: buffers[name] for name in plain.state_dict() if name in buffers}
    with torch.no_grad():
        weights = {**dict(iterate_merged_weights(adapted, lambda parameter: parameter.detach())), **own_buffers}
    write_pretrained(plain, directory, weights, precision=precision)


def round_like_export(model: Any, spec: ModelConfig) -> bool:
    """Hold the weights of a model that nothing trains as an export has them: rounded to `spec.dtype`, in place. Returns whether they are.

    Values of one rank, or none of them, stay where they are. A model with adapters, which exports do not round, or with weights that
    transformers keeps in float32 in every precision, stays as it is.
    """
    if spec.dtype != "bfloat16" or spec.lora is not None or getattr(model, "_keep_in_fp32_modules_strict", None):
        return False
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    return True


def _round_weights(model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights in `dtype`, but those that transformers keeps in float32 in every precision; tied ones stay one tensor."""
    precise = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
    keeps = re.compile("|".join(rf"(^|\.){re.escape(name)}(\.|$)" for name in precise)) if precise else None
    done: dict[int, Tensor] = {}
    for name, weight in weights.items():
        exact = not weight.is_floating_point() or (keeps is not None and keeps.search(name))
        done.setdefault(id(weight), weight if exact else weight.detach().to(dtype))
    return {name: done[id(weight)] for name, weight in weights.items()}


def _name_precision(config: Any, directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the precision of `weights` into the configuration, which names that of the model's own parameters so far."""
    sizes: dict[torch.dtype, int] = {}
    for weight in weights.values():
        if weight.is_floating_point():
            sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
    written = max(sizes, key=lambda dtype: sizes[dtype])
    computes, config.dtype = config.dtype, str(written).removeprefix("torch.")
    try:
        config.save_pretrained(directory)
    finally:
        config.dtype = computes


@contextmanager
def _skip_unwrapping() -> Iterator[None]:
    """Let save_pretrained take the model as it is: it unwraps models by accelerate, which imports DeepSpeed wherever that is installed.

    On a machine with GPUs that import looks for compilers, builds and logs; runs of other backends have no use for it.
    """
    from transformers import modeling_utils

    before = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = lambda model, **_: model
    try:
        yield
    finally:
        modeling_utils.unwrap_model = before
