"""A trajectory while it grows: tokens are appended, and none is ever changed or encoded again."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.kinds.generator import Completion
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.contracts.values.rollout import (
    SEGMENT_OBSERVED,
    SEGMENT_PROMPT,
    SEGMENT_SAMPLED,
    Status,
    Trajectory,
    VersionSpans,
)
from skyrl_engine.contracts.values.rollout_columns import RolloutColumn, list_further_columns
from skyrl_engine.errors import ContractError

Ids = npt.NDArray[np.int32]


class Transcript:
    """The tokens of one attempt, from its first prompt on."""

    def __init__(self, prompt_ids: Ids) -> None:
        self._segments: list[tuple[int, Ids]] = []
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._rewards: list[npt.NDArray[np.float64]] = []
        self._versions: list[npt.NDArray[np.int64]] = []
        self._columns: dict[str, list[npt.NDArray[np.float32]]] = {}
        self._stops: list[str] = []
        self._unplaced = 0.0
        self._behind_prompts = 0
        self.restart(prompt_ids)

    @property
    def prompt_ids(self) -> Ids:
        """int32[P]: what is in front of the model now."""
        return np.concatenate([ids for _, ids in self._segments[self._stretch :]])

    @property
    def length(self) -> int:
        """Count the sampled and observed tokens."""
        return self._behind_prompts

    def room(self, max_tokens: int) -> int:
        """Count the tokens that may still be sampled where sampled and observed ones are at most `max_tokens`."""
        return max(0, max_tokens - self._behind_prompts)

    @property
    def turns(self) -> int:
        """Count the turns of the model."""
        return len(self._stops)

    def restart(self, prompt_ids: Ids) -> None:
        """Go on from a prompt that was rendered again.

        Where it begins with all that is in front of the model, the rest is observed; otherwise the history was rewritten, and a new stretch
        begins.
        """
        if self._segments and (added := self.find_added_ids(prompt_ids)) is not None:
            self.add_observation(added)
            return
        self._stretch = len(self._segments)
        self._segments.append((SEGMENT_PROMPT, _ids(prompt_ids)))

    def find_added_ids(self, prompt_ids: Ids) -> Ids | None:
        """Return the tokens that a newly rendered prompt adds to the history, None where it is another history."""
        standing = self.prompt_ids
        return prompt_ids[len(standing) :] if np.array_equal(standing, prompt_ids[: len(standing)]) else None

    def add_completion(self, completion: Completion) -> None:
        """Add a turn of the model as it was sampled."""
        ids = _ids(completion.token_ids)
        if len(completion.logprobs) != len(ids):
            raise ContractError(
                f"the generator gave {len(completion.logprobs)} log-probabilities for {len(ids)} tokens",
                remedy="Give one log-probability per sampled token",
            )
        versions = completion.versions.per_token(len(ids))
        if len(versions) != len(ids):
            raise ContractError(
                f"the generator says of {len(versions)} of {len(ids)} tokens which weights made them",
                remedy="Give version spans that begin at token 0",
            )
        self._segments.append((SEGMENT_SAMPLED, ids))
        self._logprobs.append(np.array(completion.logprobs, dtype=np.float32))
        self._rewards.append(np.zeros(len(ids)))
        self._versions.append(versions)
        self._stops.append(stop_reason(completion))
        self._behind_prompts += len(ids)

    def add_observation(self, ids: Ids) -> None:
        """Add what an environment answered."""
        if len(ids):
            self._segments.append((SEGMENT_OBSERVED, _ids(ids)))
            self._behind_prompts += len(ids)

    def add_reward(self, reward: float, token_rewards: Sequence[float] | None = None) -> None:
        """Add the reward of the last turn: at its last token, or one per token."""
        place = self._rewards[-1]
        if token_rewards is not None:
            if len(token_rewards) != len(place):
                raise ContractError(
                    f"the environment gave {len(token_rewards)} token_rewards for a turn of {len(place)} tokens",
                    remedy="Give one reward per token of the action, or one reward for the turn",
                )
            place += np.asarray(token_rewards, dtype=np.float64)
        elif len(place):
            place[-1] += reward
        else:
            self._unplaced += reward

    def add_columns(self, numbers: Mapping[str, Sequence[float] | float]) -> None:
        """Add further numbers of the last turn: one per token, or one at its last token, as the table of rollout columns says."""
        rows = {row.name: row for row in list_further_columns()}
        for name, values in numbers.items():
            self._columns.setdefault(name, []).append(_lay_on_turn(rows[name], values, len(self._rewards[-1])))

    def trajectory(self, *, ticket: int, member: int, start_version: int, status: Status = "finished", **facts: Any) -> Trajectory:
        """Return the attempt as it is now; `facts` are fields of `Trajectory` that tokens do not say."""
        kinds = np.array([kind for kind, _ in self._segments], dtype=np.uint8)
        sampled = sum(map(len, self._logprobs))
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        return Trajectory(
            ticket=ticket,
            member=member,
            token_ids=np.concatenate([ids for _, ids in self._segments]),
            kinds=kinds,
            segment_offsets=offsets_of([len(ids) for _, ids in self._segments]),
            logprobs=_concatenate(self._logprobs, np.float32),
            versions=_spans(_concatenate(self._versions, np.int64)),
            rewards=_concatenate(self._rewards, np.float64),
            unplaced_reward=self._unplaced,
            status=status,
            start_version=start_version,
            stops=tuple(self._stops),
            # a turn that was not answered has no numbers: its attempt has failed
            columns={name: values for name, values in columns.items() if sampled and len(values) == sampled},
            **facts,
        )


def stop_reason(completion: Completion) -> str:
    """Name what ended a turn, for counts: "eos", "stop_string", "length", "abort" or "error"."""
    if completion.finish != "stop":
        return completion.finish
    return "stop_string" if isinstance(completion.stop, str) else "eos"


def _lay_on_turn(row: RolloutColumn, values: Sequence[float] | float, tokens: int) -> npt.NDArray[Any]:
    if row.per == "turn" and np.ndim(values) == 0:
        laid = np.zeros(tokens, dtype=row.dtype)
        laid[-1:] = values
        return laid
    if np.shape(values) != (tokens,):
        raise ContractError(
            f"the environment gave the column {row.name} as numbers of the shape {list(np.shape(values))} for a turn of {tokens} tokens",
            remedy="Give one number per token of the action",
        )
    return np.array(values, dtype=row.dtype)


def _ids(values: npt.ArrayLike) -> Ids:
    # copied: a generator may reuse its memory
    ids = np.array(values, dtype=np.int32)
    ids.setflags(write=False)
    return ids


def _concatenate(parts: list[Any], dtype: Any) -> Any:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype, copy=False)


def _spans(versions: npt.NDArray[np.int64]) -> VersionSpans:
    """Return runs of equal versions."""
    first = np.ones(len(versions), dtype=np.bool_)
    first[1:] = versions[1:] != versions[:-1]
    starts = np.flatnonzero(first)
    return VersionSpans(starts.astype(np.int32), versions[starts])
