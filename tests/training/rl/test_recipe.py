"""Which passes a step makes follows from what its parts read; contradictions are refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_engine.config.schema import RewardKlConfig, RlConfig
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.training.rl.scoring import plan_scoring_passes

PPO = {"ppo": ("logprobs", "old_logprobs", "advantages")}
REINFORCE = {"reinforce": ("logprobs", "advantages")}
TIS = {**PPO, "tis": ("old_logprobs", "rollout_logprobs")}
CRITIC = {**PPO, "value_clip": ("values", "old_values", "returns")}
TOP_ENTROPY = {**PPO, "top_entropy": ("entropy_quantile",)}
KL = {**PPO, "kl": ("logprobs", "ref_logprobs")}
SCORES = {"logprobs", "entropy", "values"}


Needs = dict[str, tuple[str, ...]]


def make_recipe(needs: Needs = PPO, *, reads: tuple[str, ...] = (), returns: bool = False, **rl: Any) -> Any:
    columns = tuple(dict.fromkeys(need for own in needs.values() for need in own if need not in SCORES))
    product = SimpleNamespace(needs=reads, claims=SimpleNamespace(returns=returns))
    objective: Any = SimpleNamespace(needs=needs, columns=columns)
    return plan_scoring_passes(RlConfig(**rl), objective, SimpleNamespace(product=product, label="estimator"))


@pytest.mark.parametrize(
    ("needs", "settings", "old", "scores", "reference"),
    [
        (PPO, {}, "current", {}, False),
        (PPO, {"mini_batches": 2}, "score", {"old_logprobs": "logprobs"}, False),
        (PPO, {"epochs": 2}, "score", {"old_logprobs": "logprobs"}, False),
        (PPO, {"old": "score"}, "score", {"old_logprobs": "logprobs"}, False),
        (PPO, {"old": "rollout", "epochs": 2}, "rollout", {}, False),
        (PPO, {"reads": ("old_logprobs",)}, "score", {"old_logprobs": "logprobs"}, False),
        (PPO, {"kl": RewardKlConfig(0.1)}, "score", {"old_logprobs": "logprobs"}, True),
        (PPO, {"kl": RewardKlConfig(0.1), "old": "current"}, "current", {}, True),
        (REINFORCE, {}, None, {}, False),
        (REINFORCE, {"mini_batches": 2}, "score", {"old_logprobs": "logprobs"}, False),
        (REINFORCE, {"kl": RewardKlConfig(0.1)}, "score", {"old_logprobs": "logprobs"}, True),
        (TIS, {}, "current", {}, False),
        (KL, {}, "current", {}, True),
        (TOP_ENTROPY, {}, "current", {"entropy_quantile": "entropy"}, False),
        (TOP_ENTROPY, {"epochs": 2}, "score", {"old_logprobs": "logprobs", "entropy_quantile": "entropy"}, False),
        (CRITIC, {"reads": ("old_values",), "returns": True}, "current", {"old_values": "values"}, False),
        (
            CRITIC,
            {"reads": ("old_values",), "returns": True, "mini_batches": 4},
            "score",
            {"old_logprobs": "logprobs", "old_values": "values"},
            False,
        ),
    ],
)
def test_passes_follow_from_needs(needs, settings, old, scores, reference) -> None:
    recipe = make_recipe(needs, **settings)
    assert (recipe.old, recipe.scores, recipe.reference) == (old, scores, reference)
    assert recipe.bound == ({"old_logprobs": "logprobs"} if old == "current" else {})


@pytest.mark.parametrize(
    ("needs", "settings", "words"),
    [
        (PPO, {"old": "current", "mini_batches": 2}, "later optimizer steps of the batch"),
        (PPO, {"old": "current", "epochs": 2}, "later optimizer steps of the batch"),
        (PPO, {"old": "current", "reads": ("old_logprobs",)}, "the advantage reads them before that pass"),
        (KL, {"kl": RewardKlConfig(0.1)}, "off the rewards, and kl adds it to the loss"),
        ({"mine": ("logprobs", "judge_logprobs")}, {}, "mine needs the column 'judge_logprobs'"),
        (PPO, {"reads": ("lengths",)}, "estimator needs the column 'lengths'"),
        (CRITIC, {}, "value_clip needs returns, and estimator gives none"),
    ],
)
def test_contradictions_are_refused(needs, settings, words) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        make_recipe(needs, **settings)
    assert caught.value.remedy
