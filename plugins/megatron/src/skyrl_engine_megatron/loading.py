"""Load a Hugging Face model onto Megatron ranks: rank 0 alone reads the weights and sends them; every rank keeps its share."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from skyrl_engine import EngineError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.modeling.loading import load_causal_lm
from skyrl_engine_megatron.architecture import Architecture, architecture_of
from skyrl_engine_megatron.limits import refuse_model
from skyrl_engine_megatron.options import MegatronConfig
from skyrl_engine_megatron.state import ShardedState

logger = logging.getLogger(__name__)


@frozen(eq=False)
class ReadModel:
    """The architecture, on every rank, and `transformers.PreTrainedModel` on rank 0's CPU."""

    architecture: Architecture
    model: Any | None


def read(spec: ModelConfig, options: MegatronConfig) -> ReadModel:
    """Read configuration and weights. Raises ModelError or UnsupportedError on all ranks if one rank fails."""
    source, error = _attempt(spec, options)
    errors: list[EngineError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for error_of_rank in errors:
        if error_of_rank is not None:
            raise error_of_rank
    assert source is not None
    return source


def _attempt(spec: ModelConfig, options: MegatronConfig) -> tuple[ReadModel | None, EngineError | None]:
    try:
        config = load_config(spec, images=True)
        refuse_model(options, config, spec)
        architecture = architecture_of(config, spec.path)
        return ReadModel(architecture, load_causal_lm(spec, images=True) if dist.get_rank() == 0 else None), None
    except EngineError as error:
        return None, error


@torch.no_grad()
def distribute(source: ReadModel, state: ShardedState, device: torch.device, dtype: torch.dtype) -> None:
    """Send every tensor of `source` from rank 0 and fill `state` with this rank's share."""
    weights: dict[str, Tensor] = {} if source.model is None else source.model.state_dict()
    for entry in state.entries:
        whole = []
        for name, shape in entry.sources:
            tensor = weights[name].to(device, dtype).contiguous() if weights else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, src=0)
            whole.append(tensor)
        state.fill(entry, whole)
