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
from skyrl_engine.modeling.loading import adopt_like, load_scorer, load_skeleton
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

logger = logging.getLogger(__name__)

Report = TypeVar("Report")

Tensors = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Name, shape and dtype of every parameter and buffer, in the order of `named_tensors`."""


@frozen(eq=False)
class Placed:
    """The model (`transformers.PreTrainedModel`) and its scorer, before a backend divides them.

    Rank 0 has all values on the CPU; `whole` has them too, by the names of `list_named_tensors`. On the other ranks every parameter and buffer
    is on the meta device, whatever device modelling code made it on, and `whole` is empty: the backend broadcasts all of them from rank 0.
    """

    model: Any
    scorer: Scorer
    whole: Mapping[str, Tensor]


def load_on_ranks(spec: ModelConfig, *, images: bool = False, seed: int = 0) -> Placed:
    """Load the model on rank 0, and a skeleton on the others if that is enough. An error on one rank is raised on all of them.

    With `images`, the caller passes images to vision-language models.
    """
    reads = dist.get_rank() == 0
    model, scorer, report = _attempt(spec, reads=reads, images=images, seed=seed)
    loaded = gather_reports(report)
    everyone_reads = any(one.cannot_be_filled for one in loaded)
    if everyone_reads and not reads:
        logger.info("%s keeps tensors that are neither parameters nor buffers: every rank reads its weights", spec.path)
        model, scorer = load_scorer(spec, images=images, seed=seed)
    elif not reads:
        adopt_like(model, scorer, loaded[0].segment_support)
    gather_reports(None if reads else _empty_tensors(model, loaded[0].tensors, spec.path))
    if not reads:
        replace_loose_tensors(model, loaded[0].loose)
    return Placed(model, scorer, dict(list_named_tensors(model)) if reads else {})


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


def _attempt(spec: ModelConfig, *, reads: bool, images: bool, seed: int) -> tuple[Any, Any, EngineError | _Loaded]:
    """Return model, scorer and the report for the other ranks, or an error."""
    try:
        load = load_scorer if reads else load_skeleton
        model, scorer = load(spec, images=images, seed=seed)
    except EngineError as error:
        return None, None, error
    return model, scorer, _Loaded.of(model, scorer, cannot_be_filled=not reads and keeps_loose_tensors(model))
