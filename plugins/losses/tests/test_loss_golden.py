"""Numbers derived by hand where formulas have their edges: clipping boundaries, stop-gradients, clamps. Tolerances are float64's."""

import math
from typing import Any

import pytest
import torch

from skyrl_engine.contracts import LossTokens, as_loss_output
from skyrl_engine_losses import plugin
from skyrl_engine_losses.clipping import ClipConfig, DualClipConfig
from skyrl_engine_losses.covariance import KlCovConfig
from skyrl_engine_losses.critic import ValueClipConfig
from skyrl_engine_losses.cross_entropy import LabelSmoothingConfig
from skyrl_engine_losses.off_policy import DroConfig
from skyrl_engine_losses.policy_gradient import CispoConfig
from skyrl_engine_losses.regularizers import KlConfig
from skyrl_engine_losses.sequence_level import LogClipConfig
from skyrl_engine_losses.trust_region import DppoConfig, SapoConfig

from loss_oracles import sequences_of  # isort: skip

E = math.e


def evaluated(name: str, config: Any, lengths: list[int], **columns: list[float]) -> tuple[list[float], list[float]]:
    """The token losses and the gradient of their sum in the one model score that the loss reads."""
    (score,) = {"logprobs", "values", "entropy"} & set(columns)
    tensors = {column: torch.tensor(values, dtype=torch.float64) for column, values in columns.items()}
    tensors[score].requires_grad_()
    loss = getattr(plugin, name).skyrl_engine_make_loss(config)
    output = as_loss_output(name, loss(LossTokens(tensors, sequences_of(lengths), torch.Generator)), sum(lengths))
    output.token_loss.sum().backward()
    gradient = tensors[score].grad
    assert gradient is not None
    return output.token_loss.tolist(), gradient.tolist()


def at_ratios(name: str, config: Any, *ratios_and_advantages: tuple[float, float]) -> tuple[list[float], list[float]]:
    """Each token a sequence of its own, at log p = 0, so that the ratio is 1 / old."""
    count = len(ratios_and_advantages)
    return evaluated(
        name,
        config,
        [1] * count,
        logprobs=[0.0] * count,
        old_logprobs=[-math.log(ratio) for ratio, _ in ratios_and_advantages],
        advantages=[advantage for _, advantage in ratios_and_advantages],
    )


def near(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-12, abs=1e-15)


def test_ppo_stops_the_gradient_only_where_the_advantage_pulls_outwards() -> None:
    """-min(r A, clip(r, .8, 1.2) A) with A = +-2 at r = 1.5 and .5; the gradient in log p is that of -r A, -r A, where it is not clipped."""
    losses, gradient = at_ratios("ppo", ClipConfig(), (1.5, 2.0), (1.5, -2.0), (0.5, 2.0), (0.5, -2.0), (1.0, 2.0))
    assert losses == near([-2.4, 3.0, -1.0, 1.6, -2.0])
    assert gradient == near([0.0, 3.0, -1.0, 0.0, -2.0])


def test_ppo_on_the_boundary_itself_is_not_clipped() -> None:
    """With clip_high = 1 the range ends at r = 2, which log p = 0 and old = -log 2 hit exactly or one rounding below."""
    losses, gradient = at_ratios("ppo", ClipConfig(clip_high=1.0), (2.0 - 1e-15, 1.0), (2.0 + 1e-12, 1.0))
    assert losses == near([-2.0, -2.0])
    assert gradient == near([-2.0, 0.0])


def test_a_ratio_beyond_twenty_nats_has_the_value_of_twenty_and_no_gradient() -> None:
    losses, gradient = at_ratios("ppo", ClipConfig(), (math.exp(25), -1.0), (math.exp(19), -1.0))
    assert losses == near([math.exp(20), math.exp(19)])
    assert gradient == near([0.0, math.exp(19)])


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    """C = 3: at r = 5 and A = -1 the loss is 3, not 5; at r = 2 it is 2; for A = 1 it is ppo's -1.2."""
    losses, gradient = at_ratios("ppo_dual_clip", DualClipConfig(), (5.0, -1.0), (2.0, -1.0), (5.0, 1.0), (0.5, -1.0))
    assert losses == near([3.0, 2.0, -1.2, 0.8])
    assert gradient == near([0.0, 2.0, 0.0, 0.0])


def test_gspo_has_the_sequences_ratio_and_each_tokens_own_gradient() -> None:
    """Log-ratios .05 and .25: s = exp(.15) at both, inside (.8, 1.2); the gradient of -s A is -s A per token, not s (A1 + A2) / 2."""
    s = math.exp(0.15)
    losses, gradient = evaluated(
        "gspo", ClipConfig(), [2], logprobs=[-1.0, -1.0], old_logprobs=[-1.05, -1.25], advantages=[1.0, 3.0]
    )
    assert losses == near([-s, -3 * s])
    assert gradient == near([-s, -3 * s])


def test_gspo_clips_the_sequence_and_ends_at_ten_nats() -> None:
    losses, gradient = evaluated("gspo", ClipConfig(), [2], logprobs=[0.0, 0.0], old_logprobs=[-0.1, -0.5], advantages=[1.0, 1.0])
    assert (losses, gradient) == (near([-1.2, -1.2]), near([0.0, 0.0]))
    losses, gradient = evaluated("gspo", ClipConfig(), [1], logprobs=[0.0], old_logprobs=[-11.0], advantages=[-1.0])
    assert (losses, gradient) == (near([math.exp(10)]), near([0.0]))


def test_gmpo_clips_tokens_on_the_side_of_their_advantage_before_the_mean() -> None:
    """Log-ratios 1 and -1. A = 1: clipped to .4 and -1, mean -.3; A = -1: 1 and -.4, mean .3.

    The sum of both tokens' losses is -2 A R, and R = exp(mean) has the gradient R / 2 in the token that is not clipped.
    """
    r = math.exp(-0.3)
    columns = {"logprobs": [-1.0, -2.0], "old_logprobs": [-2.0, -1.0]}
    losses, gradient = evaluated("gmpo", LogClipConfig(), [2], **columns, advantages=[1.0, 1.0])
    assert (losses, gradient) == (near([-r, -r]), near([0.0, -r]))
    r = math.exp(0.3)
    losses, gradient = evaluated("gmpo", LogClipConfig(), [2], **columns, advantages=[-1.0, -1.0])
    assert (losses, gradient) == (near([r, r]), near([r, 0.0]))


def test_gmpo_is_the_published_product() -> None:
    """sgn(A) (prod over tokens of |min(rho A, clip(rho, exp(-.4), exp(.4)) A)|)^(1 / n), the objective of arXiv:2507.20673."""
    ratios = [1.1, 2.0, 0.3, 0.9]
    for advantage in (1.7, -0.6):
        product = 1.0
        for ratio in ratios:
            clipped = min(max(ratio, math.exp(-0.4)), math.exp(0.4))
            product *= abs(min(ratio * advantage, clipped * advantage))
        published = math.copysign(product ** (1 / 4), advantage)
        losses, _ = evaluated(
            "gmpo",
            LogClipConfig(),
            [4],
            logprobs=[0.0] * 4,
            old_logprobs=[-math.log(ratio) for ratio in ratios],
            advantages=[advantage] * 4,
        )
        assert losses == near([-published] * 4)


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    """Ratios 10 and .5 in the range [0, 5]: weights 5 and .5."""
    losses, gradient = evaluated(
        "cispo",
        CispoConfig(),
        [2],
        logprobs=[-2.0, -2.0],
        old_logprobs=[-2.0 - math.log(10), -2.0 + math.log(2)],
        advantages=[1.0, -3.0],
    )
    assert losses == near([10.0, -3.0])
    assert gradient == near([-5.0, 1.5])


def test_rollout_is_silences_what_lies_on_or_outside_its_range() -> None:
    """Q = 1.1, 1.5 and, exactly, 1.0 with clip_high = 0: the range is open."""
    columns = {"logprobs": [-1.0, -1.0], "advantages": [2.0, 2.0], "rollout_logprobs": [-1.0 - math.log(1.1), -1.0 - math.log(1.5)]}
    losses, gradient = evaluated("rollout_is", ClipConfig(), [2], **columns)
    assert (losses, gradient) == (near([2.2, 0.0]), near([-2.2, 0.0]))
    losses, gradient = evaluated(
        "rollout_is", ClipConfig(clip_high=0.0), [1], logprobs=[-1.0], advantages=[2.0], rollout_logprobs=[-1.0]
    )
    assert (losses, gradient) == ([0.0], [0.0])


@pytest.mark.parametrize(
    ("kind", "delta", "advantage", "loss"),
    [("tv", 0.2, 1.0, 0.0), ("tv", 0.2, -1.0, 1.5), ("tv", 0.3, 1.0, -1.5), ("kl", 0.14, 1.0, 0.0), ("kl", 0.15, 1.0, -1.5)],
)
def test_dppo_masks_by_divergence_in_the_direction_of_the_advantage(kind: Any, delta: float, advantage: float, loss: float) -> None:
    """P = .75 from mu = .5: ratio 1.5, total variation .25, KL = .5 log(.5 / .75) + .5 log(.5 / .25) = .1438 nats."""
    losses, gradient = evaluated(
        "dppo",
        DppoConfig(kind=kind, delta_low=delta, delta_high=delta),
        [1],
        logprobs=[math.log(0.75)],
        old_logprobs=[math.log(0.5)],
        advantages=[advantage],
    )
    assert (losses, gradient) == (near([loss]), near([loss]))


def test_dppo_measures_from_its_anchor() -> None:
    """P = .75: far from the rollout policy's .5, near the old policy's .7."""
    columns = {"logprobs": [math.log(0.75)], "advantages": [1.0]}
    old, _ = evaluated("dppo", DppoConfig(anchor="old"), [1], **columns, old_logprobs=[math.log(0.7)])
    rollout, _ = evaluated("dppo", DppoConfig(anchor="rollout"), [1], **columns, rollout_logprobs=[math.log(0.5)])
    assert (old, rollout) == (near([-0.75 / 0.7]), [0.0])


def test_sapo_has_the_slope_of_the_ratio_at_one() -> None:
    """At r = 1 the loss is -A (4 / tau) / 2 and its gradient -A; r = 1 + log(3) / tau gives the gate 3 / tau, slope 4 * 3 / 16."""
    losses, gradient = at_ratios("sapo", SapoConfig(), (1.0, 2.0), (1.0, -2.0), (1 + math.log(3), 1.0))
    assert losses == near([-4.0, 4.0 / 1.05, -3.0])
    assert gradient == near([-2.0, 2.0, -0.75 * (1 + math.log(3))])


def test_importance_sampling_is_not_clamped_where_numbers_suffice() -> None:
    losses, gradient = at_ratios("importance_sampling", None, (math.exp(30), 1.0), (math.exp(-30), -1.0))
    assert losses == gradient == near([-math.exp(30), math.exp(-30)])


def test_dro() -> None:
    """Log p = -1, log old = -3, A = 2, beta = .05: -(-2 - .025 * 4) = 2.1, gradient -(2 - .05 * 2) = -1.9."""
    assert evaluated("dro", DroConfig(), [1], logprobs=[-1.0], old_logprobs=[-3.0], advantages=[2.0]) == (near([2.1]), near([-1.9]))


def test_value_clip_takes_the_worse_of_both() -> None:
    """V = 2 from 1, clipped to 1.2. R = 0: max(4, 1.44) / 2, gradient 2. R = 3: max(1, 3.24) / 2, and moving on gains nothing."""
    losses, gradient = evaluated("value_clip", ValueClipConfig(), [2], values=[2.0, 2.0], old_values=[1.0, 1.0], returns=[0.0, 3.0])
    assert (losses, gradient) == (near([2.0, 1.62]), near([2.0, 0.0]))


@pytest.mark.parametrize(
    ("estimator", "difference", "loss", "gradient"),
    [
        ("k1", -3.0, -3.0, 1.0),
        ("abs", -3.0, 3.0, -1.0),
        ("k2", -3.0, 4.5, -3.0),
        ("k3", 1.0, 1 / E, 1 - 1 / E),
        ("k3", -2.0, E**2 - 3, 1 - E**2),
        ("k3", -3.0, 10.0, 0.0),  # exp(3) - 3 - 1 = 16.09 is beyond the clamp
        ("k3", 12.0, 10.0, 0.0),
        ("k3", -25.0, 10.0, 0.0),
        ("k3", 0.0, 0.0, 0.0),
    ],
)
def test_kl_estimators(estimator: Any, difference: float, loss: float, gradient: float) -> None:
    losses = evaluated("kl", KlConfig(estimator), [1], logprobs=[-1.0], ref_logprobs=[-1.0 - difference])
    assert losses == (near([loss]), near([gradient]))


def test_entropy_is_to_be_raised() -> None:
    assert evaluated("entropy", None, [2], entropy=[1.5, 0.0]) == ([-1.5, 0.0], [-1.0, -1.0])


def test_kl_cov_holds_back_the_token_whose_advantage_and_logprob_vary_together() -> None:
    """A = 2, 0, 0, 0, 0 and log p = -1, -2, -2, -2, -2: only the first covaries (1.6 * .8). One of five at fraction .2."""
    losses, gradient = evaluated(
        "kl_cov",
        KlCovConfig(coef=0.5),
        [5],
        logprobs=[-1.0] + [-2.0] * 4,
        old_logprobs=[-1.5] + [-2.5] * 4,
        advantages=[2.0] + [0.0] * 4,
    )
    r = math.exp(0.5)
    assert losses == near([-2 * r + 0.25, 0.0, 0.0, 0.0, 0.0])
    assert gradient == near([-2 * r + 0.5, 0.0, 0.0, 0.0, 0.0])


def test_kl_cov_takes_the_first_of_equals() -> None:
    losses, _ = evaluated("kl_cov", KlCovConfig(), [4], logprobs=[-1.0] * 4, old_logprobs=[-3.0] * 4, advantages=[0.0] * 4)
    assert losses == [2.0, 0.0, 0.0, 0.0]


def test_label_smoothing_is_torchs_own_over_whole_logits() -> None:
    """From logits alone: the scores are log p of the label and the mean of log p over the vocabulary; autograd goes through both sides."""
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    labels = torch.arange(7)
    every = logits.log_softmax(-1)
    needs = {"logprobs": every[torch.arange(7), labels], "mean_logprob": every.mean(-1)}
    loss = plugin.label_smoothing.skyrl_engine_make_loss(LabelSmoothingConfig(0.3))
    token_loss = as_loss_output("label_smoothing", loss(LossTokens(needs, sequences_of([7]), torch.Generator)), 7).token_loss
    due = torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=0.3)
    torch.testing.assert_close(token_loss, due)
    for gradient, expected_gradient in zip(
        torch.autograd.grad(token_loss.sum(), logits), torch.autograd.grad(due.sum(), logits), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)
