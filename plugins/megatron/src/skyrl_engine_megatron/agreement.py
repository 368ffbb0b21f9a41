"""A cheap check at load: the divided model gives a few tokens the log-probabilities that transformers' own model gives them."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_engine import ModelError
from skyrl_engine.contracts import IMAGE_GRID, PIXEL_VALUES, TOKEN_TYPES, ComputeDtype, MicroBatch, Ragged, RankOutput
from skyrl_engine.modeling.images import IMAGE
from skyrl_engine.modeling.loading import failed_pass_error
from skyrl_engine_megatron.architecture import Architecture
from skyrl_engine_megatron.loading import ReadModel
from skyrl_engine_megatron.pipeline import Pipeline

ROWS: Final = 2
WIDTH: Final = 6
TOLERANCE: Final[Mapping[ComputeDtype, float]] = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 1e-1}
"""Largest difference relative to 1 + |logprob|. transformers normalises in float32 in every precision, so float64 agrees no better; bfloat16
rounds to 8 bits in every layer. A misplaced weight gives a difference of 1 or more."""


class _Keep:
    """An objective that keeps the log-probabilities and produces no output."""

    needs = frozenset({"logprobs"})
    temperature = 1.0
    kept: Tensor | None = None

    def __call__(self, scores: Mapping[str, Tensor], micro_batch: MicroBatch) -> tuple[Tensor, RankOutput]:  # noqa: ARG002 - the protocol has it
        self.kept = scores["logprobs"].detach()
        return self.kept.sum(), RankOutput.empty()


@torch.no_grad()
def check_agreement(pipeline: Pipeline, source: ReadModel, name: str, dtype: ComputeDtype) -> None:
    """Raises ModelError, on all ranks, if `pipeline` disagrees with `source.model`, transformers' own model on rank 0's CPU; on rank 0
    alone, if that model's own pass fails.
    """
    rows = _probe_rows(source.architecture)
    ids = rows.inputs["input_ids"]
    expected = torch.zeros(len(rows.labels), dtype=torch.float64)
    if (model := source.model) is not None:
        model.eval()
        try:
            logits = model(**rows.inputs, use_cache=False).logits[:, :-1].double()
        except RuntimeError as error:
            raise failed_pass_error(model, name, error) from error
        expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()
    expected = expected.to(pipeline.device)
    dist.broadcast(expected, src=0)
    keep = _Keep()
    for stage_model in pipeline.models:
        stage_model.eval()
    pipeline.run([rows], keep, learn=False)
    difference = torch.zeros((), dtype=torch.float64, device=pipeline.device)
    if keep.kept is not None:
        difference = ((keep.kept - expected).abs() / (1 + expected.abs())).nan_to_num(float("inf")).max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    if not difference <= TOLERANCE[dtype]:
        raise ModelError(
            f"the megatron backend computes log-probabilities of {name} that differ from transformers' by {float(difference):.1e}",
            remedy="Use the fsdp backend for this model, and report it",
        )


def _probe_rows(architecture: Architecture) -> MicroBatch:
    """Return rows of random tokens, all scored; for a vision-language model, each row holds a random image of two by three tokens."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, architecture.vocabulary, (ROWS, WIDTH), generator=draw)
    images, offsets = {}, {}
    if (vision := architecture.vision) is not None:
        text = torch.tensor([token for token in range(architecture.vocabulary) if token not in vision.other_tokens])
        side, patches = vision.tokens.merge, 6 * vision.tokens.merge**2
        image_tokens = torch.full((ROWS, 6), vision.tokens.token)
        types = torch.zeros(ROWS, WIDTH + 6, dtype=torch.int64)
        types[:, 2:8] = IMAGE
        ids = text[ids % len(text)]
        ids = torch.cat([ids[:, :2], image_tokens, ids[:, 2:]], 1)
        images = {
            PIXEL_VALUES: torch.randn(ROWS * patches, vision.tokens.patch, generator=draw),
            IMAGE_GRID: torch.tensor([[1, 2 * side, 3 * side]] * ROWS),
            TOKEN_TYPES: types,
        }
        offsets = {PIXEL_VALUES: np.arange(ROWS + 1) * patches, IMAGE_GRID: np.arange(ROWS + 1)}
    rows, width = ids.shape
    places = torch.arange(ids.numel()).reshape(ids.shape)
    lengths = Ragged.from_list([[width]] * rows, np.int64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}
    return MicroBatch(inputs, places[:, :-1].flatten(), ids[:, 1:].flatten(), lengths, None, ragged_offsets=offsets)
