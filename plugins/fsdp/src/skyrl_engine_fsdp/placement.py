"""Weights onto ranks: rank 0 alone reads them, the others start from shapes, so a host does not hold one whole model per rank."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from skyrl_engine.contracts.backend import ModelSpec
from skyrl_engine.errors import EngineError
from skyrl_engine.modeling.loading import adopt_like, load_scorer, load_skeleton
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.segments import SegmentSupport
from skyrl_engine_fsdp.sharding import shard

logger = logging.getLogger(__name__)


def load_sharded(spec: ModelSpec, mesh: DeviceMesh, device: torch.device, *, reshard_after_forward: bool) -> tuple[Any, Scorer]:
    """The model and its scorer, sharded over `mesh`, with equal weights on every rank. An error on one rank is raised on all of them."""
    reads = dist.get_rank() == 0
    model, scorer, report = _attempt(spec, reads=reads)
    reports: list[EngineError | _Loaded] = [report] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    loaded = []
    for one in reports:
        if isinstance(one, EngineError):
            raise one
        loaded.append(one)
    everyone_reads = any(one.cannot_be_filled for one in loaded)
    if everyone_reads and not reads:
        logger.info("%s keeps tensors that are neither parameters nor buffers: every rank reads its weights", spec.path)
        model, scorer = load_scorer(spec)
    elif not reads:
        adopt_like(model, scorer, loaded[0].segment_support)
    whole = {} if everyone_reads or not reads else dict(_tensors(model))
    shard(scorer, mesh, device, spec.dtype, reshard_after_forward=reshard_after_forward)
    if not everyone_reads:
        _fill(model, whole, device)
    return model, scorer


@frozen
class _Loaded:
    """What the other ranks must know of a rank that has a model: can it do without reading the weights, and does it attend by segments."""

    cannot_be_filled: bool
    segment_support: SegmentSupport


def _attempt(spec: ModelSpec, *, reads: bool) -> tuple[Any, Any, EngineError | _Loaded]:
    """Model, scorer, and what the other ranks must know of them, or an error."""
    try:
        if reads:
            model, scorer = load_scorer(spec)
            return model, scorer, _Loaded(cannot_be_filled=False, segment_support=scorer.segment_support)
        model, scorer = load_skeleton(spec)
    except EngineError as error:
        return None, None, error
    return model, scorer, _Loaded(_keeps_loose_tensors(model), scorer.segment_support)


def _keeps_loose_tensors(model: nn.Module) -> bool:
    """Whether a module of a skeleton holds a tensor without values that nothing could fill later."""
    return any(isinstance(value, Tensor) and value.is_meta for module in model.modules() for value in vars(module).values())


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name, shared ones once, in an order that is the same on every rank."""
    return [*((name, parameter.detach()) for name, parameter in model.named_parameters()), *model.named_buffers()]


@torch.no_grad()
def _fill(model: nn.Module, whole: dict[str, Tensor], device: torch.device) -> None:
    """Send every tensor from rank 0, which has them `whole`, and keep this rank's part of it. Tied tensors stay tied."""
    filled: dict[int, Tensor] = {}
    for name, _ in _tensors(model):
        owner_name, _, key = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        place = owner._parameters[key] if key in owner._parameters else owner._buffers[key]  # noqa: SLF001 - torch offers no other access to a shared entry
        assert place is not None
        values = whole[name].to(device) if whole else torch.empty(place.shape, dtype=place.dtype, device=device)
        dist.broadcast(values, src=0)
        if not place.is_meta:  # rank 0: sharding has kept its part
            continue
        part = values
        if isinstance(place, DTensor):
            part = kept = torch.empty_like(place, device=device)
            mine = distribute_tensor(values, place.device_mesh, place.placements, src_data_rank=None)
            assert isinstance(kept, DTensor)
            kept.to_local().copy_(mine.to_local())  # copied: a view would keep the whole tensor alive
        filled[id(place)] = nn.Parameter(part, requires_grad=place.requires_grad) if isinstance(place, nn.Parameter) else part
    for module in model.modules():
        for entries in (module._parameters, module._buffers):  # noqa: SLF001 - assigning attributes would not keep shared entries shared
            for key, value in entries.items():
                if value is not None and id(value) in filled:
                    entries[key] = filled[id(value)]  # type: ignore[assignment] # a parameter where there was one
