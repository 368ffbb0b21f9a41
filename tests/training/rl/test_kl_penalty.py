"""The penalty in the reward, moved by hand, and its coefficient, step by step."""

import math

import numpy as np
import pytest

from skyrl_engine.config.schema import RewardKlConfig
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.training.rl.kl_penalty import KlPenalty, divergence

OLD = [[-1.0, -2.0, 0.0], [-0.5, -3.0]]
REFERENCE = [[-1.5, -1.0, 0.0], [-0.25, -4.0]]
SAMPLED = [[-9.0, -9.0, 0.0], [-9.0, -9.0]]
REWARDS = [[0.0, 1.0, 0.0], [0.25, 2.0]]


def columns(**without: bool) -> SampleColumns:
    """Two attempts; the last token of the first was observed."""
    arrays = {"old_logprobs": OLD, "ref_logprobs": REFERENCE, "rollout_logprobs": SAMPLED, "rewards": REWARDS}
    return SampleColumns.from_rollouts(
        prompts=[[1]] * 2,
        responses=[[2, 3, 4], [5, 6]],
        loss_masks=[[1, 1, 0], [1, 1]],
        columns={name: values for name, values in arrays.items() if name not in without},
    )


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        ("k1", lambda gap: gap),
        ("k2", lambda gap: gap * gap / 2),
        ("k3", lambda gap: math.exp(-gap) - 1 + gap),
    ],
)
def test_every_scored_token_loses_its_own_share(estimator, formula) -> None:
    shaped, metrics = KlPenalty.start(RewardKlConfig(0.5, estimator)).apply(columns())
    gaps = [[0.5, -1.0], [-0.25, 1.0]]
    expected = [0 - 0.5 * formula(0.5), 1 - 0.5 * formula(-1.0), 0.0, 0.25 - 0.5 * formula(-0.25), 2 - 0.5 * formula(1.0)]
    assert shaped.columns["rewards"].tolist() == pytest.approx(expected, rel=1e-6)
    assert shaped.columns["rewards"].dtype == np.float64
    assert metrics["reward/kl"].result == pytest.approx(sum(formula(gap) for own in gaps for gap in own) / 2)
    assert metrics["policy/kl_coef"].result == 0.5
    assert columns().columns["rewards"].tolist() == [0.0, 1.0, 0.0, 0.25, 2.0]


def test_the_sampler_stands_for_an_old_policy_that_nobody_scored() -> None:
    shaped, _ = KlPenalty.start(RewardKlConfig(1.0)).apply(columns(old_logprobs=True))
    assert shaped.columns["rewards"].tolist() == [7.5, 9.0, 0.0, 9.0, 7.0]


@pytest.mark.parametrize(("target", "change"), [(10.0, -0.2), (0.001, 0.2), (0.125, 0.0), (0.115, 0.125 / 0.115 - 1)])
def test_the_coefficient_follows_the_divergence(target: float, change: float) -> None:
    """0.125 nats per attempt. It counts from the next step on."""
    penalty = KlPenalty.start(RewardKlConfig(0.5, "k1", target, 40))
    _, metrics = penalty.apply(columns())
    assert metrics["policy/kl_coef"].result == 0.5
    assert penalty.coef == pytest.approx(0.5 * (1 + change * 2 / 40), rel=1e-12)
    _, metrics = penalty.apply(columns())
    assert metrics["policy/kl_coef"].result == pytest.approx(0.5 * (1 + change * 2 / 40), rel=1e-12)


def test_without_a_target_it_stays() -> None:
    penalty = KlPenalty.start(RewardKlConfig(0.5))
    penalty.apply(columns())
    assert penalty.coef == 0.5


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_no_divergence_is_negative_and_equal_policies_have_none(estimator: str) -> None:
    gaps = np.linspace(-3, 3, 13)
    values = divergence(estimator, gaps, np.zeros(13))
    assert (values >= 0).all()
    assert values[6] == 0
