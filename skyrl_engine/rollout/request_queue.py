"""The requests of a rollout runner: queued, sent to the sampler together, and matched with the completions that come back."""

from collections.abc import Sequence
from typing import Final, Protocol

from attrs import define, field, frozen

from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.rollout.attempt import RunningAttempt
from skyrl_engine.rollout.seeds import derive_seeds
from skyrl_engine.rollout.transcript import Ids
from skyrl_engine.spans import Phases

_POLL_S: Final = 0.5


class CompletionSource(Protocol):
    """Takes requests and gives completions."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None: ...

    def poll(self, timeout: float) -> list[Completion]: ...

    def abort(self, request_ids: Sequence[int] | None = None) -> None: ...

    def end_sessions(self, sessions: Sequence[int]) -> None: ...


@frozen(eq=False)
class _Turn:
    """A turn that is to be requested. `place` are ticket, attempt and turn, from which its seed is made when it is sent."""

    session: int
    request_id: int
    place: tuple[int, int, int]
    prompt_ids: Ids
    sampling: Sampling
    prefix_group: int
    last_turn: bool

    def request(self, seed: int) -> GenerationRequest:
        return GenerationRequest(
            self.request_id,
            self.prompt_ids,
            self.sampling,
            seed,
            session=self.session,
            prefix_group=self.prefix_group,
            last_turn=self.last_turn,
        )


@define(eq=False)
class RequestQueue:
    """Requests on their way to the sampler. Time spent in the sampler counts as `generate` among `phases`.

    Queues that share a sampler number their requests from different `first_number`s on. `seed` is that of the run.
    """

    sampler: CompletionSource
    phases: Phases
    seed: int
    _last_id: int
    _queued: list[_Turn] = field(factory=list, init=False)
    _attempts: dict[int, RunningAttempt] = field(factory=dict, init=False)
    _open_sessions: set[int] = field(factory=set, init=False)
    """Sessions of which a generator may keep something for a further turn."""
    _ended: list[int] = field(factory=list, init=False)

    @property
    def has_queued(self) -> bool:
        """True where requests wait to be sent."""
        return bool(self._queued)

    @property
    def pending(self) -> int:
        """Count outstanding completions, those of queued requests among them."""
        return len(self._attempts)

    def add(
        self,
        attempt: RunningAttempt,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        turn: int,
        session: int,
        prefix_group: int,
        last_turn: bool,
    ) -> None:
        """Queue a request for the attempt's next turn, counted from 1."""
        self._last_id += 1
        if not last_turn:
            self._open_sessions.add(session)
        self._attempts[self._last_id] = attempt
        place = attempt.ticket, attempt.member, turn
        self._queued.append(_Turn(session, self._last_id, place, prompt_ids, sampling, prefix_group, last_turn))

    def end_session(self, session: int) -> None:
        """Note that an attempt has no further turn; `send` or `send_ends` says so to the sampler."""
        if session in self._open_sessions:
            self._open_sessions.discard(session)
            self._ended.append(session)

    def send_ends(self) -> None:
        """Let the sampler free what it keeps of attempts that have ended."""
        if self._ended:
            ended, self._ended = self._ended, []
            self.sampler.end_sessions(sorted(ended))

    def send(self) -> None:
        """Send all queued requests at once, in an order that does not depend on when they were queued, and which attempts have ended."""
        self.send_ends()
        if not self._queued:
            return
        queued, self._queued = sorted(self._queued, key=lambda turn: (turn.session, turn.request_id)), []
        seeds = derive_seeds(self.seed, [turn.place for turn in queued])
        requests = [turn.request(seed) for turn, seed in zip(queued, seeds, strict=True)]
        with self.phases("generate"):
            self.sampler.submit(requests)

    def poll(self, timeout: float) -> list[tuple[RunningAttempt, Completion]]:
        """Return the completions that arrive within `timeout` seconds, each with its attempt."""
        with self.phases("generate"):
            completions = self.sampler.poll(timeout)
        own = [completion for completion in completions if completion.request_id in self._attempts]
        return [(self._attempts.pop(completion.request_id), completion) for completion in own]

    def abort(self) -> None:
        """Drop queued requests, end those that were sent, and wait for their completions, which are forgotten."""
        if self._attempts:
            self.sampler.abort()
            for turn in self._queued:
                self._attempts.pop(turn.request_id, None)
            while self._attempts:
                for completion in self.sampler.poll(_POLL_S):
                    self._attempts.pop(completion.request_id, None)
        self._queued.clear()
        for session in sorted(self._open_sessions):
            self.end_session(session)
        self.send_ends()
