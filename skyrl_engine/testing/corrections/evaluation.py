"""Evaluation of a correction by the engine's own way of applying one, which checks its factors."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from skyrl_engine.contracts.kinds.loss import LossTokens
from skyrl_engine.contracts.kinds.needs import model_score
from skyrl_engine.objective.behind import Later
from skyrl_engine.objective.corrections import correct
from skyrl_engine.objective.tokens import MicroBatchTokens
from skyrl_engine.testing.subject import part_of
from skyrl_engine.testing.tokens.evaluation import SEED, STEP, Evaluation, Listening, numbers_of
from skyrl_engine.testing.tokens.token_batches import TokenBatch


def evaluate(
    label: str,
    correction: Any,
    batch: TokenBatch,
    *,
    dtype: torch.dtype = torch.float64,
    mode: TorchFunctionMode | None = None,
    backward_mode: object = None,  # noqa: ARG001 - there is no backward pass
) -> Evaluation:
    """Apply this correction alone to the batch as one micro-batch, `mode` around its call; `total` is the sum of its factors, which have
    no gradients.

    Raises EngineError where the correction fails or returns what the engine refuses.
    """
    listening, tokens = Listening(correction, mode), _tokens(batch, dtype)
    later = Later(tokens.like.device)
    factors, _ = correct([part_of(listening, label, "correction")], tokens, later, first_index=1)
    later.raise_now()
    heard = listening.heard
    return Evaluation("factor", numbers_of(factors), factors.sum().item(), {}, {}, heard["output"].dtype, heard.get("drew", False))


def tokens_for_correction(label: str, correction: Any, batch: TokenBatch) -> LossTokens:
    """Return the batch as the engine gives it to the first correction: all tokens, nothing differentiable."""
    return _tokens(batch, torch.float64).for_correction(label, tuple(correction.needs), 0, None)


def _tokens(batch: TokenBatch, dtype: torch.dtype) -> MicroBatchTokens:
    names = [name for name in batch.values if model_score(name)]
    scores = {name: torch.from_numpy(batch.values[name].copy()).to(dtype) for name in names}
    return MicroBatchTokens(scores, batch.micro_batch().samples, SEED, STEP)
