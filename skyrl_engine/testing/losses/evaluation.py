"""Evaluation of a loss by the engine's own objective, alone in it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from skyrl_engine.contracts.kinds.loss import as_loss_output
from skyrl_engine.contracts.kinds.needs import DIVERGENCE, MODEL_SCORES, candidate_columns, model_score
from skyrl_engine.objective.objective import LossObjective
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import blame
from skyrl_engine.testing.subject import part_of
from skyrl_engine.testing.tokens.evaluation import SEED, STEP, Evaluation, Listening, numbers_by_column, numbers_of
from skyrl_engine.testing.tokens.token_batches import TokenBatch


def evaluate(
    label: str,
    loss: Any,
    batch: TokenBatch,
    *,
    dtype: torch.dtype = torch.float64,
    mode: TorchFunctionMode | None = None,
    gradients: bool = True,
    backward_mode: AbstractContextManager[Any] | None = None,
) -> Evaluation:
    """Run the engine's objective with this loss alone on the batch as one micro-batch.

    `mode` is entered around its call, `backward_mode` around its backward pass.

    Raises EngineError where the loss fails or returns what the engine refuses.
    """
    leaves = leaves_of(batch, loss, dtype, gradients=gradients)
    scores = {name: leaf * 1 for name, leaf in leaves.items()}  # as a model's: results of a computation, not leaves
    listening = Listening(loss, mode)
    part: BoundPlugin[Any] = part_of(listening, label, "loss")
    objective = LossObjective(ObjectiveParts(part), SEED, STEP, per_token_outputs=False)
    total, output = objective(scores, batch.micro_batch())
    if total.requires_grad:
        with blame(part.owner, "its backward pass"), backward_mode or nullcontext():
            torch.autograd.backward(total)
    returned = as_loss_output(label, listening.heard["output"], batch.tokens)
    return Evaluation(
        "loss",
        numbers_of(returned.token_loss),
        total.item(),
        {
            name: numbers
            for score, leaf in leaves.items()
            for name, numbers in numbers_by_column(score, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).items()
        },
        {name: metric for name, metric in output.metrics.items() if name in returned.metrics},
        returned.token_loss.dtype,
        listening.heard.get("drew", False),
    )


def leaves_of(batch: TokenBatch, loss: Any, dtype: torch.dtype, *, gradients: bool = True) -> dict[str, torch.Tensor]:
    """Return the model's scores that the loss reads, and always log-probabilities, as tensors to differentiate by."""
    wide = candidate_columns(loss.needs)
    compared = [need for need in loss.needs if model_score(need) == DIVERGENCE]
    names = [*(name for name in MODEL_SCORES if name == "logprobs" or name in loss.needs), *compared, *wide]
    return {name: torch.from_numpy(batch.values[name].copy()).to(dtype).requires_grad_(gradients) for name in names}
