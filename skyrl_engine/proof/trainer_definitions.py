"""Gradients by definition that a trainer's are compared with: one row after the other without padding, in float64, by plain transformers."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Literal

import numpy as np
import torch

from skyrl_engine.errors import DataError
from skyrl_engine.proof.diagnosis import Pieces
from skyrl_engine.proof.plain_model import PlainModel
from skyrl_engine.proof.row_kinds import Row, check_rows, find_kind, find_trained_tokens, list_groups, list_sequences

RowLoss = Callable[[int, Sequence[torch.Tensor]], torch.Tensor]
"""Takes the place of a row, and the log-probabilities [n] of the trained tokens of its sequences; returns what it adds to the objective."""

ADVANTAGE_EPSILON = 1e-4
"""TRL's number that is added to the standard deviation of a group's rewards."""


def define_objective(model: Any, rows: Sequence[Row], loss: RowLoss, *, shares: Sequence[float] | None = None) -> Pieces:
    """Return the gradient of the sum of `loss` over `rows`, row by row, in float64.

    A copy of `model`, a causal language model of transformers, computes one sequence after the other without padding. Parameters that are not
    trained have no gradient. `shares` are the rows' parts of the objective's weights (None: their trained tokens), by which the mean factor of
    a wrong gradient is taken. Raises DataError for rows that cannot be used.
    """
    check_rows(rows)
    copy = deepcopy(model).double().eval()
    parameters = {name: tensor for name, tensor in copy.named_parameters() if tensor.requires_grad}
    if not parameters:
        raise DataError("no parameter of the model is trained", remedy="Set requires_grad of those that the trainer trains")
    plain = PlainModel(copy, None, parameters)
    pieces = []
    for place, row in enumerate(rows):
        added = loss(place, _score(plain, row))
        found = torch.autograd.grad(added, list(parameters.values()), allow_unused=True)
        pieces.append(
            {
                name: np.zeros(tensor.shape) if gradient is None else gradient.cpu().numpy()
                for (name, tensor), gradient in zip(parameters.items(), found, strict=True)
            }
        )
    if shares is None:
        shares = [float(find_trained_tokens(row).sum()) for row in rows]
    carrying = np.array([any(values.any() for values in piece.values()) for piece in pieces])
    weights = np.where(carrying, shares, 0.0)
    return Pieces([str(place) for place in range(len(rows))], pieces, weights / (weights.sum() or 1.0))


def define_token_mean(model: Any, rows: Sequence[Row]) -> Pieces:
    """Return the gradient of the mean cross-entropy over all trained tokens of `rows`, as `define_objective` does."""
    check_rows(rows)
    tokens = sum(int(find_trained_tokens(row).sum()) for row in rows)
    return define_objective(model, rows, lambda _place, logprobs: -torch.cat(list(logprobs)).sum() / tokens)


def define_dpo(model: Any, reference: Any, rows: Sequence[Row], *, beta: float) -> Pieces:
    """Return the gradient of DPO's mean over pairs, as `define_objective` does: -log sigmoid(beta * (log-ratio chosen - log-ratio rejected)).

    Rafailov et al., 2023, arXiv:2305.18290, equation 7. `reference` is the frozen model. Raises DataError for rows that are no preferences.
    """
    _check_kind(rows, "preference")
    frozen = PlainModel(deepcopy(reference).double().eval(), None, {})
    with torch.no_grad():
        known = [[logprobs.sum() for logprobs in _score(frozen, row)] for row in rows]

    def loss(place: int, logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
        chosen, rejected = (own.sum() - due for own, due in zip(logprobs, known[place], strict=True))
        return -torch.nn.functional.logsigmoid(beta * (chosen - rejected)) / len(rows)

    return define_objective(model, rows, loss, shares=[1.0] * len(rows))


def define_grpo(
    model: Any,
    rows: Sequence[Row],
    *,
    reduction: Literal["token_mean", "sequence_mean", "fixed_length"],
    longest: int | None = None,
) -> Pieces:
    """Return the gradient of GRPO at the policy that sampled, without a KL term, as `define_objective` does.

    Every token's term is -ratio * advantage, whose gradient is -advantage * that of the log-probability. An advantage is the reward less the
    group's mean, divided by the group's standard deviation (of n - 1) plus 1e-4 (Shao et al., 2024, arXiv:2402.03300, section 4.1.1).
    `reduction` says what a term is divided by: all trained tokens (`dapo` of TRL), the sequence's tokens and the number of
    sequences (GRPO), or `longest` and the number of sequences (Dr. GRPO, arXiv:2503.20783). Raises DataError for rows that are no rollouts.
    """
    _check_kind(rows, "rollout")
    if (longest is None) != (reduction != "fixed_length"):
        raise DataError(
            f"the reduction {reduction} with longest={longest}", remedy="Give `longest` with fixed_length, and only with it"
        )
    advantages = find_advantages(rows)
    tokens = sum(int(find_trained_tokens(row).sum()) for row in rows)

    def loss(place: int, logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
        (own,) = logprobs
        divisors = {"token_mean": tokens, "sequence_mean": len(rows) * len(own), "fixed_length": len(rows) * (longest or 1)}
        return -advantages[place] * own.sum() / divisors[reduction]

    return define_objective(model, rows, loss, shares=[1.0] * len(rows) if reduction == "sequence_mean" else None)


def find_advantages(rows: Sequence[Row]) -> list[float]:
    """Return the rollouts' advantages, each within its group."""
    advantages = [0.0] * len(rows)
    for places in list_groups(rows):
        rewards = np.array([float(rows[place]["reward"]) for place in places])
        deviation = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
        for place, reward in zip(places, rewards, strict=True):
            advantages[place] = float((reward - rewards.mean()) / (deviation + ADVANTAGE_EPSILON))
    return advantages


def _score(model: PlainModel, row: Row) -> list[torch.Tensor]:
    """Return the log-probabilities [n] of the trained tokens of each of a row's sequences."""
    device = next(model.model.parameters()).device
    scores = []
    for sequence in list_sequences(row):
        logprobs = model.scores(torch.from_numpy(sequence.input_ids).to(device))["logprobs"]
        scores.append(logprobs[torch.from_numpy(sequence.trained).to(device)])
    return scores


def _check_kind(rows: Sequence[Row], kind: str) -> None:
    check_rows(rows)
    if (found := find_kind(rows[0])) != kind:
        raise DataError(f"the rows are {found} rows", remedy=f"Give {kind} rows, or another definition")
