"""Place a model on ranks: rank 0 reads the weights, and every rank keeps its part of them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from skyrl_engine import EngineError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.modeling.loading import load_beside
from skyrl_engine.modeling.named_tensors import entry, keep_ties, list_named_tensors, replace_entries
from skyrl_engine.modeling.placement import gather_reports, load_on_ranks
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.shared_weights import share_weights
from skyrl_engine_fsdp.layer_styles import refuse_model
from skyrl_engine_fsdp.meshes import Meshes
from skyrl_engine_fsdp.options import FsdpConfig
from skyrl_engine_fsdp.sharding import reshard, shard, stays_whole
from skyrl_engine_fsdp.tensor_parallel import LayerPlan, parallelize
from skyrl_engine_fsdp.tensor_parallel_proof import prove, whole_logprobs


def load_sharded(spec: ModelConfig, meshes: Meshes, device: torch.device, options: FsdpConfig, seed: int) -> tuple[Any, Scorer]:
    """Return the model and its scorer, divided over tensor-parallel ranks and sharded over data-parallel ranks.

    An error on one rank is raised on all of them.
    """
    whole = meshes.topology.tp == 1
    plan = None
    if not whole:
        config = load_config(spec)
        refuse_model(meshes.topology.tp, config, spec)
        plan = LayerPlan.of(config)
    placed = load_on_ranks(spec, images=whole, seed=seed)
    expected = None
    if plan is not None and meshes.tensor is not None:
        if dist.get_rank() == 0:
            expected = whole_logprobs(placed.model, placed.scorer)
        parallelize(placed.model, placed.scorer, plan, meshes.tensor)
    with keep_ties(placed.model):
        shard(placed.scorer, meshes, device, spec.dtype, options)
    _fill(placed.model, placed.whole, device, offloaded=options.cpu_offload)
    if meshes.tensor is not None:
        prove(placed.model, placed.scorer, meshes.tensor, device, spec, expected=expected)
    return placed.model, placed.scorer


def load_beside_sharded(
    spec: ModelConfig, base: Any, base_scorer: Scorer, meshes: Meshes, device: torch.device, options: FsdpConfig, seed: int
) -> tuple[Any, Scorer]:
    """Return a model with adapters of its own over the frozen weights of `base`, which has others, and its scorer, sharded as `base` is.

    A frozen parameter whose rows are not as many on every rank is copied when it is first gathered: FSDP2 pads each model's own. An error
    on one rank is raised on all of them.
    """
    loaded, error = None, None
    try:
        loaded = load_beside(spec, base_scorer.segment_support, images=True, seed=seed)
    except EngineError as met:
        error = met
    gather_reports(error or loaded is not None)
    assert loaded is not None, "an error is raised on all ranks"
    model, scorer = loaded
    reshard(base_scorer)
    if stays_whole(meshes.topology, spec.dtype, options):
        share_weights(model, base, spec.path)
        shard(scorer, meshes, device, spec.dtype, options)
    else:
        with keep_ties(model):
            shard(scorer, meshes, device, spec.dtype, options)
        share_weights(model, base, spec.path)
    return model, scorer


@torch.no_grad()
def _fill(model: nn.Module, whole: Mapping[str, Tensor], device: torch.device, *, offloaded: bool) -> None:
    """Send every tensor of `whole` from rank 0, and keep this rank's part of it on the others. Tied tensors stay tied.

    With `offloaded`, the parts of parameters stay in host memory.
    """
    if dist.get_world_size() == 1:
        return
    filled: dict[int, Tensor] = {}
    for name, _ in list_named_tensors(model):
        place = entry(model, name)
        values = whole[name].to(device) if whole else torch.empty(place.shape, dtype=place.dtype, device=device)
        dist.broadcast(values, src=0)
        if whole:  # on rank 0, where sharding has kept its part
            continue
        part = values
        if isinstance(place, DTensor):
            part = kept = torch.empty_like(place, device="cpu" if offloaded else device)
            mine = distribute_tensor(values, place.device_mesh, place.placements, src_data_rank=None)
            assert isinstance(kept, DTensor)
            # copied, because a view would keep the whole tensor alive
            kept.to_local().copy_(mine.to_local())
        filled[id(place)] = nn.Parameter(part, requires_grad=place.requires_grad) if isinstance(place, nn.Parameter) else part
    replace_entries(model, filled)
