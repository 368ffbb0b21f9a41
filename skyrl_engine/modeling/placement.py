"""Load a model on all ranks: rank 0 reads the weights and others start on the meta device, to save host memory."""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import EngineError, ModelError
from skyrl_engine.modeling.exporting import round_like_export
from skyrl_engine.modeling.loading import adopt_like, check_first_layers, load_scorer, load_skeleton, load_without_weights
from skyrl_engine.modeling.named_tensors import (
    entry,
    keeps_loose_tensors,
    list_named_tensors,
    loose_tensors,
    replace_entries,
    replace_loose_tensors,
)
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.segments import SegmentSupport
from skyrl_engine.modeling.stored_weights import WeightsInFiles

logger = logging.getLogger(__name__)

Report = TypeVar("Report")

Tensors = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Name, shape and dtype of every parameter and buffer, in the order of `named_tensors`."""


@frozen(eq=False)
class Placed:
    """The model (`transformers.PreTrainedModel`) and its scorer, before a backend divides them.

    Without `stored`, rank 0 has all values on the CPU; `whole` has them too, by the names of `list_named_tensors`. On the other ranks every
    parameter and buffer is on the meta device, whatever device modelling code made it on, and `whole` is empty: the backend broadcasts all of
    them from rank 0. With `stored`, all are on the meta device on every rank: each rank reads its part of what `stored` knows, and the backend
    broadcasts the others, which `whole` has on rank 0.
    """

    model: Any
    scorer: Scorer
    whole: Mapping[str, Tensor]
    stored: WeightsInFiles | None = None


def load_on_ranks(spec: ModelConfig, *, images: bool = False, seed: int = 0, learns: bool = True, in_parts: bool = False) -> Placed:
    """Load the model on rank 0, and a skeleton on the others if that is enough. An error on one rank is raised on all of them.

    With `in_parts`, no rank loads it whole, if each can read parts of its files (`Placed.stored`). With `images`, the caller passes images to
    vision-language models. The weights of a model that does not learn are rounded to the precision that computes, as an export's are
    (`exporting.round_like_export`).
    """
    if in_parts and (placed := _load_in_parts(spec, images=images, seed=seed, learns=learns)) is not None:
        return placed
    reads = dist.get_rank() == 0
    model, scorer, report = _attempt(spec, reads=reads, images=images, seed=seed, learns=learns)
    loaded = gather_reports(report)
    everyone_reads = any(one.cannot_be_filled for one in loaded)
    if everyone_reads and not reads:
        logger.info("%s keeps tensors that are neither parameters nor buffers: every rank reads its weights", spec.path)
        model, scorer = load_scorer(spec, images=images, seed=seed)
        if not learns:
            round_like_export(model, spec)
    elif not reads:
        adopt_like(model, scorer, loaded[0].segment_support)
    gather_reports(None if reads else _empty_tensors(model, loaded[0].tensors, spec.path))
    if not reads:
        replace_loose_tensors(model, loaded[0].loose)
    return Placed(model, scorer, dict(list_named_tensors(model)) if reads else {})


def _load_in_parts(spec: ModelConfig, *, images: bool, seed: int, learns: bool) -> Placed | None:
    """Make the model without values on every rank, and check its first layers on rank 0; None where it must be loaded whole.

    An error on one rank is raised on all of them.
    """
    model, scorer, stored, report = _attempt_without_weights(spec, images=images, seed=seed, learns=learns)
    reports = gather_reports(report)
    reason = next((one for one in reports if isinstance(one, str)), None)
    if reason is not None:
        if dist.get_rank() == 0:
            logger.info("%s is loaded whole on rank 0, and sent to the others: %s", spec.path, reason)
        return None
    assert stored is not None
    first = reports[0]
    assert isinstance(first, _Loaded)
    reads = dist.get_rank() == 0
    (support, *_) = gather_reports(_attempt_check(spec, scorer, stored, images=images) if reads else None)
    assert isinstance(support, SegmentSupport)
    adopt_like(model, scorer, support)
    others = {name: tensor for name, tensor in list_named_tensors(model) if name not in stored} if reads else {}
    gather_reports(_empty_tensors(model, first.tensors, spec.path))
    replace_loose_tensors(model, first.loose)
    return Placed(model, scorer, others, stored)


def _attempt_without_weights(
    spec: ModelConfig, *, images: bool, seed: int, learns: bool
) -> tuple[Any, Any, WeightsInFiles | None, "EngineError | _Loaded | str"]:
    """Return model, scorer, the places of its weights and the report for the other ranks: a reason to load it whole, or an error."""
    try:
        # what no file holds may be drawn, and rank 0's draws count
        with torch.random.fork_rng(devices=(), enabled=dist.get_rank() > 0):
            loaded = load_without_weights(spec, images=images, seed=seed)
        if isinstance(loaded, str):
            return None, None, None, loaded
        model, scorer, stored = loaded
        if not learns:
            round_like_export(model, spec)
    except EngineError as error:
        return None, None, None, error
    return model, scorer, stored, _Loaded.of(model, scorer, cannot_be_filled=False)


def _attempt_check(spec: ModelConfig, scorer: Scorer, stored: WeightsInFiles, *, images: bool) -> EngineError | SegmentSupport:
    try:
        return check_first_layers(spec, scorer.decoder, stored, images=images)
    except EngineError as error:
        return error


def _empty_tensors(model: Any, tensors: Tensors, path: str) -> ModelError | None:
    """Put meta tensors of rank 0's shapes and dtypes in the place of all parameters and buffers, or return what does not fit.

    Code that makes a parameter outside of `torch.device("meta")` gives it values of this rank, and perhaps a dtype of its own.
    """
    own = [name for name, _ in list_named_tensors(model)]
    if own != [name for name, *_ in tensors]:
        differing = sorted({name for name, *_ in tensors}.symmetric_difference(own)) or own
        return ModelError(
            f"{path} ({type(model).__name__}) has other tensors without its weights than with them, {differing[0]} first",
            remedy="Run on one rank, or let the model's code make the same parameters and buffers, in the same order, on any device",
        )
    replacements: dict[int, Tensor] = {}
    for name, shape, dtype in tensors:
        place = entry(model, name)
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        replacements[id(place)] = (
            nn.Parameter(tensor, requires_grad=place.requires_grad) if isinstance(place, nn.Parameter) else tensor
        )
    replace_entries(model, replacements)
    return None


def gather_reports(report: EngineError | Report) -> list[Report]:
    """Return every rank's report. An error on one rank is raised on all of them."""
    reports: list[EngineError | Report] = [report] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    gathered: list[Report] = []
    for rank_report in reports:
        if isinstance(rank_report, EngineError):
            raise rank_report
        gathered.append(rank_report)
    return gathered


@frozen
class _Loaded:
    """A rank's report after loading: whether its model needs the weights read on every rank, its support of packed rows, its parameters and
    buffers, and the other tensors with values that its modules hold.
    """

    cannot_be_filled: bool
    segment_support: SegmentSupport
    tensors: Tensors
    loose: Mapping[tuple[str, str], Tensor]

    @classmethod
    def of(cls, model: Any, scorer: Scorer, *, cannot_be_filled: bool) -> "_Loaded":
        tensors = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in list_named_tensors(model))
        loose = {place: tensor.detach() for place, tensor in loose_tensors(model).items() if not tensor.is_meta}
        return cls(cannot_be_filled, scorer.segment_support, tensors, loose)


def _attempt(spec: ModelConfig, *, reads: bool, images: bool, seed: int, learns: bool) -> tuple[Any, Any, EngineError | _Loaded]:
    """Return model, scorer and the report for the other ranks, or an error."""
    try:
        load = load_scorer if reads else load_skeleton
        model, scorer = load(spec, images=images, seed=seed)
        if not learns:
            round_like_export(model, spec)
    except EngineError as error:
        return None, None, error
    return model, scorer, _Loaded.of(model, scorer, cannot_be_filled=not reads and keeps_loose_tensors(model))
