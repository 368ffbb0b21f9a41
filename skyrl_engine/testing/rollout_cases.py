"""Groups of attempts for tests: of any shape, and plain ones of one turn."""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st

from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.contracts.values.rollout import (
    SEGMENT_OBSERVED,
    SEGMENT_PROMPT,
    SEGMENT_SAMPLED,
    Group,
    Status,
    Trajectory,
    VersionSpans,
)
from skyrl_engine.contracts.values.rollout_columns import list_further_columns, list_required_columns

finite = st.floats(-1e6, 1e6)
names = st.text(st.characters(codec="utf-8"), max_size=8)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
numbers = st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False), max_size=2)


@st.composite
def trajectories(draw: st.DrawFn, ticket: int, member: int, start_version: int = 0) -> Trajectory:
    """Draw attempts of up to five segments, in one stretch or several, with rewards on any token."""
    kinds = [SEGMENT_PROMPT, *draw(st.lists(st.sampled_from([SEGMENT_SAMPLED, SEGMENT_OBSERVED, SEGMENT_PROMPT]), max_size=4))]
    lengths = [draw(st.integers(1, 4)) for _ in kinds]
    sampled = sum(length for kind, length in zip(kinds, lengths, strict=True) if kind == SEGMENT_SAMPLED)
    starts = sorted(draw(st.sets(st.integers(1, sampled - 1), max_size=2))) if sampled > 1 else []
    starts = [0, *starts] if sampled else []
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=sum(lengths), max_size=sum(lengths)))
    status: Status = draw(st.sampled_from(get_args(Status)))
    return Trajectory(
        ticket=ticket,
        member=member,
        token_ids=np.array(ids, dtype=np.int32),
        kinds=np.array(kinds, dtype=np.uint8),
        segment_offsets=offsets_of(lengths),
        logprobs=np.array(draw(st.lists(st.floats(-50, 0, width=32), min_size=sampled, max_size=sampled)), dtype=np.float32),
        versions=VersionSpans(
            np.array(starts, dtype=np.int32), np.arange(start_version, start_version + len(starts), dtype=np.int64)
        ),
        rewards=np.array(draw(st.lists(finite, min_size=sampled, max_size=sampled)), dtype=np.float64),
        unplaced_reward=draw(st.floats(-10, 10)),
        status=status,
        cause=draw(names) if status == "failed" else None,
        success=draw(st.none() | st.booleans()),
        start_version=start_version,
        stops=tuple(draw(st.lists(st.sampled_from(["stop", "length", "abort"]), max_size=3))),
        tool_problems=draw(st.integers(0, 3)),
        parts=draw(numbers),
        metrics=draw(numbers),
        info=draw(st.dictionaries(names, json_values, max_size=2)),
        seconds=draw(numbers),
        columns={row.name: draw(_numbers_of(sampled)) for row in list_further_columns() if sampled and draw(st.booleans())},
    )


def _numbers_of(tokens: int) -> st.SearchStrategy[np.ndarray]:
    """Draw one number per token, float32."""
    return st.lists(st.floats(-50, 50, width=32), min_size=tokens, max_size=tokens).map(lambda row: np.array(row, dtype=np.float32))


@st.composite
def groups(draw: st.DrawFn, ticket: int | None = None, least: int = 0) -> Group:
    """Draw groups of `least` to three attempts."""
    number = draw(st.integers(0, 2**40)) if ticket is None else ticket
    version = draw(st.integers(0, 5))
    members = [draw(trajectories(number, member, version)) for member in range(draw(st.integers(least, 3)))]
    return Group(number, draw(names), draw(names), version, tuple(members), draw(st.none() | names.filter(bool)))


def plain_group(
    ticket: int,
    *,
    start_version: int = 0,
    newest: int | None = None,
    rewards: Sequence[float] = (1.0, 0.0),
    dropped: str | None = None,
    tokens: int = 3,
    environment: str = "spell",
    key: str | None = None,
    **fields: Any,
) -> Group:
    """Make a group of one turn per attempt: a prompt of two tokens, and `tokens` sampled ones, the reward on the last.

    From the second token on they are of the weights of version `newest`, where it is given. `fields` are further ones of every attempt.
    """
    members = []
    for member, reward in enumerate(rewards):
        per_token = np.zeros(tokens)
        per_token[-1] = reward
        spans = VersionSpans.one(start_version, tokens)
        if newest is not None and newest > start_version:
            spans = VersionSpans(np.array([0, 1], dtype=np.int32), np.array([start_version, newest], dtype=np.int64))
        members.append(
            Trajectory(
                ticket=ticket,
                member=member,
                token_ids=np.arange(10 * member, 10 * member + 2 + tokens, dtype=np.int32) % 90,
                kinds=np.array([SEGMENT_PROMPT, SEGMENT_SAMPLED], dtype=np.uint8),
                segment_offsets=np.array([0, 2, 2 + tokens], dtype=np.int64),
                logprobs=np.full(tokens, -0.5, dtype=np.float32),
                versions=spans,
                rewards=per_token,
                start_version=start_version,
                **{"stops": ("stop",), "success": reward > 0, **fields},
            )
        )
    return Group(ticket, environment, f"task-{ticket}" if key is None else key, start_version, tuple(members), dropped)


ARRAYS = ("token_ids", "kinds", "segment_offsets", *(row.name for row in list_required_columns()))
PLAIN = (
    "ticket",
    "member",
    "unplaced_reward",
    "status",
    "cause",
    "success",
    "start_version",
    "stops",
    "tool_problems",
    "parts",
    "metrics",
    "info",
    "seconds",
)


def require_same(got: Group, due: Group) -> None:
    """Compare two groups to the last bit, types included."""
    for name in ("ticket", "environment", "task_key", "start_version", "dropped"):
        assert getattr(got, name) == getattr(due, name), name
    assert len(got.trajectories) == len(due.trajectories)
    for one, other in zip(got.trajectories, due.trajectories, strict=True):
        for name in ARRAYS:
            assert getattr(one, name).dtype == getattr(other, name).dtype, name
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name
        assert one.columns.keys() == other.columns.keys()
        for name in one.columns:
            assert one.columns[name].dtype == other.columns[name].dtype, name
            assert one.columns[name].tobytes() == other.columns[name].tobytes(), name
        for part in ("starts", "versions"):
            assert getattr(one.versions, part).dtype == getattr(other.versions, part).dtype
            assert getattr(one.versions, part).tolist() == getattr(other.versions, part).tolist()
        for name in PLAIN:
            assert getattr(one, name) == getattr(other, name), name
            assert type(getattr(one, name)) is type(getattr(other, name)), name
