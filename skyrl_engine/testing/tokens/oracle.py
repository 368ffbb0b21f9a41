"""The promise that a loss or a correction is what its author's own definition gives, token by token, and by every score of the model."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.testing.comparison import factor_between, is_same
from skyrl_engine.testing.promise import Broken
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens import explicit
from skyrl_engine.testing.tokens.evaluation import Evaluation, Listening, numbers_by_column
from skyrl_engine.testing.tokens.kind import TokenKind, draw_some_long, needs_of, shared_promise
from skyrl_engine.testing.tokens.token_batches import TokenBatch


def _has_no_oracle(subject: Subject[Any]) -> str | None:
    return None if "oracle" in subject.hooks else "there is no oracle to compare with"


@shared_promise(
    "Its values are those of the oracle, and so is its gradient where the oracle has one",
    cases=draw_some_long,
    exempt=_has_no_oracle,
    first=lambda subject: [explicit.make_threes(needs_of(subject)), *explicit.list_wide(needs_of(subject))],
)
def oracle(kind: TokenKind, subject: Subject[Any], batch: TokenBatch) -> None:
    product = Listening(subject.make())
    evaluation = kind.evaluate_or_undecidable(subject, batch, product)
    values = torch.as_tensor(subject.hooks["oracle"](product.heard["tokens"]))
    expected = np.asarray(values.detach().double())
    if expected.shape != evaluation.per_token.shape:
        raise Broken(
            f"the oracle gives shape {list(expected.shape)} for {batch.tokens} tokens",
            f"Let the oracle give one {kind.noun} per token",
        )
    if not is_same(evaluation.per_token, expected):
        factor = factor_between(expected, evaluation.per_token)
        raise Broken(
            f"is {'not' if factor is None else f'x{factor:.2f}'} what the oracle gives: "
            f"{_difference(kind, evaluation.per_token, expected, factor)}",
            "Compare formula and code",
            factor=factor,
        )
    if values.requires_grad and "surrogate_gradient" not in subject.flags:
        _require_gradient(product.heard["tokens"].needs, values, torch.from_numpy(batch.weights), evaluation)


def _difference(kind: TokenKind, numbers: AnyArray, expected: AnyArray, factor: float | None) -> str:
    if factor is not None and factor < 0:
        return "the sign is turned around"
    place = int(np.argmax(~np.isclose(numbers, expected)))
    difference = f"token {place} has the {kind.noun} {numbers[place]:.6g}, not {expected[place]:.6g}"
    return f"{difference}: the ratio is upside down" if is_same(numbers * expected, np.ones_like(numbers)) else difference


def _require_gradient(
    needs: Mapping[str, torch.Tensor], values: torch.Tensor, weights: torch.Tensor, evaluation: Evaluation
) -> None:
    """Raise Broken where the gradient by a score of the model is not that of the oracle's `values` [n]."""
    scores = {name: tensor for name, tensor in needs.items() if tensor.requires_grad}
    gradients = torch.autograd.grad((weights.to(values) * values).sum(), list(scores.values()), allow_unused=True)
    for (score, tensor), gradient in zip(scores.items(), gradients, strict=True):
        for name, expected in numbers_by_column(score, torch.zeros_like(tensor) if gradient is None else gradient).items():
            got = evaluation.gradients[name]
            if is_same(expected, got):
                continue
            factor = factor_between(expected, got)
            place = int(np.argmax(~np.isclose(expected, got)))
            raise Broken(
                f"has the oracle's values and another gradient: by {name}, token {place} has {got[place]:.6g}, not {expected[place]:.6g}",
                "Compare what both detach: a ratio or an advantage of which half is detached has the right values and the wrong slope",
                factor=factor,
            )
