"""Estimators of other engines' forms give the advantages of the native ones; the formulas are ours, their shapes are theirs."""

# ruff: noqa: ARG005 -- the kit reads names of arguments

import numpy as np
import pytest
import torch

from skyrl_engine.contracts import AdvantageBatch, AdvantageClaims
from skyrl_engine.errors import ContractError
from skyrl_engine.interop import padded_advantage
from skyrl_engine.testing import AdvantageConformance
from skyrl_engine.testing.advantages import batches
from skyrl_engine_advantages.plugin import gae as native_gae
from skyrl_engine_advantages.plugin import grpo as native_grpo


def grpo_form(token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True, config=None):
    """verl's: a group is an entry of `index`."""
    scores = token_level_rewards.sum(dim=-1)
    values = torch.zeros_like(scores)
    for group in set(index.tolist()):
        own = torch.tensor([each == group for each in index])
        values[own] = scores[own] - scores[own].mean()
        if norm_adv_by_std_in_grpo and own.sum() > 1:
            values[own] = values[own] / (scores[own].std() + epsilon)
        if scores[own].max() == scores[own].min():
            values[own] = 0.0
    values = values.unsqueeze(-1) * response_mask
    return values, values


def gae_form(token_level_rewards, values, response_mask, gamma, lam):
    """verl's: every token has a value."""
    last, following = torch.zeros(len(values), dtype=values.dtype), torch.zeros(len(values), dtype=values.dtype)
    advantages = torch.zeros_like(values)
    for place in reversed(range(values.shape[1])):
        here = response_mask[:, place]
        delta = token_level_rewards[:, place] + gamma * following - values[:, place]
        last = torch.where(here > 0, delta + gamma * lam * last, last)
        following = torch.where(here > 0, values[:, place], following)
        advantages[:, place] = last * here
    return advantages, advantages + values


OUTCOME = AdvantageClaims(groups="needed", shift=True, scale="linear", zero_sum=True, outcome=True)
mean = padded_advantage(grpo_form, config={"norm_adv_by_std_in_grpo": False}, claims=OUTCOME, name="mean")
discounted = padded_advantage(
    gae_form,
    config={"gamma": 0.9, "lam": 0.8},
    claims=AdvantageClaims(groups="ignored", returns=True, scale=None),
    name="discounted",
)


class TestMeanOfTheirForm(AdvantageConformance):
    plugin = mean


class TestDiscountedOfTheirForm(AdvantageConformance):
    plugin = discounted


def make(plugin, **options):
    schema = plugin.skyrl_engine_config_schema()
    return plugin.skyrl_engine_make_advantage(config=schema(**options))


def advantages_of(estimator, batch):
    output = estimator(batch)
    return getattr(output, "advantages", output)


@pytest.fixture(params=range(3))
def batch(request) -> AdvantageBatch:
    needs = ("old_values",)
    return [batches.make_crowd, batches.make_long_and_failed, batches.make_large][request.param](needs).batch()


def test_a_mean_over_groups_is_the_native_one(batch):
    schema = native_grpo.skyrl_engine_config_schema()
    native = native_grpo.skyrl_engine_make_advantage(config=schema(epsilon=1e-6))
    theirs = make(padded_advantage(grpo_form, config={"epsilon": 1e-6}, claims=AdvantageClaims(outcome=True)))
    np.testing.assert_allclose(advantages_of(theirs, batch), advantages_of(native, batch), rtol=1e-5, atol=1e-6)


def test_values_reach_the_function(batch):
    schema = native_gae.skyrl_engine_config_schema()
    native = native_gae.skyrl_engine_make_advantage(config=schema(gamma=0.9, lam=0.8, normalize="none"))
    due, got = native(batch), make(discounted)(batch)
    np.testing.assert_allclose(got.advantages, due.advantages, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.returns[batch.scored], due.returns[batch.scored], rtol=1e-5, atol=1e-5)


def test_a_reward_of_an_observed_token_stands_at_the_scored_one_before():
    rows = batches.move_rewards_behind(batches.make_crowd())
    seen = []

    def keep(token_level_rewards, response_mask):
        seen.append(token_level_rewards)
        return torch.zeros_like(response_mask)

    batch = rows.batch()
    padded_advantage(keep).skyrl_engine_make_advantage(config=None)(batch)
    assert float(seen[0].sum()) == pytest.approx(float(batch.rewards.sum()))
    assert seen[0].shape == (batches.CROWD, 2)
    assert not seen[0][:, 0].any()


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (lambda response_mask: None, {}, "takes no rewards"),
        (lambda token_level_rewards: None, {}, "takes no mask"),
        (lambda token_level_rewards, response_mask, bonus: None, {}, "takes 'bonus', which is no known name"),
        (lambda token_level_rewards, response_mask: None, {"arguments": {"bonus": "rewards"}}, "takes no argument 'bonus'"),
        (lambda token_level_rewards, mine: None, {"arguments": {"mine": "masks"}}, "which is none of rewards, mask"),
    ],
)
def test_arguments_that_cannot_be_matched_are_named(function, options, words):
    with pytest.raises(TypeError, match=words):
        padded_advantage(function, name="theirs", **options)


def test_a_result_of_another_shape_is_refused():
    plugin = padded_advantage(lambda token_level_rewards, response_mask: token_level_rewards.sum(-1), name="summed")
    with pytest.raises(ContractError, match=r"summed returns \(130,\), where \(130, 2\), trajectories x tokens, is due"):
        plugin.skyrl_engine_make_advantage(config=None)(batches.make_crowd().batch())
