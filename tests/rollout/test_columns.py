"""Trajectories as columns against the same written one token at a time, and what must hold of any of them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.rollout import SEGMENT_OBSERVED, SEGMENT_PROMPT, SEGMENT_SAMPLED, Group, Trajectory, VersionSpans
from skyrl_engine.rollout.columns import Overlong, Truncated, collect_learned, to_columns

ENVIRONMENTS = ("sums", "words")
SOFT = Overlong(start=3, end=9, penalty=0.5)


def trajectory(
    *segments: tuple[int, list[int]], rewards: dict[int, float] | None = None, status: Any = "finished", **facts: Any
) -> Trajectory:
    """An attempt of these segments; `rewards` by the number of the sampled token."""
    sampled = sum(len(tokens) for kind, tokens in segments if kind == SEGMENT_SAMPLED)
    earned = np.zeros(sampled, dtype=np.float32)
    for place, value in (rewards or {}).items():
        earned[place] = value
    return Trajectory(
        ticket=0,
        member=0,
        token_ids=np.array([token for _, tokens in segments for token in tokens], dtype=np.int32),
        kinds=np.array([kind for kind, _ in segments], dtype=np.uint8),
        segment_offsets=np.cumsum([0, *(len(tokens) for _, tokens in segments)]).astype(np.int64),
        logprobs=-np.arange(1, sampled + 1, dtype=np.float32) / 8,
        versions=VersionSpans.one(0, sampled),
        rewards=earned,
        status=status,
        **facts,
    )


def by_loops(
    groups: list[Group], version: int, truncated: Truncated, overlong: Overlong | None, missing_eos_penalty: float | None = None
) -> list[dict[str, Any]]:
    """The samples one token at a time: the definition."""
    samples: list[dict[str, Any]] = []
    attempts = [(group, trajectory) for group in groups for trajectory in group.trajectories if trajectory.status != "failed"]
    for number, (group, attempt) in enumerate(attempts):
        cut_off = attempt.status == "truncated"
        rewards = [0.0 if cut_off and truncated == "zero_reward" else reward for reward in attempt.rewards]
        more = 0.0 if cut_off and truncated == "zero_reward" else attempt.unplaced_reward
        behind = sum(
            int(attempt.segment_offsets[k + 1] - attempt.segment_offsets[k])
            for k, kind in enumerate(attempt.kinds)
            if kind != SEGMENT_PROMPT
        )
        if overlong is not None:
            over = (behind - overlong.start) / (overlong.end - overlong.start)
            more -= min(1.0, max(0.0, over)) * overlong.penalty
        if missing_eos_penalty is not None and (attempt.stops or ("length",))[-1] not in ("eos", "stop_string"):
            more -= missing_eos_penalty
        if rewards and more != 0:
            rewards[-1] = float(rewards[-1]) + more
        taken, stretches = 0, []
        for k, kind in enumerate(attempt.kinds):
            tokens = attempt.token_ids[attempt.segment_offsets[k] : attempt.segment_offsets[k + 1]].tolist()
            if kind == SEGMENT_PROMPT:
                stretches.append({"input_ids": tokens, "weight": [], "rewards": [], "logprobs": []})
                continue
            stretch = stretches[-1]
            stretch["input_ids"] = stretch["input_ids"] + tokens
            for _ in tokens:
                if kind == SEGMENT_SAMPLED:
                    stretch["weight"].append(0 if cut_off and truncated == "mask" else 1)
                    stretch["rewards"].append(rewards[taken])
                    stretch["logprobs"].append(attempt.logprobs[taken])
                    taken += 1
                else:
                    stretch["weight"].append(0)
                    stretch["rewards"].append(0.0)
                    stretch["logprobs"].append(0.0)
            stretch["sampled"] = stretch.get("sampled", 0) + (len(tokens) if kind == SEGMENT_SAMPLED else 0)
        sampled_stretches = [stretch for stretch in stretches if stretch.get("sampled")]
        for turn, stretch in enumerate(sampled_stretches):
            stretch |= {
                "truncated": cut_off,
                "staleness": version - group.start_version,
                "environment": ENVIRONMENTS.index(group.environment),
                "turn": turn,
                "group": group.ticket,
                "trajectory": number,
            }
            samples.append(stretch)
    return samples


def list_samples(columns: SampleColumns) -> list[dict[str, Any]]:
    samples = []
    for i in range(len(columns)):
        actions = slice(columns.action_offsets[i], columns.action_offsets[i + 1])
        samples.append(
            {
                "input_ids": columns.input_ids[columns.token_offsets[i] : columns.token_offsets[i + 1]].tolist(),
                "weight": columns.loss_weight[actions].tolist(),
                "rewards": columns.columns["rewards"][actions].tolist(),
                "logprobs": columns.columns["rollout_logprobs"][actions].tolist(),
                **{name: columns.sample_values[name][i] for name in ("truncated", "staleness", "environment", "turn")},
                "group": columns.group_ids[i],
                "trajectory": columns.trajectory_ids[i],
            }
        )
    return samples


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Stretches that begin with a prompt; turns may be empty, and the last stretch may hold nothing that was sampled."""
    tokens = st.lists(st.integers(0, 99), max_size=4)
    segments: list[tuple[int, list[int]]] = []
    for _ in range(draw(st.integers(1, 3))):
        segments.append((SEGMENT_PROMPT, draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))))
        segments += [
            (kind, draw(tokens)) for kind in draw(st.lists(st.sampled_from([SEGMENT_SAMPLED, SEGMENT_OBSERVED]), max_size=5))
        ]
    sampled = sum(len(values) for kind, values in segments if kind == SEGMENT_SAMPLED)
    values = st.sampled_from([-1.0, 0.25, 0.5, 3.3])
    rewards = draw(st.dictionaries(st.integers(0, sampled - 1), values, max_size=4)) if sampled else {}
    return trajectory(
        *segments,
        rewards=rewards,
        status=draw(st.sampled_from(["finished", "truncated", "failed"])),
        stops=tuple(draw(st.lists(st.sampled_from(["eos", "stop_string", "length"]), max_size=2))),
        unplaced_reward=draw(st.sampled_from([0.0, 0.5])),
    )


@st.composite
def group_lists(draw: st.DrawFn) -> list[Group]:
    count = draw(st.integers(0, 4))
    return [
        Group(
            ticket=7 * number + 2,
            environment=draw(st.sampled_from(ENVIRONMENTS)),
            task_key=str(number),
            start_version=draw(st.integers(0, 3)),
            trajectories=tuple(draw(st.lists(trajectories(), max_size=4))),
        )
        for number in range(count)
    ]


@given(
    groups=group_lists(),
    truncated=st.sampled_from(["keep", "mask", "zero_reward"]),
    overlong=st.sampled_from([None, SOFT]),
    penalty=st.sampled_from([None, 0.25]),
)
def test_columns_are_the_trajectories_token_by_token(
    groups: list[Group], truncated: Truncated, overlong: Overlong | None, penalty: float | None
) -> None:
    columns = to_columns(
        groups, environments=ENVIRONMENTS, version=3, truncated=truncated, overlong=overlong, missing_eos_penalty=penalty
    )
    wanted = by_loops(groups, 3, truncated, overlong, penalty)
    for sample in wanted:
        del sample["sampled"]
    assert list_samples(columns) == wanted
    assert columns.grouped
    assert columns.input_ids.dtype == np.int32
    assert columns.loss_weight.dtype == np.uint8
    assert {name: values.dtype for name, values in columns.columns.items()} == {
        "rewards": np.dtype(np.float64),
        "rollout_logprobs": np.dtype(np.float32),
    }
    assert columns.unscored_first_tokens == 0


@given(groups=group_lists())
def test_every_sampled_token_is_scored_once(groups: list[Group]) -> None:
    """P8: each sampled token of an attempt that did not fail carries loss in one sample, observed ones in none, and no reward is lost."""
    columns = to_columns(groups, environments=ENVIRONMENTS)
    attempts = [attempt for group in groups for attempt in group.finished]
    scored = columns.loss_weight == 1
    assert columns.columns["rollout_logprobs"][scored].tolist() == [value for attempt in attempts for value in attempt.logprobs]
    assert not columns.columns["rollout_logprobs"][~scored].any()
    assert not columns.columns["rewards"][~scored].any()
    is_action = np.ones(len(columns.input_ids), dtype=bool)
    for start, length in zip(columns.token_offsets, np.diff(columns.token_offsets) - np.diff(columns.action_offsets), strict=False):
        is_action[start : start + length] = False
    sampled = [token for attempt in attempts for token in attempt.token_ids[attempt.sampled].tolist()]
    assert columns.input_ids[is_action][scored].tolist() == sampled
    learned = collect_learned(groups, columns, -columns.columns["rollout_logprobs"], columns.columns["rollout_logprobs"])
    owners = [group.ticket for group in groups for _ in group.finished]
    expected = [(ticket, attempt) for ticket, attempt in zip(owners, attempts, strict=True) if len(attempt.logprobs)]
    assert [(attempt.ticket, attempt.member) for attempt in learned] == [(ticket, attempt.member) for ticket, attempt in expected]
    for got, (_, attempt) in zip(learned, expected, strict=True):
        assert (got.trained_logprobs.tolist(), got.advantages.tolist()) == (attempt.logprobs.tolist(), (-attempt.logprobs).tolist())
    samples = np.repeat(np.arange(len(columns)), np.diff(columns.action_offsets))
    for number, attempt in enumerate(attempts):
        own = columns.columns["rewards"][columns.trajectory_ids[samples] == number]
        if attempt.sampled.any():
            assert float(own.sum()) == pytest.approx(attempt.reward, rel=1e-15, abs=1e-9)
        else:
            assert not (columns.trajectory_ids == number).any()


def test_a_rewritten_history_is_one_sample_a_stretch() -> None:
    attempt = trajectory(
        (SEGMENT_PROMPT, [1, 2]),
        (SEGMENT_SAMPLED, [3]),
        (SEGMENT_OBSERVED, [4]),
        (SEGMENT_SAMPLED, [5, 6]),
        (SEGMENT_PROMPT, [1, 9]),
        (SEGMENT_SAMPLED, [7]),
        rewards={0: 1.0, 3: 2.0},
    )
    columns = to_columns([Group(4, "sums", "k", 1, (attempt, attempt))], environments=ENVIRONMENTS, version=3)
    assert columns.token_offsets.tolist() == [0, 6, 9, 15, 18]
    assert columns.loss_weight.tolist() == [1, 0, 1, 1, 1] * 2
    assert columns.columns["rewards"].tolist() == [1, 0, 0, 0, 2] * 2
    assert columns.sample_values["turn"].tolist() == [0, 1, 0, 1]
    assert columns.trajectory_ids.tolist() == [0, 0, 1, 1]
    assert columns.group_ids.tolist() == [4] * 4
    assert columns.sample_values["staleness"].tolist() == [2] * 4


def test_a_prompt_after_which_nothing_was_sampled_is_no_sample() -> None:
    attempt = trajectory((SEGMENT_PROMPT, [1]), (SEGMENT_SAMPLED, [2]), (SEGMENT_PROMPT, [1, 2, 3]))
    columns = to_columns([Group(0, "sums", "k", 0, (attempt,))], environments=ENVIRONMENTS)
    assert columns.input_ids.tolist() == [1, 2]


def test_a_long_attempt_loses_what_the_formula_says() -> None:
    """DAPO, equation 13: nothing up to 3 tokens, the penalty at 9, half of it in the middle; prompts do not count, observations do."""
    lengths = (2, 3, 6, 9, 12)
    attempts = tuple(
        trajectory(
            (SEGMENT_PROMPT, [1] * 20),
            (SEGMENT_SAMPLED, [2]),
            (SEGMENT_OBSERVED, [3] * (length - 2)),
            (SEGMENT_SAMPLED, [4]),
            rewards={1: 1.0},
        )
        for length in lengths
    )
    columns = to_columns([Group(0, "sums", "k", 0, attempts)], environments=ENVIRONMENTS, overlong=SOFT)
    assert columns.columns["rewards"][columns.action_offsets[1:] - 1].tolist() == [1.0, 1.0, 0.75, 0.5, 0.5]
    assert np.count_nonzero(columns.columns["rewards"]) == len(lengths)


def test_columns_can_be_chosen_and_planned() -> None:
    attempt = trajectory((SEGMENT_PROMPT, [1]), (SEGMENT_SAMPLED, [2]), (SEGMENT_PROMPT, [5]), (SEGMENT_SAMPLED, [6]))
    columns = to_columns([Group(0, "sums", "k", 0, (attempt, attempt))], environments=ENVIRONMENTS)
    assert columns.take([3, 0]).trajectory_ids.tolist() == [1, 0]
    assert columns.with_columns({"advantages": np.zeros(4, dtype=np.float32)}).trajectory_ids.tolist() == [0, 0, 1, 1]
    assert columns.lengths.trajectory_ids.tolist() == [0, 0, 1, 1]


def test_without_attempts_there_are_no_samples() -> None:
    assert len(to_columns([], environments=ENVIRONMENTS)) == 0
    failed = trajectory((SEGMENT_PROMPT, [1]), status="failed")
    assert len(to_columns([Group(0, "sums", "k", 0, (failed,))], environments=ENVIRONMENTS)) == 0
