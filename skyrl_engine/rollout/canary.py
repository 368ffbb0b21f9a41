"""A fixed row whose log-probabilities the sampler is asked for after every update: do they come of the weights that it was given?

While groups are older than the weights that are trained, their own log-probabilities cannot tell: the policy has moved since. The row's are
compared with what the trained model said of it when the weights were gathered, and with what earlier weights said. Tokens that are sampled
after its beginning are compared with what the sampler says of them as a prompt: kept keys and values of earlier weights show in what is
sampled alone.
"""

import time
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt
from attrs import define, field

from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.request_queue import CompletionSource

FIRST_NUMBER: Final = 2**41
"""Requests of canaries are numbered from here on."""

LONGEST: Final = 160
"""Tokens of the row: servers keep keys and values by blocks of up to 128."""

_SAMPLED: Final = 4
"""Tokens that are sampled after the row's beginning; these places at its end are left free for them."""

_NEARER: Final = 4.0
"""An earlier version so many times nearer than the present one is the one that the sampler holds."""

_NOISE: Final = 0.01
"""The share of the limit below which distances are rounding."""

_EXACT: Final = 1e-5
"""A distance in nats, the rounding of float32, up to which log-probabilities are those of a version whatever the limit is."""

_REMEDY: Final = "Check how the generator takes weights; if the distance is its precision, raise rl.max_gap"

_EARLIER: Final = 8
_PATIENCE_S: Final = 120.0


@define(eq=False)
class Canary:
    """Compares the log-probabilities of `row` int32[n], n >= 2, in nats, with those of the trained model; `limit` is a mean distance."""

    row: npt.NDArray[np.int32]
    sampler: CompletionSource
    limit: float
    _expected: dict[int, npt.NDArray[np.float32]] = field(factory=dict, init=False)
    """By version that was gathered: float32[n - 1]."""
    _earlier: "deque[tuple[int, npt.NDArray[np.float32]]]" = field(factory=lambda: deque(maxlen=_EARLIER), init=False)
    _asked: int = field(default=0, init=False)

    def expect(self, version: int, logprobs: npt.NDArray[np.float32]) -> None:
        """Take what the model of `version` says of the row's tokens after the first, float32[n - 1]."""
        self._expected[version] = logprobs

    def look(self, version: int) -> None:
        """Ask the sampler, which should hold `version`. Raises RolloutError where it holds something else."""
        found = self._ask_prompt(version, self.row)
        expected = self._expected.pop(version)
        for old in [old for old in self._expected if old < version]:
            self._earlier.append((old, self._expected.pop(old)))
        distance = _mean_distance(found, expected)
        earlier = [(_mean_distance(found, logprobs), old) for old, logprobs in self._earlier]
        self._earlier.append((version, expected))
        nearest = min(earlier, default=None)
        is_other = (
            nearest is not None
            and nearest[0] * _NEARER < distance
            and (distance > self.limit * _NOISE or nearest[0] <= _EXACT < distance)
        )
        # not >: a distance that is no number is too large
        if is_other or not distance <= self.limit:
            cause = (
                f"after the update to version {version} the sampler's log-probabilities of a fixed prompt differ from the model's by "
                f"{distance:.3g} nats per token"
            )
            if is_other:
                assert nearest is not None, "that is what it is nearer to"
                cause += f", and by {nearest[0]:.3g} from those of version {nearest[1]}: the update has not reached it"
            else:
                cause += f", above {self.limit:g}"
            raise RolloutError(cause, remedy=_REMEDY)
        self._compare_sampled(version)

    def _compare_sampled(self, version: int) -> None:
        """Raise RolloutError where tokens are sampled from others than the distribution that the sampler tells of a prompt."""
        count = min(_SAMPLED, len(self.row) - 1)
        beginning = self.row[: len(self.row) - count]
        sampled = self._ask(version, beginning, Sampling(max_tokens=count, ignore_eos=True), prompt_logprobs=False)
        told = self._ask_prompt(version, np.concatenate([beginning, sampled.token_ids]))[len(beginning) - 1 :]
        distance = _mean_distance(sampled.logprobs, told)
        if not distance <= self.limit:
            raise RolloutError(
                f"after the update to version {version} the sampler's log-probabilities of tokens that it samples differ from those that it "
                f"tells of the same tokens in a prompt by {distance:.3g} nats per token, above {self.limit:g}: it may have kept keys and "
                "values of earlier weights",
                remedy=_REMEDY,
            )

    def _ask_prompt(self, version: int, row: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Return the log-probabilities float32[n - 1] of a row's tokens after the first."""
        answer = self._ask(version, row, Sampling(max_tokens=1), prompt_logprobs=True)
        if answer.prompt_logprobs is None:
            raise RolloutError(
                f"the sampler gave no log-probabilities of a prompt: {answer.error or answer.finish}",
                remedy="See the logs of the generator",
            )
        return answer.prompt_logprobs[1:]

    def _ask(self, version: int, row: npt.NDArray[np.int32], sampling: Sampling, *, prompt_logprobs: bool) -> Completion:
        number = FIRST_NUMBER + self._asked
        self._asked += 1
        self.sampler.submit(
            [GenerationRequest(number, row, sampling, seed=number, session=number, prompt_logprobs=prompt_logprobs, last_turn=True)]
        )
        until = time.monotonic() + _PATIENCE_S
        answers: list[Completion] = []
        while not answers:
            if time.monotonic() > until:
                raise RolloutError(
                    f"the sampler has not answered a prompt of {len(self.row)} tokens for {_PATIENCE_S:g} s after the update to version "
                    f"{version}",
                    remedy="See the logs of the generator",
                )
            answers = self.sampler.poll(1.0)
        (answer,) = answers
        return answer


def _mean_distance(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    if len(found) != len(expected):
        return float("inf")
    return float(np.abs(found.astype(np.float64) - expected).mean())
