"""The generator `replay`: answers at once with the tokens that were sampled after the same prompt in the recording."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import evolve

from acme_replay_generator.recording import RecordedTurn, Recording
from skyrl_engine import ContractError, UnsupportedError
from skyrl_engine.contracts import POLICY, Completion, GenerationRequest, GeneratorStart, VersionSpans, WeightSource


class ReplayGenerator:
    """`contracts.Generator`. It draws nothing and takes no weights; of an update it learns the version."""

    def __init__(self, rollouts: str) -> None:
        self._place = Path(rollouts).expanduser()
        self._ready: list[Completion] = []

    def start(self, start: GeneratorStart) -> None:
        """Read the recording. Raises RolloutError where there is none, DataError for one that cannot be replayed."""
        self._recording, self._version = Recording.read(self._place), start.version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Look up requests. Raises ContractError for a prompt without tokens, UnsupportedError for weights other than the policy's."""
        for request in requests:
            if request.prompt_ids.ndim != 1 or not len(request.prompt_ids):
                raise ContractError(f"request {request.request_id} has no prompt", remedy="Give at least one token to begin with")
            if request.target != POLICY:
                raise UnsupportedError(
                    f"request {request.request_id} asks for the weights {request.target!r}, and the policy's tokens were recorded",
                    remedy="Sample from other weights with another generator",
                )
        self._ready += [self._answer(request) for request in requests]

    def poll(self, timeout: float) -> list[Completion]:  # noqa: ARG002 nothing is waited for
        """Return everything that was asked for: nothing is ever under way."""
        ready, self._ready = self._ready, []
        return ready

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """Say of answers that nobody has polled yet that they were ended."""
        self._ready = [
            evolve(each, finish="abort", stop=None) if request_ids is None or each.request_id in request_ids else each
            for each in self._ready
        ]

    def update(self, weights: WeightSource, version: int, target: str = POLICY) -> None:  # noqa: ARG002 none are needed
        """Take note of the version."""
        if target == POLICY:
            self._version = version

    def release(self, target: str) -> None:
        """Do nothing: there are no weights."""

    def close(self) -> None:
        """Forget what nobody polled."""
        self._ready.clear()

    def _answer(self, request: GenerationRequest) -> Completion:
        turn = self._recording.turn(request.prompt_ids, request.session)
        if turn is None:
            cause = (
                f"{self._recording.place} holds nothing that was sampled after this prompt: tasks, run.seed, the chat template, or what the "
                "environment answers are others than when it was recorded"
            )
            nothing = np.zeros(0, dtype=np.int32)
            return Completion(request.request_id, nothing, nothing.astype(np.float32), VersionSpans.one(0, 0), "error", error=cause)
        return _completion(request, turn, self._version)


def _completion(request: GenerationRequest, turn: RecordedTurn, version: int) -> Completion:
    """Return a turn as an answer, cut where the request wants fewer tokens."""
    most = request.sampling.max_tokens
    stopped = turn.stop != "length" and len(turn.token_ids) <= most
    stop: int | str | None = None
    if stopped and turn.stop == "stop_string":
        # which of them it was is not recorded
        stop = next(iter(request.sampling.stop_strings), "")
    elif stopped:
        stop = int(turn.token_ids[-1])
    return Completion(
        request.request_id,
        turn.token_ids[:most],
        turn.logprobs[:most],
        # no token is of weights that are still to come, which a run that goes on would not count
        spans_of(np.minimum(turn.versions[:most], version)),
        "stop" if stopped else "length",
        stop,
    )


def spans_of(versions: npt.NDArray[np.int64]) -> VersionSpans:
    """Return int64[n] versions that rise as runs of equal ones."""
    starts = np.flatnonzero(np.diff(versions, prepend=-1))
    return VersionSpans(starts.astype(np.int32), versions[starts])
