"""Evaluation of a loss or a correction on one micro-batch, in the precision it computed in, and comparison of two of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from torch.overrides import TorchFunctionMode

from skyrl_engine.contracts.kinds.loss import LossTokens, UndeclaredNeedError
from skyrl_engine.contracts.values.outputs import Metric, combine_metrics
from skyrl_engine.errors import EngineError
from skyrl_engine.testing.comparison import Numbers, describe_change, factor_between, format_factor, is_same
from skyrl_engine.testing.promise import Broken
from skyrl_engine.testing.tokens.token_batches import CutBatch

SEED, STEP = 11, 3
"""The run's seed and step that generators are made of."""


@frozen(eq=False)
class Evaluation:
    """One batch through the objective.

    `per_token` float64[n] are unweighted token losses, or factors of a correction, as `noun` says; `gradients` float64[n] those of `total`
    by model score. `dtype` is that of what the product returned; `drew` says whether it asked for random numbers.
    """

    noun: str
    per_token: Numbers
    total: float
    gradients: Mapping[str, Numbers]
    metrics: Mapping[str, Metric]
    dtype: torch.dtype
    drew: bool

    @property
    def largest(self) -> float:
        """Return the largest absolute value among per-token numbers and gradients, 0 without any."""
        return max(float(np.abs(numbers).max(initial=0)) for numbers in (self.per_token, *self.gradients.values()))

    @property
    def bits(self) -> object:
        """Return all numbers in values that `==` compares bit by bit."""
        gradients = {name: gradient.tobytes() for name, gradient in self.gradients.items()}
        metrics = sorted((name, repr(metric)) for name, metric in self.metrics.items())
        return self.per_token.tobytes(), self.total, gradients, metrics

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.per_token).all() and all(np.isfinite(gradient).all() for gradient in self.gradients.values()))


@frozen(eq=False)
class Listening:
    """A wrapper of the product that keeps its last argument and result."""

    product: Any
    mode: TorchFunctionMode | None = None
    heard: dict[str, Any] = field(factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.product, name)

    def __call__(self, tokens: LossTokens) -> Any:
        def make_generator() -> torch.Generator:
            self.heard["drew"] = True
            return original()

        original = tokens.make_generator
        tokens = self.heard["tokens"] = evolve(tokens, make_generator=make_generator)
        if self.mode is None:
            result = self.product(tokens)
        else:
            with self.mode:
                result = self.product(tokens)
        self.heard["output"] = result
        return result


def is_undeclared_need(error: EngineError) -> bool:
    """Return True where `LossTokens` reports that an undeclared need was read."""
    return isinstance(error.__cause__, UndeclaredNeedError)


def join_evaluations(cut: CutBatch, evaluations: Sequence[Evaluation]) -> Evaluation:
    """Join the evaluations of micro-batches into one of the whole batch, tokens in its order."""
    places = [cut.batch.places(part) for part in cut.parts]
    first = evaluations[0]

    def put(parts: Sequence[Numbers]) -> Numbers:
        whole = np.zeros(cut.batch.tokens)
        for place, values in zip(places, parts, strict=True):
            whole[place] = values
        return whole

    return evolve(
        first,
        per_token=put([evaluation.per_token for evaluation in evaluations]),
        total=sum(evaluation.total for evaluation in evaluations),
        gradients={name: put([evaluation.gradients[name] for evaluation in evaluations]) for name in first.gradients},
        metrics=combine_metrics([evaluation.metrics for evaluation in evaluations]),
        drew=any(evaluation.drew for evaluation in evaluations),
    )


def is_same_evaluation(one: Evaluation, other: Evaluation, **tolerance: float) -> bool:
    """Return True where per-token numbers, total and gradients are equal."""
    return (
        is_same(one.per_token, other.per_token, **tolerance)
        and is_same(np.array([one.total]), np.array([other.total]), **tolerance)
        and all(is_same(gradient, other.gradients[name], **tolerance) for name, gradient in one.gradients.items())
    )


def describe_evaluation_change(one: Evaluation, other: Evaluation) -> tuple[str, float | None]:
    """Say how `other` differs from `one`, in words that follow "it", and by which factor if it is one."""
    if not is_same(one.per_token, other.per_token):
        return describe_change(one.noun, one.per_token, other.per_token)
    name = next((name for name, gradient in one.gradients.items() if not is_same(gradient, other.gradients[name])), None)
    if name is None:
        return "changes in the last digits", None
    return f"the gradient by {name} changes{format_factor(factor_between(one.gradients[name], other.gradients[name]))}", None


def require_same_evaluation(one: Evaluation, other: Evaluation, when: str, cause: str, remedy: str, **tolerance: float) -> None:
    """Raise Broken unless both are equal; `when` follows "changes ...", as in "under two micro-batches"."""
    if not is_same_evaluation(one, other, **tolerance):
        how, factor = describe_evaluation_change(one, other)
        raise Broken(f"{how} {when}: {cause}", remedy, factor=factor)


def columns_of(score: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a score's values [n] by its name; of [n, k] each column [n] by name and number. They are views."""
    return {score: values} if values.ndim == 1 else {f"{score}[{column}]": values[:, column] for column in range(values.shape[1])}


def numbers_by_column(score: str, values: torch.Tensor) -> dict[str, Numbers]:
    """Return `columns_of` as float64 NumPy arrays."""
    return {name: numbers_of(column) for name, column in columns_of(score, values).items()}


def numbers_of(tensor: torch.Tensor) -> Numbers:
    """Return a tensor's numbers as a float64 NumPy array."""
    numbers: Numbers = tensor.detach().double().numpy()
    return numbers
