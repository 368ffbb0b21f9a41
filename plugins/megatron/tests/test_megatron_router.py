"""Losses of routers: gradients and metrics are those of the definition, written from transformers' router logits, however a step is cut.

The model computes in float32, the definition in float64 from the model's own logits on; what is between them is rounding.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from by_day import now
from megatron_router import Routed, Truth, count_routes, counts, report_metrics, route_rows, truth_of
from megatron_tasks import VOCABULARY, Case, start
from transformers import AutoConfig

from skyrl_engine import ContractError, UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.testing.backends.batches import (
    DefinedResult,
    WeightedObjective,
    build_padded,
    definition,
    documents,
    find_worst_difference,
)
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.limits import refuse_model
from skyrl_engine_megatron.plugin import MegatronConfig

COEFFICIENTS = {"router_balance_coefficient": 2.0, "router_z_coefficient": 0.5}
"""As large as the objective's own gradient in this model, so that a wrong share of it would show."""

PAIRS = {
    "tp2": MegatronConfig(tensor_parallel=2, **COEFFICIENTS),
    "ep2": MegatronConfig(tensor_parallel=2, expert_parallel=2, sequence_parallel=False, **COEFFICIENTS),
    "dp2": MegatronConfig(**COEFFICIENTS),
    "cp2": MegatronConfig(context_parallel=2, **COEFFICIENTS),
    "pp2-interleaved": MegatronConfig(pipeline_parallel=2, virtual_pipeline=2, **COEFFICIENTS),
}
ALONE = [Case(rows, size, calls=calls, scale=0.0) for rows in ("padded", "packed") for size in (1, 3) for calls in (1, 2)]
"""Without the objective: nothing else hides a small error."""


@pytest.fixture(scope="module")
def truth(models: dict[str, str]) -> Truth:
    return truth_of(models["qwen3-moe"], documents(VOCABULARY), balance=2.0, z=0.5)


@pytest.fixture(scope="module")
def objective(models: dict[str, str]) -> DefinedResult:
    return definition(models["qwen3-moe"], documents(VOCABULARY), dtype=torch.float32)


def agree(ranks: Sequence[Sequence[Routed]], truth: Truth) -> None:
    for cases in zip(*ranks, strict=True):
        for case in cases:
            assert find_worst_difference({name: case.gradients[name] for name in truth.gradients}, truth.gradients) <= 1e-5
            assert not any(gradient.any() for name, gradient in case.gradients.items() if name not in truth.gradients)
        for metrics_of_ranks in (
            [case.metrics for case in cases if case.collects],
            [case.evaluated for case in cases if case.collects],
        ):
            assert report_metrics(metrics_of_ranks) == pytest.approx(truth.metrics, rel=1e-5)


@pytest.mark.usefixtures("alone")
def test_one_rank(models: dict[str, str], truth: Truth) -> None:
    agree([route_rows(models["qwen3-moe"], MegatronConfig(**COEFFICIENTS), ALONE)], truth)


@pytest.mark.parametrize("layout", now(PAIRS, "ep2"))
def test_two_ranks(pair: World, models: dict[str, str], truth: Truth, layout: str) -> None:
    agree(pair.run(route_rows, models["qwen3-moe"], PAIRS[layout], [Case("padded", 1, scale=0.0), ALONE[-1]]), truth)


@pytest.mark.usefixtures("alone")
def test_they_are_added_to_the_objective(models: dict[str, str], truth: Truth, objective: DefinedResult) -> None:
    (case,) = route_rows(models["qwen3-moe"], MegatronConfig(**COEFFICIENTS), [Case("packed")])
    both = {name: true + truth.gradients.get(name, 0) for name, true in objective.gradients.items()}
    assert find_worst_difference(case.gradients, both) <= 1e-5
    assert find_worst_difference(case.gradients, objective.gradients) > 0.1
    assert case.metrics["loss"].value == pytest.approx(objective.loss, rel=1e-5)


@pytest.mark.usefixtures("alone")
def test_recomputed_activations_change_nothing(models: dict[str, str], truth: Truth) -> None:
    agree([route_rows(models["qwen3-moe"], MegatronConfig(**COEFFICIENTS), [ALONE[-1]], activation_checkpointing=True)], truth)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("chosen", "left"), [("balance", "z"), ("z", "balance")])
def test_one_without_the_other(models: dict[str, str], chosen: str, left: str) -> None:
    coefficients = {"balance": 0.0, "z": 0.0, chosen: 1.0}
    true = truth_of(models["qwen3-moe"], documents(VOCABULARY), **coefficients)
    options = {f"router_{name}_coefficient": value for name, value in coefficients.items()}
    (case,) = route_rows(models["qwen3-moe"], MegatronConfig(**options), [ALONE[0]])
    assert find_worst_difference({name: case.gradients[name] for name in true.gradients}, true.gradients) <= 1e-5
    assert f"router_{chosen}" in case.metrics
    assert f"router_{left}" not in case.metrics


@pytest.mark.usefixtures("alone")
def test_without_coefficients_nothing_is_added_or_reported(models: dict[str, str], objective: DefinedResult) -> None:
    (case,) = route_rows(models["qwen3-moe"], MegatronConfig(), [Case("packed")])
    assert find_worst_difference(case.gradients, objective.gradients) <= 1e-5
    assert case.metrics.keys() == {"loss"}


@pytest.mark.usefixtures("alone")
def test_means_over_each_call_would_be_caught(models: dict[str, str], truth: Truth) -> None:
    """Two means, of one half each, add up to about twice the whole's."""
    everything = documents(VOCABULARY)
    with closing(start(models["qwen3-moe"], options=MegatronConfig(**COEFFICIENTS))) as model:
        for part in (everything[:4], everything[4:]):
            model.forward_backward(count_routes(build_padded(part, 4), counts(part)), WeightedObjective(scale=0.0))
        gradients = {name: gradient.numpy() for name, gradient in model.gradients() if name in truth.gradients}
    assert 0.5 < find_worst_difference(gradients, truth.gradients) < 2


@pytest.mark.usefixtures("alone")
def test_a_step_of_unknown_size_is_refused(models: dict[str, str]) -> None:
    with (
        closing(start(models["qwen3-moe"], options=MegatronConfig(**COEFFICIENTS))) as model,
        pytest.raises(ContractError, match="a micro-batch does not say what its step is made of"),
    ):
        model.forward_backward(build_padded(documents(VOCABULARY), 2), WeightedObjective())


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_models_without_experts_are_refused(models: dict[str, str], name: str) -> None:
    config = AutoConfig.from_pretrained(models["qwen3-tied"])
    with pytest.raises(UnsupportedError, match=f"{name} = 0.5, and the model has no experts"):
        refuse_model(MegatronConfig(**{name: 0.5}), config, ModelConfig("the model"))


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_coefficients_are_finite_and_not_negative(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        MegatronConfig(**{name: value})
