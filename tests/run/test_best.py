"""The best evaluation: by a metric whose name says which values are better, or by what is said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.errors import ConfigError
from skyrl_engine.run.best import (
    Best,
    Extremes,
    find_best,
    find_best_of_extremes,
    is_higher_better,
    rank_checkpoints,
    update_extremes,
)


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
    extremes: Extremes = {}
    for step, metrics in in_order.items():
        update_extremes(extremes, step, {**metrics, "infinite": None})
    best = find_best(in_order)
    assert find_best_of_extremes(extremes) == best
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
        find_best(EVALUATIONS, "tokens")
    with pytest.raises(ConfigError, match=r"metric 'reward'.*is in no evaluation.*loss, tokens"):
        find_best(EVALUATIONS, "reward")
    assert find_best(EVALUATIONS, "tokens", higher=False) == Best("tokens", 8.0, 2)
