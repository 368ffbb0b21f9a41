"""Move a model from rank 0's CPU into a DeepSpeed engine on every rank or, for scoring alone, into plain copies of the model."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from skyrl_engine.contracts import AdamWSettings, ComputeDtype, ModelConfig
from skyrl_engine.modeling.causal_lm import transformer_layers
from skyrl_engine.modeling.named_tensors import entry, list_named_tensors, replace_entries
from skyrl_engine.modeling.optimizer import build_optimizer
from skyrl_engine.modeling.placement import Placed, load_on_ranks
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine_deepspeed import library
from skyrl_engine_deepspeed.fragments import fragment
from skyrl_engine_deepspeed.options import DeepSpeedConfig
from skyrl_engine_deepspeed.settings import settings


@frozen(eq=False)
class Loaded:
    """A model on this rank, its scorer, and the DeepSpeed engine that wraps the scorer.

    `parameters` are the scorer's trained parameters by their Hugging Face names, tied ones once; `frozen` those that `ModelConfig.freeze`
    names, which checkpoints hold too. `vocabulary` is the number of input embeddings. `engine` is None where nothing is divided or learned.
    """

    model: Any
    scorer: Scorer
    parameters: Mapping[str, nn.Parameter]
    frozen: Mapping[str, nn.Parameter]
    vocabulary: int
    engine: Any | None


def load(spec: ModelConfig, optimizer: AdamWSettings | None, config: DeepSpeedConfig, device: torch.device, seed: int) -> Loaded:
    """Load the model with equal weights on every rank, divided as `config` says. An error on one rank is raised on all of them."""
    divided = config.zero_stage == 3 and dist.get_world_size() > 1
    placed = load_on_ranks(spec, images=True, seed=seed, learns=optimizer is not None or divided)
    model, scorer = placed.model, placed.scorer
    _give_memory(placed)
    _send_buffers(placed, device)
    scored = list_scored_parameters(model, scorer)
    parameters = {name: parameter for name, parameter in scored.items() if parameter.requires_grad}
    frozen_parameters = {} if spec.lora is not None else {name: scored[name] for name in scored if name not in parameters}
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    if optimizer is None and not divided:
        for name, parameter in scored.items():
            parameter.data = _from_rank_0(placed, name, parameter, device)
        return Loaded(model, scorer, parameters, frozen_parameters, vocabulary, None)
    deepspeed = library.load(device)
    stated = settings(config, spec.dtype, device, learns=optimizer is not None)
    # before parameters are divided: weight decay depends on their shapes
    adamw = None if optimizer is None else build_optimizer(parameters, optimizer)
    if config.zero_stage == 3:
        _divide(deepspeed, scorer, stated, spec.dtype)
        if spec.compile:
            # a layer's weights are gathered together: by default DeepSpeed acts inside of layers, which makes a program for each of its modules
            for layer in transformer_layers(scorer.decoder):
                deepspeed.utils.set_z3_leaf_module(layer, True)
            # of a layer whose inputs need no gradient, as behind a frozen embedding, DeepSpeed frees the weights before its backward pass
            model.get_input_embeddings().register_forward_hook(_require_gradient)
    engine = library.initialize(deepspeed, model=scorer, optimizer=adamw, config=stated)
    if spec.dtype == "bfloat16" and adamw is not None:
        _restore_precision(engine, parameters, placed.whole, device)
    return Loaded(model, scorer, parameters, frozen_parameters, vocabulary, engine)


def _require_gradient(_embeddings: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def list_scored_parameters(model: nn.Module, scorer: Scorer) -> dict[str, nn.Parameter]:
    """Return the parameters of decoder and heads by their Hugging Face names, tied ones once."""
    scored = {id(parameter) for parameter in scorer.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in scored}


def _give_memory(placed: Placed) -> None:
    """Replace the meta tensors of ranks above 0 by uninitialised ones; the operating system takes host memory only once it is written to."""
    if dist.get_rank() == 0:
        return
    replacements: dict[int, Tensor] = {}
    for name, _ in list_named_tensors(placed.model):
        place = entry(placed.model, name)
        tensor = torch.empty(place.shape, dtype=place.dtype)
        kept = nn.Parameter(tensor, requires_grad=place.requires_grad) if isinstance(place, nn.Parameter) else tensor
        replacements[id(place)] = kept
    replace_entries(placed.model, replacements)


def _send_buffers(placed: Placed, device: torch.device) -> None:
    """Send buffers from rank 0 to all ranks: DeepSpeed does so for parameters only."""
    for name, buffer in placed.model.named_buffers():
        buffer.data = _from_rank_0(placed, name, buffer, device)


def _from_rank_0(placed: Placed, name: str, own: Tensor, device: torch.device) -> Tensor:
    """Return the values that rank 0 read for a parameter or buffer, on `device`."""
    values = (placed.whole[name] if placed.whole else own.detach()).to(device)
    dist.broadcast(values, src=0)
    return values


def _divide(deepspeed: Any, scorer: Scorer, stated: dict[str, Any], dtype: ComputeDtype) -> None:
    """Divide parameter by parameter, so that never more than one is whole on the device.

    The head's linear layer is read and never called, so DeepSpeed must be informed which module uses its weight.
    """
    if dtype == "bfloat16":
        for parameter in scorer.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    deepspeed.zero.Init(module=scorer, config_dict_or_path=stated)
    for parameter in scorer.head.linear.parameters():
        deepspeed.zero.register_external_parameter(scorer.head, parameter)


@torch.no_grad()
def _restore_precision(
    engine: Any, parameters: Mapping[str, nn.Parameter], float32: Mapping[str, Tensor], device: torch.device
) -> None:
    """Overwrite DeepSpeed's float32 weights, which it made from bfloat16 ones, with the values as they were read."""
    for name, parameter in parameters.items():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        values = float32[name].to(device) if name in float32 else torch.empty(shape, dtype=torch.float32, device=device)
        dist.broadcast(values, src=0)
        own = fragment(engine, parameter)
        if own is not None:
            own.weight.copy_(values.view(-1).narrow(0, own.start, own.size))
