"""A loss or a correction run on a batch of tokens as the engine runs it, and what came out, in the precision it was computed in."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, field, frozen
from torch.overrides import TorchFunctionMode

from skyrl_engine.contracts.kinds.loss import MODEL_SCORES, LossOutput, LossTokens, as_loss_output
from skyrl_engine.contracts.values.outputs import Metric, combine_metrics
from skyrl_engine.errors import EngineError
from skyrl_engine.objective.objective import LossObjective
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.objective.tokens import MicroBatchTokens
from skyrl_engine.registry.host import blaming
from skyrl_engine.registry.part import Part
from skyrl_engine.testing.promise import Undecidable
from skyrl_engine.testing.subject import part_of
from skyrl_engine.testing.tokens.rollouts import CutBatch, TokenBatch

Numbers = npt.NDArray[np.float64]
SEED, STEP = 11, 3


@frozen(eq=False)
class Evaluation:
    """One batch through the objective. `token_loss` float64[n] unweighted, `gradients` float64[n] of `total` by model score.

    `dtype` is that of the values the loss returned; `drew` says whether it asked for random numbers.
    """

    token_loss: Numbers
    total: float
    gradients: Mapping[str, Numbers]
    metrics: Mapping[str, Metric]
    dtype: torch.dtype
    drew: bool

    @property
    def largest(self) -> float:
        """The largest absolute value among token losses and gradients, 0 without any."""
        return max(float(np.abs(each).max(initial=0)) for each in (self.token_loss, *self.gradients.values()))

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.token_loss).all() and all(np.isfinite(each).all() for each in self.gradients.values()))


@frozen(eq=False)
class Listening:
    """The loss, keeping what it was given and what it returned last."""

    loss: Any
    mode: TorchFunctionMode | None = None
    heard: dict[str, Any] = field(factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, tokens: LossTokens) -> "LossOutput | torch.Tensor":
        def make_generator() -> torch.Generator:
            self.heard["drew"] = True
            return original()

        original = tokens.make_generator
        tokens = self.heard["tokens"] = evolve(tokens, make_generator=make_generator)
        if self.mode is None:
            result = self.loss(tokens)
        else:
            with self.mode:
                result = self.loss(tokens)
        self.heard["output"] = result
        return result  # type: ignore[no-any-return]  # the loss is anybody's


def evaluate(
    label: str,
    loss: Any,
    batch: TokenBatch,
    *,
    dtype: torch.dtype = torch.float64,
    mode: TorchFunctionMode | None = None,
    gradients: bool = True,
) -> Evaluation:
    """Run the engine's objective with this loss alone on the batch as one micro-batch.

    Raises EngineError where the loss fails or returns what the engine refuses.
    """
    leaves = leaves_of(batch, loss, dtype, gradients=gradients)
    scores = {name: leaf * 1 for name, leaf in leaves.items()}  # as a model's: results of a computation, not leaves
    listening = Listening(loss, mode)
    part: Part[Any] = part_of(listening, label, "loss")
    objective = LossObjective(ObjectiveParts(part), SEED, STEP, per_token_outputs=False)
    total, output = objective(scores, batch.micro_batch())
    if total.requires_grad:
        with blaming(part.owner, "its backward pass"):
            torch.autograd.backward(total)
    returned = as_loss_output(label, listening.heard["output"], batch.tokens)
    return Evaluation(
        _numbers(returned.token_loss),
        total.item(),
        {name: _numbers(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) for name, leaf in leaves.items()},
        {name: metric for name, metric in output.metrics.items() if name in returned.metrics},
        returned.token_loss.dtype,
        listening.heard.get("drew", False),
    )


def decided(label: str, loss: Any, batch: TokenBatch, **options: Any) -> Evaluation:
    """`evaluate` for promises that are about other things than failing: a loss that fails, or is not finite, decides nothing here."""
    try:
        evaluation = evaluate(label, loss, batch, **options)
    except EngineError as error:
        raise Undecidable(f"{error.cause}") from error
    if not evaluation.finite:
        raise Undecidable("the loss is not finite")
    return evaluation


def undeclared(error: EngineError) -> bool:
    """Whether a need was read that is not declared: what `LossTokens` says of it."""
    return isinstance(error.__cause__, AttributeError) and "declares needs" in str(error.__cause__)


def joined(cut: CutBatch, evaluations: Sequence[Evaluation]) -> Evaluation:
    """The micro-batches' evaluations as one of the whole batch, tokens in its order."""
    places = [cut.batch.places(part) for part in cut.parts]

    def put(parts: Sequence[Numbers]) -> Numbers:
        whole = np.zeros(cut.batch.tokens)
        for at, values in zip(places, parts, strict=True):
            whole[at] = values
        return whole

    return Evaluation(
        put([each.token_loss for each in evaluations]),
        sum(each.total for each in evaluations),
        {name: put([each.gradients[name] for each in evaluations]) for name in evaluations[0].gradients},
        combine_metrics([each.metrics for each in evaluations]),
        evaluations[0].dtype,
        any(each.drew for each in evaluations),
    )


def leaves_of(batch: TokenBatch, loss: Any, dtype: torch.dtype, *, gradients: bool = True) -> dict[str, torch.Tensor]:
    """The model's scores that the loss reads, and log-probabilities always, as tensors to differentiate by."""
    names = [name for name in MODEL_SCORES if name == "logprobs" or name in loss.needs]
    return {name: torch.from_numpy(batch.values[name].copy()).to(dtype).requires_grad_(gradients) for name in names}


def tokens_of(label: str, needs: Sequence[str], batch: TokenBatch, dtype: torch.dtype = torch.float64) -> LossTokens:
    """The batch as a correction is given it: nothing left out yet, nothing differentiable."""
    scores = {name: torch.from_numpy(values.copy()).to(dtype) for name, values in batch.values.items() if name in MODEL_SCORES}
    tokens = MicroBatchTokens(scores, batch.micro_batch().samples, SEED, STEP)
    return tokens.kept(label, tuple(needs), 0, torch.ones(batch.tokens, dtype=torch.bool))


def _numbers(tensor: torch.Tensor) -> Numbers:
    numbers: Numbers = tensor.detach().double().numpy()
    return numbers
