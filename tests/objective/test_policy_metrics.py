"""Metrics of the policy against their definitions, token by token."""

import math

import numpy as np
import pytest
import torch

from skyrl_engine.contracts.values.ragged import Ragged
from skyrl_engine.objective.policy_metrics import WEIGHTS, effective_share, policy_metrics, scores_for
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine.objective.tokens import MicroBatchTokens

PRESENT = [-1.0, -0.5, -2.0]
OLD = [-1.0, -0.7, -1.5]
SAMPLED = [-1.25, -0.5, -2.5]


def tokens(*, bound=None, count=3, **columns):
    ids = np.zeros(1, dtype=np.int64)
    scored = Ragged(np.arange(count, dtype=np.int32), np.array([0, count]))
    samples = ScoredSamples(
        ids,
        ids,
        ids,
        np.array([count]),
        scored,
        {name: np.array(each, dtype=np.float32) for name, each in columns.items()},
        np.ones(count),
    )
    scores = {"logprobs": torch.tensor(PRESENT[:count], requires_grad=True), "entropy": torch.tensor([0.5, 1.0, 3.0][:count])}
    return MicroBatchTokens(scores, samples, 0, 1, bound or {})


def results(*arguments, **keywords):
    return {name: metric.result for name, metric in policy_metrics(*arguments, **keywords).items()}


def test_distances_from_the_old_and_the_sampling_policy():
    found = results(tokens(old_logprobs=OLD, rollout_logprobs=SAMPLED), {"policy", "entropy"})
    ratios = [math.exp(p - o) for p, o in zip(PRESENT, OLD, strict=True)]
    gaps = [o - s for o, s in zip(OLD, SAMPLED, strict=True)]
    weights = [math.exp(p - s) for p, s in zip(PRESENT, SAMPLED, strict=True)]
    due = {
        "policy/entropy": 1.5,
        "policy/ratio_mean": sum(ratios) / 3,
        "policy/ratio_max": max(ratios),
        "policy/gap_mean": sum(map(abs, gaps)) / 3,
        "policy/gap_max": max(map(abs, gaps)),
        "policy/gap_k3": sum(math.exp(gap) - 1 - gap for gap in gaps) / 3,
        **dict(zip(WEIGHTS, (3.0, sum(weights), sum(w * w for w in weights)), strict=True)),
    }
    assert found == pytest.approx(due, rel=1e-6)
    assert effective_share(3.0, sum(weights), sum(w * w for w in weights)) == pytest.approx(
        sum(weights) ** 2 / (3 * sum(w * w for w in weights))
    )


def test_a_policy_that_is_its_own_old_one_has_ratios_of_exactly_1():
    found = results(tokens(bound={"old_logprobs": "logprobs"}, rollout_logprobs=SAMPLED), {"policy"})
    assert (found["policy/ratio_mean"], found["policy/ratio_max"]) == (1.0, 1.0)
    assert found["policy/gap_max"] == pytest.approx(0.5)


def test_where_the_samplers_are_the_old_ones_the_gap_is_that_of_the_present_policy():
    given = tokens(old_logprobs=SAMPLED, rollout_logprobs=SAMPLED)
    assert results(given, {"policy"})["policy/gap_max"] == 0.0
    assert results(given, {"policy", "present_gap"})["policy/gap_max"] == pytest.approx(0.5)


def test_no_token_gives_no_metric_and_nothing_watched_reads_no_score():
    assert policy_metrics(tokens(count=0), {"policy", "entropy"}) == {}
    assert scores_for(set()) == frozenset()
    assert scores_for({"entropy"}) == {"entropy"}
    assert scores_for({"policy", "present_gap"}) == {"logprobs"}
