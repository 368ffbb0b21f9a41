"""Place a model on ranks: every rank reads its part of the weights, or rank 0 all of them, of which every rank keeps its part."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_engine import EngineError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.model_facts.tensor_parallel_plan import styles_of
from skyrl_engine.modeling.causal_lm import all_layers, tower_layers
from skyrl_engine.modeling.loading import load_beside
from skyrl_engine.modeling.named_tensors import entry, keep_ties, list_named_tensors, replace_entries
from skyrl_engine.modeling.placement import Placed, gather_reports, load_on_ranks
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.shared_weights import share_weights
from skyrl_engine_fsdp.context_limits import refuse_context
from skyrl_engine_fsdp.expert_parallel import divide_experts_among
from skyrl_engine_fsdp.float8 import convert_layers
from skyrl_engine_fsdp.layer_styles import refuse_experts, refuse_model
from skyrl_engine_fsdp.meshes import Meshes
from skyrl_engine_fsdp.options import FsdpConfig
from skyrl_engine_fsdp.sharding import reshard, shard, stays_whole
from skyrl_engine_fsdp.tensor_parallel import LayerPlan, parallelize
from skyrl_engine_fsdp.tensor_parallel_proof import prove, whole_logprobs


def load_sharded(
    spec: ModelConfig, meshes: Meshes, device: torch.device, options: FsdpConfig, seed: int, *, learns: bool
) -> tuple[Any, Scorer]:
    """Return the model and its scorer, divided over tensor-parallel ranks and sharded over data-parallel ranks.

    The weights of a model that does not learn are held in the precision that computes. An error on one rank is raised on all of them.
    """
    refuse_context(options, spec)
    plan = None
    if meshes.tensor is not None:
        config = load_config(spec, images=True)
        refuse_model(meshes.topology.tp, config, spec)
        plan = LayerPlan.of(config, experts=meshes.experts is None)
    # the proof of tensor parallelism compares with the whole model
    parts = plan is None and dist.get_world_size() > 1
    placed = load_on_ranks(spec, images=True, seed=seed, learns=learns, in_parts=parts)
    expected = None
    if plan is not None and meshes.tensor is not None:
        if dist.get_rank() == 0:
            expected = whole_logprobs(placed.model, placed.scorer)
        parallelize(placed.model, placed.scorer, plan, meshes.tensor)
    experts = _divide_experts(spec, placed.scorer, meshes, options)
    tower = {id(layer) for layer in tower_layers(placed.scorer.decoder)}
    convert_layers([layer for layer in all_layers(placed.scorer.decoder) if id(layer) not in tower], options)
    with keep_ties(placed.model):
        shard(placed.scorer, meshes, device, spec.dtype, options, experts)
    _fill(placed, device, offloaded=options.cpu_offload)
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
    if meshes.tensor is not None:
        plan = LayerPlan.of(load_config(spec, images=True), experts=meshes.experts is None)
        parallelize(model, scorer, plan, meshes.tensor)
    experts = _divide_experts(spec, scorer, meshes, options)
    reshard(base_scorer)
    if stays_whole(meshes.topology, spec.dtype, options):
        share_weights(model, base, spec.path)
        shard(scorer, meshes, device, spec.dtype, options)
    else:
        with keep_ties(model):
            shard(scorer, meshes, device, spec.dtype, options, experts)
        share_weights(model, base, spec.path)
    return model, scorer


def _divide_experts(spec: ModelConfig, scorer: Scorer, meshes: Meshes, options: FsdpConfig) -> list[nn.Module]:
    """Divide the experts of every layer where ranks share them, in place, and return the modules that hold them."""
    if meshes.experts is None:
        return []
    config = load_config(spec, images=True)
    refuse_experts(options, config, spec)
    group = None if meshes.tensor is None else meshes.tensor.get_group()
    return divide_experts_among(scorer.decoder, styles_of(config), meshes.experts, group)


@torch.no_grad()
def _fill(placed: Placed, device: torch.device, *, offloaded: bool) -> None:
    """Give every tensor its values on this rank, read from the files or sent by rank 0. Tied tensors stay tied.

    With `offloaded`, the parts of parameters stay in host memory. An error on one rank is raised on all of them.
    """
    if dist.get_world_size() == 1:
        return
    model, filled = placed.model, dict[int, Tensor]()
    names = [name for name, _ in list_named_tensors(model)]
    gather_reports(_read_parts(placed, names, filled, device, offloaded=offloaded))
    for name in names:
        if placed.stored is not None and name in placed.stored:
            continue
        place = entry(model, name)
        values = placed.whole[name].to(device) if placed.whole else torch.empty(place.shape, dtype=place.dtype, device=device)
        dist.broadcast(values, src=0)
        if placed.whole and placed.stored is None:  # on rank 0, where sharding has kept its part
            continue
        part = values
        if isinstance(place, DTensor):
            part = _make_part(place, device, offloaded=offloaded)
            # copied, because a view would keep the whole tensor alive
            part.to_local().copy_(distribute_tensor(values, place.device_mesh, place.placements, src_data_rank=None).to_local())
        filled[id(place)] = _like(place, part)
    replace_entries(model, filled)


def _read_parts(
    placed: Placed, names: list[str], filled: dict[int, Tensor], device: torch.device, *, offloaded: bool
) -> EngineError | None:
    """Read this rank's part of every tensor that lies in the files, into `filled`; return what went wrong."""
    if placed.stored is None:
        return None
    try:
        for name in (name for name in names if name in placed.stored):
            place = entry(placed.model, name)
            if isinstance(place, DTensor):
                shape, offset = compute_local_shape_and_global_offset(place.shape, place.device_mesh, place.placements)
                region = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
                # made before the part is read, so that what reading takes is given back to the system after it
                part = _make_part(place, device, offloaded=offloaded)
                part.to_local().copy_(placed.stored.read(name, place, region))
                filled[id(place)] = _like(place, part)
            else:
                filled[id(place)] = _like(place, placed.stored.read(name, place).to(device, copy=True))
    except EngineError as error:
        return error
    return None


def _make_part(place: DTensor, device: torch.device, *, offloaded: bool) -> DTensor:
    """Make a tensor without values, of which each rank has the part that `place` gives it."""
    part = torch.empty_like(place, device="cpu" if offloaded else device)
    assert isinstance(part, DTensor)
    return part


def _like(place: Tensor, part: Tensor) -> Tensor:
    return nn.Parameter(part, requires_grad=place.requires_grad) if isinstance(place, nn.Parameter) else part
