"""Rewards are float64 from the environment to the advantage, so that equal totals over other turns are worth the same."""

from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from rl_runs import Rl, steps_of

from skyrl_engine.contracts import Completion, Group, Trajectory, VersionSpans, as_advantage_output
from skyrl_engine.rollout.columns import Overlong, to_columns
from skyrl_engine.rollout.group_source import view_of
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.journal_index import read_groups, read_index
from skyrl_engine.rollout.transcript import Transcript
from skyrl_engine.training.rl.metrics import rollout_metrics
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.training.rl.trainer import advantage_batch
from skyrl_engine_advantages.options import GroupOptions, TokenOptions
from skyrl_engine_advantages.plugin import dr_grpo, grpo, maxrl, reinforce_pp, reinforce_pp_baseline, rloo
from skyrl_engine_group_filters.plugin import VarianceOptions, zero_variance


def attempt(member: int, *turns: float, tokens: bool = False) -> Trajectory:
    """An attempt of these rewards of turns of two tokens each; with `tokens` all of them are in the last turn, on its tokens."""
    transcript = Transcript(np.array([1, 2], dtype=np.int32))
    for number, reward in enumerate(turns[:1] if tokens else turns):
        if number:
            transcript.add_observation(np.array([7], dtype=np.int32))
        transcript.add_completion(Completion(0, np.array([3, 4]), np.zeros(2, np.float32), VersionSpans.one(0, 2), "stop"))
        transcript.add_reward(reward, turns if tokens else None)
    return transcript.trajectory(ticket=0, member=member, start_version=0)


TIES = {
    "turns": (attempt(0, 10.1, 0.2), attempt(1, 10.3), attempt(2, 0.2, 10.1)),
    "many turns": (attempt(0, *[0.1] * 9), attempt(1, 0.9), attempt(2, 0.3, 0.6)),
    "tokens of a turn": (attempt(0, 10.1, 0.2, tokens=True), attempt(1, 10.3)),
    "a part of a reward model": (evolve(attempt(0, 10.1), unplaced_reward=0.2), attempt(1, 10.3)),
    "turns that cancel out": (attempt(0, 0.1, 0.2, -0.3), attempt(1, 0.3, -0.3), attempt(2, 0.0)),
    "negative": (attempt(0, -10.1, -0.2), attempt(1, -10.3)),
}
ESTIMATORS = [
    (grpo, GroupOptions(normalize="group", epsilon=0.0)),
    (grpo, GroupOptions(normalize="batch", epsilon=0.0)),
    (dr_grpo, GroupOptions()),
    (rloo, GroupOptions(normalize="group", epsilon=0.0)),
    (maxrl, GroupOptions(normalize="group", epsilon=0.0)),
    (reinforce_pp_baseline, GroupOptions(normalize="batch", epsilon=0.0)),
]


WORLD = """
from skyrl_engine import hookimpl
from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task


class Episode:
    def __init__(self, seed):
        self.earned = ((10.1, 0.2), (10.3, 0.0), (0.2, 10.1))[seed % 3]

    def begin(self):
        return ()

    def step(self, action):
        if action.turn == 0 and len(action.token_ids) > 10:
            return StepResult(10.3)  # else there might be no room for a second turn
        done = action.turn == 1
        return StepResult(self.earned[action.turn], done, () if done else ({"role": "user", "content": "more"},))

    def close(self):
        pass


class World:
    claims = EnvironmentClaims(max_turns=2)

    def tasks(self, split):
        return [Task(str(n), messages=({"role": "user", "content": "go"},)) for n in range(4)]

    def open(self, task, seed):
        return Episode(seed)


class Plugin:
    @hookimpl
    def skyrl_engine_make_environment(self):
        return World()


world = Plugin()
"""
"""Two turns that are worth 10.3 together, in one of three ways."""


def batch_of(group: Group, **shaping):
    return advantage_batch(to_columns([group], environments=["sums"], **shaping), ())


@pytest.mark.parametrize("attempts", TIES.values(), ids=TIES.keys())
def test_equal_totals_are_a_tie_for_all_who_compare_them(attempts) -> None:
    group = Group(0, "sums", "k", 0, attempts)
    batch = batch_of(group)
    assert batch.rewards.dtype == np.float64
    assert len(set(batch.trajectory_rewards().tolist())) == 1
    for function, options in ESTIMATORS:
        assert not function(batch, options).any(), function
    assert zero_variance(view_of(group), VarianceOptions()) == "zero_variance"
    assert rollout_metrics([group], [group], ["sums"])["rollout/zero_variance"] == 1.0


def test_turns_of_one_worth_normalise_to_nothing() -> None:
    """All returns are 10.3, or the rounding of a sum."""
    group = Group(0, "sums", "k", 0, (evolve(attempt(0, 10.1), unplaced_reward=0.2), attempt(1, 10.3)))
    output = as_advantage_output("it", reinforce_pp(batch_of(group), TokenOptions(epsilon=0.0)), batch_of(group), returns=True)
    assert not output.advantages.any()


def test_a_difference_that_is_no_tie_counts() -> None:
    """A difference of 1e-8 is lost in float32, and decides here; the mean of 10 is rounded by up to 2e-15, which is 2e-7 of it."""
    group = Group(0, "sums", "k", 0, (attempt(0, 10.0), attempt(1, 10.0 + 1e-8)))
    output = grpo(batch_of(group), GroupOptions(normalize="group", epsilon=0.0))
    np.testing.assert_allclose(output, [-(0.5**0.5)] * 2 + [0.5**0.5] * 2, rtol=1e-6)
    assert zero_variance(view_of(group), VarianceOptions()) is None
    assert rollout_metrics([group], [group], ["sums"])["rollout/zero_variance"] == 0.0


def test_a_punishment_of_length_is_taken_off_in_double() -> None:
    """Two turns of 2 tokens and an observed one are half of the way from 3 to 7 tokens: 10.1 + 0.3 - 0.1 is 10.3."""
    group = Group(0, "sums", "k", 0, (attempt(0, 10.1, 0.3), attempt(1, 10.3)))
    batch = batch_of(group, overlong=Overlong(3, 7, 0.2))
    assert len(set(batch.trajectory_rewards().tolist())) == 1
    assert not grpo(batch, GroupOptions(normalize="group", epsilon=0.0)).any()


def test_the_journal_keeps_every_bit(tmp_path) -> None:
    group = Group(0, "sums", "k", 0, TIES["many turns"])
    with open_journal(tmp_path, run="run-a") as journal:
        journal.append(group)
    (back,) = read_groups(tmp_path)
    assert [trajectory.reward for trajectory in back.trajectories] == [0.9, 0.9, 0.3 + 0.6]
    assert back.rewards.tolist() == [0.3 + 0.6] * 3
    assert back.trajectories[0].rewards.tolist() == [0.0, 0.1] * 9


def test_a_run_over_equal_totals_learns_nothing_and_drops_them(rl: Rl, tmp_path: Path) -> None:
    (tmp_path / "ties.py").write_text(WORLD)
    keys = ("rl.group_size=6", "rl.steps=1", "advantage.epsilon=0", f'environments=[{{use="{tmp_path}/ties.py:world"}}]')
    plain = run_rl(rl("plain", *keys)).directory
    metrics = steps_of(plain)[0]["metrics"]
    assert (metrics["rollout/zero_variance"], metrics["grad_norm"]) == (1.0, 0.0)
    index = read_index(plain / "rollouts")
    groups = [entry.group() for entry in index.groups.values()]
    assert len({each.reward for group in groups for each in group.finished}) == 2, "sums that differ"
    assert not any(each.advantages.any() for each in index.learned[1].read_learned())
    filtered = run_rl(rl("filtered", *keys, "rl.groups=1", 'group_filters=[{use="zero_variance"}]')).directory
    groups = [entry.group() for entry in read_index(filtered / "rollouts").groups.values()]
    assert {group.dropped for group in groups} == {"zero_variance"}
    assert any(len({each.reward for each in group.trajectories}) > 1 for group in groups), "sums that differ"
