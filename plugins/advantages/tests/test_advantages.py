"""Each estimator keeps the promises, and its array operations give the bytes of the loops that define it."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine import DataError
from skyrl_engine.contracts import AdvantageOutput
from skyrl_engine.testing import AdvantageConformance
from skyrl_engine.testing.advantages.batches import AWKWARD, REWARDS, DrawnRows, DrawnSample, Token, rows
from skyrl_engine_advantages import loops, vectorized
from skyrl_engine_advantages.options import GaeOptions, GdpoOptions, GroupOptions, ReverseKlOptions, TokenOptions

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "gdpo", "maxrl", "reinforce_pp", "reinforce_pp_baseline", "gae", "reverse_kl")


def _suite(name, options, examples):
    members = {"plugin": f"skyrl-engine-advantages:{name}", "options": options, "examples": examples}
    return type(f"Test_{name}", (AdvantageConformance,), members)


OTHER = {name: {"normalize": "none" if name != "dr_grpo" else "batch", "clip": 1.5} for name in ESTIMATORS} | {
    "gdpo": {"weights": {"reward": 2.0}, "clip": 0.5}
}

for _name in ESTIMATORS:
    globals()[f"Test_{_name}"] = _suite(_name, {}, 15)
    globals()[f"Test_{_name}_other"] = pytest.mark.nightly(_suite(_name, OTHER[_name], 60))

CASES = [
    *(
        (name, GroupOptions(normalize=normalize, clip=clip))
        for name in ("grpo", "rloo", "maxrl")
        for normalize in ("none", "group", "batch")
        for clip in (None, 0.7)
    ),
    *(("reinforce_pp", TokenOptions(gamma=gamma, normalize=normalize)) for gamma in (1.0, 0.9) for normalize in ("none", "batch")),
    *(
        ("gae", GaeOptions(gamma=gamma, lam=lam, normalize=normalize))
        for gamma, lam in ((1.0, 0.95), (0.9, 0.5))
        for normalize in ("none", "batch")
    ),
    *(
        ("reverse_kl", ReverseKlOptions(gamma=gamma, reward_coef=coef, normalize=normalize))
        for gamma, coef, normalize in ((0.0, 0.0, "none"), (0.9, 0.5, "batch"), (1.0, 0.0, "none"))
    ),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value)[:90])
@given(batch=rows(("old_values", "old_logprobs", "teacher_logprobs"), rewards=(*REWARDS, *AWKWARD, 10.1, 0.2, 10.3), turns=3))
def test_array_operations_give_the_bytes_of_the_loops(name, options, batch):
    due, got = (_output(getattr(module, name)(batch.batch(), options)) for module in (loops, vectorized))
    assert got.advantages.tobytes() == due.advantages.tobytes()
    assert (got.returns is None) == (due.returns is None)
    if due.returns is not None:
        assert got.returns.tobytes() == due.returns.tobytes()


def _output(result):
    return result if isinstance(result, AdvantageOutput) else AdvantageOutput(result)


PARTS = st.one_of(st.sampled_from((*REWARDS, *AWKWARD)), st.just(float("nan")))


@given(batch=rows(turns=3), data=st.data(), weights=st.sampled_from(({}, {"a": 0.25}, {"a": -2.0, "b": 0.5})))
def test_parts_give_the_bytes_of_the_loops(batch, data, weights):
    plain = batch.batch()
    names = sorted({*weights, *data.draw(st.sets(st.sampled_from("abc"), min_size=1))})
    numbers = np.unique(plain.trajectory_ids, return_inverse=True)[1]
    count = int(numbers.max(initial=-1)) + 1
    drawn = {name: np.array(data.draw(st.lists(PARTS, min_size=count, max_size=count))) for name in names}
    shown = evolve(plain, parts={name: values[numbers] if count else np.zeros(0) for name, values in drawn.items()})
    options = GdpoOptions(weights=weights)
    assert vectorized.gdpo(shown, options).tobytes() == loops.gdpo(shown, options).tobytes()


def test_every_part_counts_alike_whatever_its_spread():
    """Parts 0 and 100 and parts 0 and 1 of a group of two, each for another attempt: neither is ahead. Weights come after."""
    batch = DrawnRows(tuple(DrawnSample(i, 0, i, 0, True, (Token(1.0),)) for i in range(2))).batch()
    shown = evolve(batch, parts={"large": np.array([100.0, 0.0]), "small": np.array([0.0, 1.0])})
    assert not vectorized.gdpo(shown, GdpoOptions(epsilon=0.0)).any()
    for weights, due in (({"small": 0.5}, 1.0), ({"small": 3.0}, -1.0)):
        got = vectorized.gdpo(shown, GdpoOptions(epsilon=0.0, weights=weights))
        np.testing.assert_allclose(got, np.array([due, -due]) / np.sqrt(2), rtol=1e-12)
    with pytest.raises(
        DataError, match=r"weights names the part 'smal', and the rewards of this batch have large, small"
    ) as caught:
        vectorized.gdpo(shown, GdpoOptions(weights={"smal": 2.0}))
    assert caught.value.remedy == "Name parts as the environment does: the names of its reward functions"


@pytest.mark.parametrize(
    ("values", "due"), [((0.0, 1.0, 2.0), (-1.0, 0.0, 1.0)), ((0.0, 2.0, 1.0, 1.0), (-np.sqrt(1.5), np.sqrt(1.5), 0.0, 0.0))]
)
def test_parts_at_a_distance_of_one_are_divided_like_others(values, due):
    count = len(values)
    batch = DrawnRows(tuple(DrawnSample(i, 0, i, 0, True, (Token(1.0),)) for i in range(count))).batch()
    got = vectorized.gdpo(evolve(batch, parts={"only": np.array(values)}), GdpoOptions(epsilon=0.0))
    np.testing.assert_allclose(got, due, rtol=1e-12)


@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 64), name=st.sampled_from(("grpo", "rloo", "maxrl")))
def test_equal_rewards_give_exactly_zero_whatever_they_are(reward, size, name):
    batch = DrawnRows(tuple(DrawnSample(i, 0, i, 0, True, (Token(1.0), Token(1.0, reward))) for i in range(size)))
    for normalize in ("none", "group", "batch"):
        assert not getattr(vectorized, name)(batch.batch(), GroupOptions(normalize=normalize)).any()


def test_four_trajectories_by_hand():
    rewards = (1.0, 0.0, 0.0, 1.0)
    batch = DrawnRows(
        tuple(DrawnSample(i, 0, i, 0, True, (Token(1.0), Token(0.0), Token(1.0, reward))) for i, reward in enumerate(rewards))
    ).batch()
    deviation = np.sqrt(4 * 0.25 / 3)
    due = np.array([0.5, 0.0, 0.5, -0.5, 0.0, -0.5, -0.5, 0.0, -0.5, 0.5, 0.0, 0.5])
    np.testing.assert_allclose(vectorized.grpo(batch, GroupOptions(normalize="group")), due / (deviation + 1e-6), rtol=1e-12)
    np.testing.assert_array_equal(vectorized.grpo(batch, GroupOptions()), due)
    np.testing.assert_allclose(vectorized.rloo(batch, GroupOptions()), due * 4 / 3, rtol=1e-15)
    np.testing.assert_allclose(vectorized.maxrl(batch, GroupOptions()), due * 2, rtol=1e-15)


def test_gae_of_one_trajectory_in_two_turns_by_hand():
    first, second = (Token(1.0, 0.0, 0.5), Token(0.0, 0.0, 9.0)), (Token(1.0, 1.0, 0.25),)
    batch = DrawnRows((DrawnSample(0, 0, 0, 1, True, second), DrawnSample(0, 0, 0, 0, True, first)), ("old_values",)).batch()
    advantages = vectorized.gae(batch, GaeOptions(gamma=0.5, lam=0.5, normalize="none"))
    last = 1.0 - 0.25
    before = 0.5 * 0.25 - 0.5 + 0.25 * last
    np.testing.assert_array_equal(advantages.advantages, [last, before, 0.0])
    np.testing.assert_array_equal(advantages.returns, [1.0, before + 0.5, 0.0])


def test_a_batch_of_nothing():
    empty = DrawnRows((), ("old_values",)).batch()
    for name, options in (
        ("grpo", GroupOptions()),
        ("maxrl", GroupOptions(normalize="batch")),
        ("gae", GaeOptions()),
        ("reinforce_pp", TokenOptions()),
    ):
        assert _output(getattr(vectorized, name)(empty, options)).advantages.shape == (0,)


def test_failed_members_stay_out_of_the_baseline():
    samples = tuple(DrawnSample(i, 0, i, 0, i != 2, (Token(1.0, reward),)) for i, reward in enumerate((1.0, 0.0, 100.0)))
    np.testing.assert_array_equal(vectorized.grpo(DrawnRows(samples).batch(), GroupOptions()), [0.5, -0.5, 0.0])
    alone = tuple(evolve(sample, finished=sample.key == 0) for sample in samples)
    np.testing.assert_array_equal(vectorized.grpo(DrawnRows(alone).batch(), GroupOptions(normalize="group")), [0.0, 0.0, 0.0])


def test_without_an_epsilon_a_deviation_divides_as_it_is():
    """Rewards 1, 0 and 0 have the mean 1/3 and the deviation 1/sqrt(3): the advantages are those of any multiple of them."""
    tokens = (Token(1.0, 1.0),), (Token(1.0, 0.0),), (Token(1.0, 0.0),)
    batch = DrawnRows(tuple(DrawnSample(key, 0, key, 0, True, own) for key, own in enumerate(tokens))).batch()
    due = np.array([2, -1, -1]) / np.sqrt(3)
    for options in (GroupOptions(normalize="group", epsilon=0.0), GroupOptions(normalize="group", epsilon=0.5)):
        deviation = 1 / np.sqrt(3)
        expected = due * deviation / (deviation + options.epsilon)
        for implementation in (loops, vectorized):
            np.testing.assert_allclose(implementation.grpo(batch, options), expected, rtol=1e-12)


def test_a_distance_of_one_is_divided_like_any_other():
    """Rewards 0, 2, 1 and 1 are 1, 1, 0 and 0 from their mean, and have the deviation sqrt(2/3) of a sample."""
    samples = [DrawnSample(key, 0, key, 0, True, (Token(1.0, reward),)) for key, reward in enumerate((0.0, 2.0, 1.0, 1.0))]
    output = _output(vectorized.grpo(DrawnRows(tuple(samples)).batch(), GroupOptions(epsilon=0.0, normalize="group")))
    assert np.allclose(output.advantages, [-np.sqrt(1.5), np.sqrt(1.5), 0.0, 0.0], rtol=1e-6, atol=0)
