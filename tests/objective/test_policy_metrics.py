"""Distances between policies, against numbers worked out one token at a time."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_engine.contracts.values.outputs import combine_metrics, results_of
from skyrl_engine.objective.policy_metrics import WEIGHTS, effective_share, policy_metrics, scores_for
from skyrl_engine.objective.tokens import MicroBatchTokens

PRESENT, OLD, SAMPLED, ENTROPY = [-1.0, -2.0, -0.5], [-1.5, -2.0, -0.25], [-1.25, -2.5, -0.25], [0.5, 1.0, 1.5]


def tokens(*columns: str, bound: bool = False, places: slice = slice(None)) -> MicroBatchTokens:
    arrays = {"old_logprobs": OLD, "rollout_logprobs": SAMPLED}
    samples: Any = SimpleNamespace(columns={name: np.array(arrays[name], dtype=np.float32)[places] for name in columns})
    scores = {"logprobs": torch.tensor(PRESENT)[places], "entropy": torch.tensor(ENTROPY)[places]}
    return MicroBatchTokens(scores, samples, 0, 1, {"old_logprobs": "logprobs"} if bound else {})


def compute_metrics(*columns: str, **options: Any) -> dict[str, float]:
    return results_of(policy_metrics(tokens(*columns, **options), {"policy", "entropy"}))


def test_ratios_are_to_the_old_policy_and_gaps_from_old_to_the_sampler() -> None:
    ratios = [math.exp(own - old) for own, old in zip(PRESENT, OLD, strict=True)]
    gaps = [old - sampled for old, sampled in zip(OLD, SAMPLED, strict=True)]
    weights = [math.exp(own - sampled) for own, sampled in zip(PRESENT, SAMPLED, strict=True)]
    metrics = compute_metrics("old_logprobs", "rollout_logprobs")
    assert metrics == pytest.approx(
        {
            "policy/entropy": 1.0,
            "policy/ratio_mean": sum(ratios) / 3,
            "policy/ratio_max": max(ratios),
            "policy/gap_mean": sum(map(abs, gaps)) / 3,
            "policy/gap_max": max(map(abs, gaps)),
            "policy/gap_k3": sum(math.exp(gap) - 1 - gap for gap in gaps) / 3,
            "policy/weight_count": 3,
            "policy/weight_sum": sum(weights),
            "policy/weight_squares": sum(weight**2 for weight in weights),
        },
        rel=1e-6,
    )


def test_a_policy_that_is_its_own_old_one_has_ratios_of_exactly_1() -> None:
    metrics = compute_metrics("rollout_logprobs", bound=True)
    assert (metrics["policy/ratio_mean"], metrics["policy/ratio_max"]) == (1.0, 1.0)
    assert metrics["policy/gap_mean"] == pytest.approx((0.25 + 0.5 + 0.25) / 3)


def test_without_an_old_policy_the_present_one_is_compared_with_the_sampler() -> None:
    metrics = compute_metrics("rollout_logprobs")
    assert metrics["policy/gap_max"] == 0.5
    assert not any("ratio" in name for name in metrics)


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    names = ("old_logprobs", "rollout_logprobs")
    whole = policy_metrics(tokens(*names), {"policy", "entropy"})
    parts = [policy_metrics(tokens(*names, places=places), {"policy", "entropy"}) for places in (slice(0, 1), slice(1, 3))]
    assert results_of(combine_metrics(parts)) == pytest.approx(results_of(whole), rel=1e-12)
    assert policy_metrics(tokens(*names, places=slice(0, 0)), {"policy", "entropy"}) == {}


def test_what_is_not_watched_is_not_there() -> None:
    assert policy_metrics(tokens("old_logprobs"), {"entropy"}).keys() == {"policy/entropy"}
    assert "policy/entropy" not in policy_metrics(tokens("old_logprobs"), {"policy"})
    assert (scores_for(set()), scores_for({"policy"})) == (frozenset(), {"logprobs"})
    assert scores_for({"policy", "entropy"}) == {"logprobs", "entropy"}


def test_the_effective_share_of_weights() -> None:
    def share(*weights: float) -> float:
        return effective_share(len(weights), sum(weights), sum(weight**2 for weight in weights))

    assert share(2.0, 2.0, 2.0) == 1.0
    assert share(1.0, 0.0, 0.0, 0.0) == 0.25
    assert share(3.0, 1.0) == pytest.approx(0.8)
    assert math.isnan(share(0.0, 0.0))
    assert len(WEIGHTS) == 3


def test_the_gap_of_the_present_policy_is_measured_on_request() -> None:
    """The old log-probabilities may be the sampler's own: their distance from themselves says nothing."""
    inputs = tokens("old_logprobs", "rollout_logprobs")
    gaps = [abs(own - sampled) for own, sampled in zip(PRESENT, SAMPLED, strict=True)]
    assert results_of(policy_metrics(inputs, {"policy", "present_gap"}))["policy/gap_mean"] == pytest.approx(sum(gaps) / 3)
