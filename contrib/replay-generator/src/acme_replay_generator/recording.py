"""Recorded completions, found by the tokens that stood in front of the model."""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from skyrl_engine import DataError, read_rollouts
from skyrl_engine.contracts import SEGMENT_PROMPT, SEGMENT_SAMPLED, Group, Trajectory

Turns = Mapping[int, "RecordedTurn"]
"""Turns after one prompt, by the number of their attempt."""


@frozen(eq=False)
class RecordedTurn:
    """A turn of n tokens as it was sampled: `token_ids` int32[n], `logprobs` float32[n], `versions` int64[n].

    `stop` says what ended it: "eos", "stop_string" or "length".
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    stop: str


@frozen(eq=False)
class Recording:
    """The turns of a recording by the tokens that stood before them."""

    place: Path
    _behind: Mapping[bytes, Turns] = field(repr=False)

    @classmethod
    def read(cls, place: Path) -> "Recording":
        """Read a run directory or an exported file. Raises RolloutError where there is none, DataError for one without log-probabilities."""
        turns_by_prompt: dict[bytes, dict[int, RecordedTurn]] = {}
        for group in read_rollouts(place):
            for attempt in group.trajectories:
                _refuse_unscored(place, group, attempt)
                for prompt, turn in turns_of(attempt):
                    turns_by_prompt.setdefault(_name(prompt), {})[number_of(group, attempt)] = turn
        return cls(place, turns_by_prompt)

    def turn(self, prompt_ids: npt.NDArray[np.int32], session: int) -> RecordedTurn | None:
        """Return the turn that followed these tokens, None where none did.

        Where several attempts went on from them, it is that of the attempt whose number the session is, else one that the session chooses. So
        it depends on these two alone, and not on what was asked for before.
        """
        turns = self._behind.get(_name(prompt_ids))
        if turns is None:
            return None
        return turns.get(session) or list(turns.values())[session % len(turns)]


def turns_of(attempt: Trajectory) -> Iterator[tuple[npt.NDArray[np.int32], RecordedTurn]]:
    """Yield the turns of an attempt, each with the tokens int32[P] of the prompt before it.

    These begin at the last prompt before the turn: where the history was rewritten, what was there earlier had gone.
    """
    stretch, sampled, number = 0, 0, 0
    versions = attempt.versions.per_token(len(attempt.logprobs))
    for kind, (begin, end) in zip(attempt.kinds.tolist(), pairwise(attempt.segment_offsets.tolist()), strict=True):
        if kind == SEGMENT_PROMPT:
            stretch = begin
        elif kind == SEGMENT_SAMPLED:
            own = slice(sampled, sampled + end - begin)
            turn = RecordedTurn(attempt.token_ids[begin:end], attempt.logprobs[own], versions[own], _stop(attempt, number))
            yield attempt.token_ids[stretch:begin], turn
            sampled, number = own.stop, number + 1


def number_of(group: Group, attempt: Trajectory) -> int:
    """Return the number that a run by reinforcement gives the session of an attempt."""
    return group.ticket * len(group.trajectories) + attempt.member


def _stop(attempt: Trajectory, turn: int) -> str:
    """Say what ended a turn; files of other programs do not tell, and there the end of the attempt does."""
    if turn < len(attempt.stops):
        return attempt.stops[turn]
    return "length" if attempt.status == "truncated" and turn + 1 == attempt.turns else "eos"


def _refuse_unscored(place: Path, group: Group, attempt: Trajectory) -> None:
    if not np.isfinite(attempt.logprobs).all():
        raise DataError(
            f"{place} has no log-probabilities of attempt {attempt.member} at task {group.task_key!r} (group {group.ticket})",
            remedy="Replay a run directory, an export of one, or a file with `logprobs`",
        )


def _name(prompt_ids: npt.NDArray[Any]) -> bytes:
    return blake2b(prompt_ids.astype("<i4").tobytes(), digest_size=16).digest()
