"""Rollouts: attempts of a model at tasks, as tokens that were sampled once and are never made again. No torch."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from attrs import Factory, field, frozen

from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.contracts.values.rollout_columns import LARGEST_FLOAT32, RolloutColumn
from skyrl_engine.contracts.values.ties import equalize_ties

FinishReason = Literal["stop", "length", "abort", "error"]
Status = Literal["finished", "truncated", "failed"]

SEGMENT_PROMPT = 0
SEGMENT_SAMPLED = 1
SEGMENT_OBSERVED = 2
"""Kinds of a segment of tokens: what the task asks, what the model sampled, what an environment answered."""

_ENDINGS: Final = frozenset(("eos", "stop_string"))
"""Reasons among `stops` for which a turn ended because the model wanted it to."""

LARGEST_REWARD: Final = LARGEST_FLOAT32
"""Largest magnitude of a reward: rewards are float64, and the advantages that are made of them float32."""


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view that nobody writes through."""
    view = array.view()
    view.flags.writeable = False
    return view


def _all_read_only(columns: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
    return {name: _read_only(values) for name, values in columns.items()}


@frozen(eq=False, slots=False)
class VersionSpans:
    """The weights that made every sampled token: from token `starts[i]` on, those of version `versions[i]`, the number of steps that made them.

    `starts` int32[k] rise from 0, `versions` int64[k] rise; k is 0 where nothing was sampled.
    """

    starts: npt.NDArray[np.int32] = field(converter=_read_only)
    versions: npt.NDArray[np.int64] = field(converter=_read_only)

    @classmethod
    def one(cls, version: int, tokens: int) -> "VersionSpans":
        """Say that `version` made all tokens."""
        nonempty = tokens > 0
        return cls(np.zeros(int(nonempty), dtype=np.int32), np.full(int(nonempty), version, dtype=np.int64))

    def per_token(self, tokens: int) -> npt.NDArray[np.int64]:
        """int64[tokens]: the version of every token."""
        return np.repeat(self.versions, np.diff(np.append(self.starts, tokens)))


@frozen(eq=False, slots=False)
class Trajectory:
    """One attempt at one task: T tokens in K segments, S of them sampled, over `turns` turns of the model. Its arrays are read-only.

    `token_ids` int32[T]; segment k is `token_ids[segment_offsets[k]:segment_offsets[k + 1]]` and of `kinds[k]` (uint8[K]: PROMPT, SAMPLED,
    OBSERVED). The first segment is a prompt. A further prompt starts a new *stretch*: the history was rewritten, and what comes before it was
    not in front of the model any more. Without one, every turn's prompt is all that comes before it.

    On the sampled tokens, in their order: `logprobs` float32[S] in nats under the distribution that was sampled from, `versions`, and
    `rewards` float64[S], a turn's reward at its last token. An empty turn has no place for its reward: `unplaced_reward` sums those up.
    `columns` are further numbers [S] by name, where the environment gives them: rows of `rollout_columns.ROLLOUT_COLUMNS`.

    `status` is "truncated" where the length limit ended it and "failed" where `cause` says why it cannot be trained on. `parts` are components
    of the reward for people; `stops` says per turn what ended it; `seconds` are wall seconds by phase; `info` is what the environment said.
    `messages` are the dialogue with its turns of the model, and `tools` those that it may call, where somebody renders it again; else empty.
    """

    ticket: int
    member: int
    token_ids: npt.NDArray[np.int32] = field(converter=_read_only)
    kinds: npt.NDArray[np.uint8] = field(converter=_read_only)
    segment_offsets: IntArray = field(converter=_read_only)
    logprobs: npt.NDArray[np.float32] = field(converter=_read_only)
    versions: VersionSpans
    rewards: npt.NDArray[np.float64] = field(converter=_read_only)
    unplaced_reward: float = 0.0
    status: Status = "finished"
    cause: str | None = None
    success: bool | None = None
    start_version: int = 0
    stops: tuple[str, ...] = ()
    tool_problems: int = 0
    parts: Mapping[str, float] = Factory(dict)
    metrics: Mapping[str, float] = Factory(dict)
    info: Mapping[str, Any] = Factory(dict)
    seconds: Mapping[str, float] = Factory(dict)
    columns: Mapping[str, npt.NDArray[np.float32]] = field(factory=dict, converter=_all_read_only)
    messages: tuple[Mapping[str, Any], ...] = field(default=(), converter=tuple)
    tools: tuple[Mapping[str, Any], ...] = field(default=(), converter=tuple)

    def per_token(self, column: RolloutColumn) -> npt.NDArray[Any] | None:
        """Return the numbers [S] of a row of the table of rollout columns; None where the attempt has none."""
        return getattr(self, column.name) if column.in_every_attempt else self.columns.get(column.name)

    @property
    def turns(self) -> int:
        """Count the stretches of tokens that the model sampled."""
        return int(np.count_nonzero(self.kinds == SEGMENT_SAMPLED))

    @cached_property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """bool[T]: tokens that the model sampled."""
        return np.repeat(self.kinds == SEGMENT_SAMPLED, np.diff(self.segment_offsets))

    @property
    def reward(self) -> float:
        """Return the sum of all rewards, in float64, rounded once: their order changes nothing."""
        return math.fsum([*self.rewards[self.rewards != 0].tolist(), self.unplaced_reward])

    @property
    def largest_reward(self) -> float:
        """Return the largest magnitude of a turn's reward, of which ties are a share."""
        return max(float(np.abs(self.rewards).max(initial=0.0)), abs(self.unplaced_reward))

    @property
    def misses_end(self) -> bool:
        """True where the model did not end its last turn itself, by an end token or a stop string; of an attempt that says no `stops`, too."""
        return not self.stops or self.stops[-1] not in _ENDINGS

    @property
    def answer(self) -> str | None:
        """Return the answer that the attempt settled on, where its environment says."""
        return None if self.info.get("answer") is None else str(self.info["answer"])


@frozen(eq=False)
class Group:
    """The attempts at one task: what baselines compare, what is journaled, kept or dropped as a whole.

    `ticket` is its ordinal in the run, from 0; `start_version` the version of the weights when it was started; `task_key` names the task in
    its `environment`. `dropped` is the reason for which it is not trained on; None: it may be.
    """

    ticket: int
    environment: str
    task_key: str
    start_version: int
    trajectories: tuple[Trajectory, ...]
    dropped: str | None = None

    @property
    def finished(self) -> tuple[Trajectory, ...]:
        """Return the attempts that did not fail."""
        return tuple(trajectory for trajectory in self.trajectories if trajectory.status != "failed")

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """float64: the rewards of the attempts that did not fail; those that are a tie are the same number."""
        attempts = self.finished
        totals = np.array([attempt.reward for attempt in attempts], dtype=np.float64)
        return equalize_ties(totals, np.array([attempt.largest_reward for attempt in attempts], dtype=np.float64))
