"""Load a model on all ranks: rank 0 reads the weights and others start on the meta device, to save host memory."""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import EngineError
from skyrl_engine.modeling.entries import keeps_loose_tensors, named_tensors
from skyrl_engine.modeling.loading import adopt_like, load_scorer, load_skeleton
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.segments import SegmentSupport

logger = logging.getLogger(__name__)

Report = TypeVar("Report")


@frozen(eq=False)
class Placed:
    """The model (`transformers.PreTrainedModel`) and its scorer, on the CPU, before a backend divides them.

    With `everyone_read` each rank has all values. Otherwise rank 0 has them, also in `whole` by the names of `named_tensors`; on the other
    ranks parameters and buffers are on the meta device and `whole` is empty.
    """

    model: Any
    scorer: Scorer
    whole: Mapping[str, Tensor]
    everyone_read: bool


def load_on_ranks(spec: ModelConfig, *, images: bool = False, seed: int = 0) -> Placed:
    """Load the model on rank 0, and a skeleton on the others if that is enough. An error on one rank is raised on all of them.

    With `images`, the caller passes images to vision-language models.
    """
    reads = dist.get_rank() == 0
    model, scorer, report = _attempt(spec, reads=reads, images=images, seed=seed)
    loaded = gathered(report)
    everyone_reads = any(one.cannot_be_filled for one in loaded)
    if everyone_reads and not reads:
        logger.info("%s keeps tensors that are neither parameters nor buffers: every rank reads its weights", spec.path)
        model, scorer = load_scorer(spec, images=images, seed=seed)
    elif not reads:
        adopt_like(model, scorer, loaded[0].segment_support)
    whole = {} if everyone_reads or not reads else dict(named_tensors(model))
    return Placed(model, scorer, whole, everyone_reads)


def gathered(report: EngineError | Report) -> list[Report]:
    """Return every rank's report. An error on one rank is raised on all of them."""
    reports: list[EngineError | Report] = [report] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    found: list[Report] = []
    for one in reports:
        if isinstance(one, EngineError):
            raise one
        found.append(one)
    return found


@frozen
class _Loaded:
    """A rank's report after loading: whether its model needs the weights read on every rank, and its support of packed rows."""

    cannot_be_filled: bool
    segment_support: SegmentSupport


def _attempt(spec: ModelConfig, *, reads: bool, images: bool, seed: int) -> tuple[Any, Any, EngineError | _Loaded]:
    """Return model, scorer and the report for the other ranks, or an error."""
    try:
        if reads:
            model, scorer = load_scorer(spec, images=images, seed=seed)
            return model, scorer, _Loaded(cannot_be_filled=False, segment_support=scorer.segment_support)
        model, scorer = load_skeleton(spec, images=images, seed=seed)
    except EngineError as error:
        return None, None, error
    return model, scorer, _Loaded(keeps_loose_tensors(model), scorer.segment_support)
