"""The best evaluation: by a metric whose name says which values are better, or by what is said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.errors import ConfigError
from skyrl_engine.run.best import Best, collect_extremes, find_best, is_higher_better, rank_checkpoints, read_metric


@pytest.mark.parametrize(
    ("metric", "higher"),
    [
        ("loss", False),
        ("loss/train_1", False),
        ("reference_kl", False),
        ("evaluation/avg@4", True),
        ("evaluation/spell/pass@2", True),
        ("rewards/accuracies", True),
        ("rewards/margins", True),
        ("reward/model_mean", True),
        ("rewards/rejected", None),
        ("evaluation/tokens_mean", None),
    ],
)
def test_a_name_says_which_values_are_better(metric, higher):
    assert is_higher_better(metric) is higher


@given(
    st.dictionaries(
        st.integers(0, 99),
        st.dictionaries(
            st.sampled_from(["loss", "evaluation/avg@1", "evaluation/avg@1_low", "tokens"]), st.floats(-9, 9, allow_nan=False)
        ),
        max_size=8,
    )
)
def test_extremes_know_the_best_evaluation(evaluations):
    in_order = dict(sorted(evaluations.items()))
    best = find_best(collect_extremes(in_order))
    names = [name for metrics in in_order.values() for name in metrics]
    assert (best is None) == (not {"loss", "evaluation/avg@1"} & set(names))
    if best is not None:
        values = [(metrics[best.metric], -step) for step, metrics in in_order.items() if best.metric in metrics]
        chosen = max(values) if best.metric == "evaluation/avg@1" else min((value, -step) for value, step in values)
        assert (best.value, best.step) == (chosen[0], abs(chosen[1]))


EVALUATIONS = {2: {"loss": 2.0, "tokens": 8.0}, 4: {"loss": 1.0, "tokens": 9.0}, 5: {"loss": 0.5, "tokens": 9.0}, 6: {"loss": 1.0}}


def test_checkpoints_are_ranked_by_the_evaluation_of_their_own_weights():
    assert rank_checkpoints([2, 3, 4, 6], EVALUATIONS) == [4, 6, 2]
    assert rank_checkpoints([2, 4, 6], EVALUATIONS, "tokens", higher=True) == [4, 2]
    assert rank_checkpoints([2, 4], {}) == []


def test_what_cannot_be_ranked_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"metric 'tokens'.*Say --highest or --lowest"):
        rank_checkpoints([2, 4], EVALUATIONS, "tokens")
    with pytest.raises(ConfigError, match=r"metric 'reward'.*is in no evaluation.*loss, tokens"):
        rank_checkpoints([2, 4], EVALUATIONS, "reward")
    extremes = collect_extremes(EVALUATIONS)
    assert find_best(extremes, "tokens", higher=False) == Best("tokens", 8.0, 2)
    assert find_best(extremes, "tokens") is None
    assert find_best(extremes, "reward") is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"evaluation": {"best": "loss", "best_is": "auto"}}, ("loss", None)),
        ({"evaluation": {"best": "tokens", "best_is": "highest"}}, ("tokens", True)),
        ({"evaluation": {"best": None}}, (None, None)),
        ({"evaluation": 3}, (None, None)),
        (None, (None, None)),
    ],
)
def test_the_configuration_may_name_the_metric(config, expected):
    assert read_metric(config) == expected
