"""Losses of pairs through the objective: both halves by name, terms on one half, and data that has no pairs."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from skyrl_engine import LossOutput, LossTokens, Metric, loss
from skyrl_engine.contracts import Pairs, Sequences
from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.engine.capability import check_role
from skyrl_engine.errors import DataError, EngineError, UnsupportedError
from skyrl_engine.objective.objective import LossObjective
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import Owner
from skyrl_engine.testing import LossConformance


@loss(needs=("logprobs", "ref_logprobs"), unit_size=2, reducers=("sequence_mean",))
def strangers_dpo(tokens: LossTokens, _config: None) -> torch.Tensor:
    """-log sigmoid(0.1 margin) at every token of both halves."""
    gains = tokens.logprobs - tokens.ref_logprobs
    margins = tokens.pairs.chosen.sum(gains) - tokens.pairs.rejected.sum(gains)
    return tokens.pairs.broadcast(-torch.nn.functional.logsigmoid(0.1 * margins))


@loss(needs=("logprobs",))
def likelihood(tokens: LossTokens, _config: None) -> LossOutput:
    return LossOutput(-tokens.logprobs, {"mean": Metric.mean(-tokens.logprobs.sum(), len(tokens.logprobs))})


@loss(needs=("logprobs",))
def undeclared(tokens: LossTokens, _config: None) -> torch.Tensor:
    return tokens.pairs.broadcast(tokens.pairs.chosen.sum(tokens.logprobs))


def part(plugin: Any, **fields: Any) -> BoundPlugin[Any]:
    return BoundPlugin(plugin.skyrl_engine_make_loss(None), Owner("a loss", "loss"), "loss", plugin.name, **fields)


LENGTHS = (2, 1, 3, 2)
SAMPLES = ScoredSamples(
    sample_ids=np.arange(4),
    group_ids=np.arange(4),
    unit_ids=np.array([7, 2, 2, 7]),
    action_lengths=np.array(LENGTHS),
    scored=Ragged(np.array([0, 1, 0, 0, 1, 2, 0, 1], dtype=np.int32), offsets_of(LENGTHS)),
    columns={"ref_logprobs": np.zeros(8, np.float32)},
    weights=np.repeat(1 / (4 * np.array(LENGTHS)), LENGTHS),
    roles=np.array([1, 0, 1, 0]),
)
LOGPROBS = (-1.0, -2.0, -0.5, -3.0, -1.0, -1.0, -0.25, -0.75)


def through(
    samples: ScoredSamples, main: BoundPlugin[Any], *terms: BoundPlugin[Any]
) -> tuple[float, list[float], dict[str, Metric]]:
    """The objective, its gradient by log-probability, and metrics."""
    nothing = torch.zeros(0, dtype=torch.int64)
    scores = {"logprobs": torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)}
    objective = LossObjective(ObjectiveParts(main, terms), seed=0, step=1, per_token_outputs=False)
    total, output = objective(scores, MicroBatch({}, nothing, nothing, Ragged.from_list([], np.int64), samples))
    total.backward()
    gradient = scores["logprobs"].grad
    assert gradient is not None
    return total.item(), gradient.tolist(), dict(output.metrics)


def test_a_pair_counts_once_whatever_its_order_and_lengths() -> None:
    """Unit 7 is sample 3 over 0: margin -1 - -3 = 2; unit 2 is 1 over 2: -0.5 - -5 = 4.5. The weights are those of sequence_mean."""
    total, gradient, _ = through(SAMPLES, part(strangers_dpo))
    losses = [math.log1p(math.exp(-0.1 * margin)) for margin in (2.0, 4.5)]
    assert total == pytest.approx(sum(losses) / 2, rel=1e-12)
    slopes = [0.1 / (1 + math.exp(0.1 * margin)) / 2 for margin in (2.0, 4.5)]
    assert gradient == pytest.approx([slopes[0]] * 2 + [-slopes[1]] + [slopes[1]] * 3 + [-slopes[0]] * 2, rel=1e-12)


def test_a_term_on_one_half_sees_that_half_alone() -> None:
    """Weights stay those of all samples: the mean over chosen answers counts half; its metric is over chosen tokens."""
    total, gradient, metrics = through(SAMPLES, part(strangers_dpo), part(likelihood, coefficient=2.0, on="chosen"))
    alone, _, _ = through(SAMPLES, part(strangers_dpo))
    assert total - alone == pytest.approx(2.0 * 0.5 * (0.5 + 0.5) / 2, rel=1e-12)
    _, plain, _ = through(SAMPLES, part(strangers_dpo))
    added = np.subtract(gradient, plain)
    assert added.tolist() == pytest.approx([0, 0, -0.5, 0, 0, 0, -0.25, -0.25], abs=1e-12)
    assert metrics["likelihood/mean"].result == pytest.approx(1.5 / 3)
    assert metrics["objective/likelihood"].result == pytest.approx(0.5)


def test_what_is_not_in_pairs_is_refused() -> None:
    with pytest.raises(DataError, match="unit 7 has no chosen sample"):
        through(evolve(SAMPLES, roles=np.array([1, 0, 1, 1])), part(strangers_dpo))
    with pytest.raises(DataError, match=r"the samples have no value 'role'"):
        through(evolve(SAMPLES, roles=None), part(strangers_dpo))
    with pytest.raises(DataError, match=r"the samples have no value 'role'"):
        through(evolve(SAMPLES, roles=None), part(likelihood), part(likelihood, on="rejected"))


def test_who_does_not_declare_pairs_has_none() -> None:
    with pytest.raises(EngineError) as error:
        through(SAMPLES, part(undeclared))
    assert "does not declare unit_size=2" in str(error.value.__cause__)
    with pytest.raises(TypeError, match="unit_size is 3"):
        loss(needs=("logprobs",), unit_size=3)


def test_a_loss_of_pairs_is_no_term_on_one_half() -> None:
    with pytest.raises(UnsupportedError, match="compares the two halves of a pair"):
        check_role(part(strangers_dpo, on="chosen"))


def test_sequences_pair_by_themselves() -> None:
    """In a notebook or a test nobody has paired them before."""
    sequences = Sequences(*(torch.tensor(numbers) for numbers in ([0, 0, 1], [2, 1], [4, 4], [0, 1], [1, 0])))
    pairs = Pairs.of(sequences)
    assert pairs.chosen.sum(torch.tensor([1.0, 2.0, 4.0])).tolist() == [4.0]
    assert pairs.rejected.mean(torch.tensor([1.0, 2.0, 4.0])).tolist() == [1.5]
    assert pairs.chosen.counts.tolist() == [1]
    assert pairs.broadcast(torch.tensor([5.0])).tolist() == [5.0] * 3


class TestStranger(LossConformance):
    """The kit draws pairs for whoever compares pairs."""

    examples = 6

    def loss(self) -> Any:
        return strangers_dpo.skyrl_engine_make_loss(None)
