"""Load a Hugging Face model onto Megatron ranks: rank 0 alone reads the weights and sends them; every rank keeps its share."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from skyrl_engine import EngineError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.configuration import load_config, source_of
from skyrl_engine.modeling.causal_lm import split_causal_lm
from skyrl_engine.modeling.loading import build_causal_lm, load_beside, load_causal_lm
from skyrl_engine.modeling.lora import add_adapters, load_adapters
from skyrl_engine.modeling.rotary_frequencies import fix_rotary_frequencies
from skyrl_engine.modeling.segments import SegmentSupport
from skyrl_engine.modeling.value_head import add_value_head, has_bias, load_value_head
from skyrl_engine.modeling.vision import language_part
from skyrl_engine_megatron.adapters import Adapters, list_adapters
from skyrl_engine_megatron.architecture import Architecture, architecture_of
from skyrl_engine_megatron.limits import refuse_model
from skyrl_engine_megatron.options import MegatronConfig
from skyrl_engine_megatron.state import ShardedState

logger = logging.getLogger(__name__)


@frozen(eq=False)
class ReadModel:
    """The architecture and adapters (None: all weights are trained), on every rank; `transformers.PreTrainedModel` on rank 0's CPU."""

    architecture: Architecture
    model: Any | None
    adapters: Adapters | None = None


def read(spec: ModelConfig, options: MegatronConfig, seed: int = 0, *, beside: bool = False) -> ReadModel:
    """Read configuration and weights; `seed` draws new adapters. Raises ModelError or UnsupportedError on all ranks if one rank fails.

    `beside` reads what is trained alone, adapters and a value head, of a model whose other weights are on the ranks already.
    """
    source, error = _attempt(spec, options, seed, beside=beside)
    errors: list[EngineError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for error_of_rank in errors:
        if error_of_rank is not None:
            raise error_of_rank
    assert source is not None
    return source


def _attempt(spec: ModelConfig, options: MegatronConfig, seed: int, *, beside: bool) -> tuple[ReadModel | None, EngineError | None]:
    try:
        config = load_config(spec, images=True)
        refuse_model(options, config, spec)
        architecture = architecture_of(config, spec.path, spec.rotary_length)
        model = None
        if dist.get_rank() == 0:
            model = _load_for_training(spec, seed) if beside else _load(spec, architecture, seed)
        if spec.lora is None:
            return ReadModel(architecture, model), None
        return ReadModel(architecture, model, list_adapters(model or _make_skeleton(spec, config, seed))), None
    except EngineError as error:
        return None, error


def _load(spec: ModelConfig, architecture: Architecture, seed: int) -> Any:
    """Load the whole model, with adapters and a value head if it is to have them."""
    model = load_causal_lm(spec, images=True)
    fix_rotary_frequencies(model, spec.rotary_length)
    if spec.lora is not None:
        add_adapters(model, language_part(split_causal_lm(model).decoder), spec, seed)
    if spec.value_head:
        head = add_value_head(model, architecture.hidden, name=spec.path, bias=has_bias(spec))
        if not load_value_head(head, spec, source_of(spec)):
            logger.info("%s holds no value head; it starts at zero", spec.path)
    if spec.lora is not None and spec.lora.path is not None:
        load_adapters(model, spec)
    return model


def _load_for_training(spec: ModelConfig, seed: int) -> Any:
    """Load adapters and a value head; all other weights have no values."""
    model, _ = load_beside(evolve(spec, activation_checkpointing=False, compile=False), SegmentSupport(), images=True, seed=seed)
    return model


def _make_skeleton(spec: ModelConfig, config: Any, seed: int) -> Any:
    """Make the model with adapters, without values."""
    with torch.device("meta"):
        model = build_causal_lm(spec, config)
        add_adapters(model, language_part(split_causal_lm(model).decoder), spec, seed)
    return model


@torch.no_grad()
def distribute(source: ReadModel, state: ShardedState, device: torch.device, dtype: torch.dtype) -> None:
    """Send every tensor of `source` from rank 0 and fill `state` with this rank's share."""
    weights: dict[str, Tensor] = {} if source.model is None else source.model.state_dict()
    for entry in state.entries:
        whole = []
        for name, shape in entry.sources:
            tensor = (
                _find(weights, name).to(device, dtype).contiguous() if weights else torch.empty(shape, dtype=dtype, device=device)
            )
            dist.broadcast(tensor, src=0)
            whole.append(tensor)
        state.fill(entry, whole)


def _find(weights: dict[str, Tensor], name: str) -> Tensor:
    """Return the weight of this name; PEFT gives that of a layer with an adapter another one."""
    if name in weights:
        return weights[name]
    module, _, kind = name.rpartition(".")
    return weights[f"{module}.base_layer.{kind}"]
