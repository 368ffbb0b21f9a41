"""Terms and corrections take the main loss's path: the same weights, the same sum, the same outputs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_engine import LossOutput, LossTokens, Metric
from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.kinds.correction import Correction, FunctionCorrection
from skyrl_engine.contracts.kinds.loss import FunctionLoss, Loss
from skyrl_engine.contracts.values.outputs import RankOutput
from skyrl_engine.contracts.values.ragged import Ragged
from skyrl_engine.errors import ContractError, DataError, PluginBrokenError
from skyrl_engine.objective.objective import LossObjective
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import Owner

Function = Callable[..., object]
WEIGHTS = [0.5, 0.25, 0.125, 0.0625]


def micro_batch(**columns: list[float]) -> MicroBatch:
    """Three samples with 2, 0 and 2 scored tokens."""
    samples = ScoredSamples(
        sample_ids=np.array([7, 3, 4]),
        group_ids=np.array([0, 0, 0]),
        unit_ids=np.array([0, 1, 2]),
        action_lengths=np.array([3, 1, 3]),
        scored=Ragged.from_list([[0, 2], [], [1, 2]], np.int32),
        columns={name: np.asarray(values, dtype=np.float32) for name, values in columns.items()},
        weights=np.asarray(WEIGHTS, dtype=np.float64),
    )
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch({}, nothing, nothing, Ragged.from_list([], np.int64), samples)


def term(name: str, function: Function, needs: tuple[str, ...] = ("logprobs",), coefficient: float = 1.0) -> BoundPlugin[Loss]:
    product = FunctionLoss(name, function, None, needs)  # type: ignore[arg-type] # wrong ones are tested too
    return BoundPlugin(product, Owner.of_unrecorded(f"loss {name!r}", "loss"), "loss", name, coefficient)


def step(name: str, function: Function, needs: tuple[str, ...] = ("ratio",)) -> BoundPlugin[Correction]:
    product = FunctionCorrection(name, function, None, needs)  # type: ignore[arg-type] # likewise
    return BoundPlugin(product, Owner.of_unrecorded(f"correction {name!r}", "correction"), "loss.corrections[0]", name)


def objective(main: BoundPlugin[Loss], *others: BoundPlugin[Any]) -> LossObjective:
    terms = tuple(other for other in others if isinstance(other.product, FunctionLoss))
    corrections = tuple(other for other in others if isinstance(other.product, FunctionCorrection))
    return LossObjective(ObjectiveParts(main, terms, corrections), seed=5, step=1, per_token_outputs=True)


def surprise(tokens: LossTokens, _config: object) -> torch.Tensor:
    return -tokens.logprobs


def scores() -> dict[str, torch.Tensor]:
    """Log-probabilities and entropies of four tokens, both differentiable."""
    return {
        "logprobs": torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True),
        "entropy": torch.tensor([0.5, 0.25, 2.0, 1.0], requires_grad=True),
    }


def test_terms_share_the_weights() -> None:
    """The entropy's gradient is -coefficient * weight: no factor of micro-batches, ranks or counts comes in between."""
    inputs = scores()
    whole = objective(term("ce", surprise), term("entropy", lambda tokens, _: -tokens.entropy, ("entropy",), coefficient=0.5))
    total, output = whole(inputs, micro_batch())
    total.backward()
    assert inputs["logprobs"].grad is not None
    assert inputs["entropy"].grad is not None
    assert inputs["logprobs"].grad.tolist() == [-weight for weight in WEIGHTS]
    assert inputs["entropy"].grad.tolist() == [-0.5 * weight for weight in WEIGHTS]
    assert output.metrics["objective/ce"].result == 0.5 + 0.5 + 0.375 + 0.25
    assert output.metrics["objective/entropy"].result == -0.5 * (0.25 + 0.0625 + 0.25 + 0.0625)
    assert output.metrics["loss"].result == output.metrics["objective/ce"].result + output.metrics["objective/entropy"].result
    assert output.fields["token_loss"].values.tolist() == [0.75, 1.875, 2.0, 3.5]
    assert whole.needs == {"logprobs", "entropy"}


def test_one_loss_alone_reports_no_contributions() -> None:
    _, output = objective(term("ce", surprise))(scores(), micro_batch())
    assert list(output.metrics) == ["loss"]


def test_metrics_of_a_term_carry_its_name() -> None:
    def measured(tokens: LossTokens, _config: object) -> LossOutput:
        return LossOutput(-tokens.logprobs, {"mean": Metric.mean(1.0, 2)})

    _, output = objective(term("ce", measured), term("kl", measured))(scores(), micro_batch())
    assert {"mean", "kl/mean"} <= output.metrics.keys()


def test_a_metric_that_two_parts_report_is_refused() -> None:
    def name_metric(name: str) -> Function:
        return lambda tokens, _: LossOutput(-tokens.logprobs, {name: Metric.sum(1.0)})

    with pytest.raises(ContractError, match="loss 'kl' reports the metric 'kl/x', which another part"):
        objective(term("ce", name_metric("kl/x")), term("kl", name_metric("x")))(scores(), micro_batch())


@pytest.mark.parametrize("name", ["loss", "objective/ce", "corrections/tis/kept"])
def test_the_engines_metric_names_are_taken(name: str) -> None:
    whole = objective(term("ce", lambda tokens, _: LossOutput(-tokens.logprobs, {name: Metric.sum(1.0)})))
    with pytest.raises(ContractError, match="under which the engine reports its own"):
        whole(scores(), micro_batch())


def test_a_correction_multiplies_the_main_loss_and_no_term() -> None:
    inputs = scores()
    whole = objective(
        term("ce", surprise),
        term("again", surprise, coefficient=2.0),
        step("tis", lambda tokens, _: tokens.ratio.clamp(max=2.0)),
    )
    total, output = whole(inputs, micro_batch(ratio=[4.0, 0.5, 0.0, 1.0]))
    total.backward()
    assert inputs["logprobs"].grad is not None
    assert inputs["logprobs"].grad.tolist() == [
        -weight * (factor + 2.0) for weight, factor in zip(WEIGHTS, [2, 0.5, 0, 1], strict=True)
    ]
    assert output.metrics["corrections/tis/kept"] == Metric.mean(3, 4)
    assert output.metrics["corrections/tis/factor"] == Metric.mean(3.5, 3)


def test_each_correction_sees_what_the_former_left() -> None:
    seen = []

    def dropping(tokens: LossTokens, _config: object) -> torch.Tensor:
        seen.append((tokens.ratio.tolist(), tokens.sequences.counts.tolist(), tokens.sequences.index.tolist()))
        return (tokens.ratio != tokens.ratio.max()).float()

    whole = objective(term("ce", surprise), *(step(name, dropping) for name in ("a", "b", "c", "d")))
    _, output = whole(scores(), micro_batch(ratio=[4.0, 1.0, 3.0, 2.0]))
    assert seen[0] == ([4.0, 1.0, 3.0, 2.0], [2, 0, 2], [0, 0, 2, 2])
    assert seen[1] == ([1.0, 3.0, 2.0], [1, 0, 2], [0, 2, 2])
    assert seen[2] == ([1.0, 2.0], [1, 0, 1], [0, 2])
    assert seen[3] == ([1.0], [1, 0, 0], [0])
    assert output.metrics["loss"].result == 0.0


def test_a_dropped_token_counts_for_nothing_even_if_its_loss_is_not_finite() -> None:
    inputs = scores()
    whole = objective(
        term("ce", lambda tokens, _: -tokens.logprobs * torch.tensor([1.0, float("inf"), 1.0, 1.0])),
        step("mask", lambda _tokens, _: torch.tensor([1.0, 0.0, 1.0, 1.0])),
    )
    total, _ = whole(inputs, micro_batch(ratio=[1.0] * 4))
    assert total.item() == 0.5 + 0.375 + 0.25


def test_corrections_are_not_differentiated() -> None:
    """A factor made of the current log-probabilities is a constant in the gradient."""
    inputs = scores()
    whole = objective(term("ce", surprise), step("exp", lambda tokens, _: tokens.logprobs.exp(), ("logprobs",)))
    total, _ = whole(inputs, micro_batch())
    total.backward()
    assert inputs["logprobs"].grad is not None
    expected = -torch.tensor(WEIGHTS) * inputs["logprobs"].detach().exp()
    assert torch.equal(inputs["logprobs"].grad, expected)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.ones(3), r"returned torch.float32 of shape \[3\] for 4 tokens"),
        (torch.ones(4, dtype=torch.bool), "returned torch.bool"),
        ([1.0] * 4, "returned a list for 4 tokens"),
        (torch.tensor([1.0, -0.5, 1.0, 1.0]), r"returned the factor -0.5 for token 1 of 4"),
        (torch.tensor([1.0, 1.0, float("nan"), 1.0]), "returned the factor nan for token 2 of 4"),
    ],
)
def test_what_is_no_factor_is_refused(output: object, message: str) -> None:
    whole = objective(term("ce", surprise), step("odd", lambda _tokens, _: output))
    with pytest.raises(ContractError, match=f"correction 'odd' {message}"):
        # numbers are looked at when the pass is over
        RankOutput.concat([whole(scores(), micro_batch(ratio=[1.0] * 4))[1]])


def test_a_correction_that_fails_is_blamed() -> None:
    def failing(_tokens: LossTokens, _config: object) -> torch.Tensor:
        raise ZeroDivisionError("no tokens")

    with pytest.raises(PluginBrokenError, match="correction 'odd'"):
        objective(term("ce", surprise), step("odd", failing))(scores(), micro_batch(ratio=[1.0] * 4))


def test_a_column_that_is_missing_names_the_part() -> None:
    with pytest.raises(DataError, match="correction 'tis' needs the column 'ratio', the data has none"):
        objective(term("ce", surprise), step("tis", lambda tokens, _: tokens.ratio))(scores(), micro_batch())


def test_a_term_that_does_not_depend_on_the_model_is_refused() -> None:
    with pytest.raises(ContractError, match="loss 'kl' returned values that do not depend on the model"):
        objective(term("ce", surprise), term("kl", lambda tokens, _: tokens.logprobs.detach()))(scores(), micro_batch())


def test_parts_that_draw_draw_different_numbers() -> None:
    drawn = []

    def drawing(tokens: LossTokens, _config: object) -> torch.Tensor:
        drawn.append(torch.rand(4, generator=tokens.generator).tolist())
        return -tokens.logprobs

    whole = objective(term("ce", drawing), term("kl", drawing))
    whole(scores(), micro_batch())
    whole(scores(), micro_batch())
    assert drawn[0] == drawn[2]
    assert drawn[1] == drawn[3]
    assert drawn[0] != drawn[1]
