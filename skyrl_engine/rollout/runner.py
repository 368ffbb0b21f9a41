"""Attempts at tasks, from a ticket to a finished group: prompts to the sampler, turns to the environment, until every attempt has ended."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
from attrs import define, evolve, field, frozen

from skyrl_engine.contracts.kinds.environment import Action, EnvironmentClaims, Message, StepResult, Task
from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.contracts.values.rollout import Group, Status, Trajectory
from skyrl_engine.errors import DataError, RolloutError
from skyrl_engine.rollout.env_pool import EpisodeReply
from skyrl_engine.rollout.transcript import Ids, Transcript
from skyrl_engine.spans import Phases

logger = logging.getLogger(__name__)

FAILURES_OF: Final = 200
"""Attempts among which failures are counted."""

_ALL_OF: Final = 8
"""So many attempts, none of which has succeeded in ending, are enough to stop a run that begins; or a whole group, where that is larger."""

_KINDS_WARNED_OF: Final = 5
_IDLE_S: Final = 0.5
_SOON_S: Final = 0.02
_QUICK_S: Final = 0.005
_COMMON: Final = 3
_A_TASK: Final = "\0"
"""Stands for the task in the text of a failure."""


class CompletionSource(Protocol):
    """Takes requests and gives completions."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None: ...

    def poll(self, timeout: float) -> list[Completion]: ...

    def abort(self, request_ids: Sequence[int] | None = None) -> None: ...


class Episodes(Protocol):
    """Runs environments; `EpisodePool` is one."""

    @property
    def pending(self) -> int: ...

    def open(self, episode: int, environment: int, task: Task, seed: int) -> None: ...

    def step(self, episode: int, action: Action) -> None: ...

    def close(self, episode: int) -> None: ...

    def poll(self, timeout: float) -> list[EpisodeReply]: ...


class Turns(Protocol):
    """Renders messages as tokens, and reads a turn from tokens."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Ids: ...

    def suffix(self, messages: Sequence[Message], last_token: int | None, tools: Sequence[Mapping[str, Any]] = ()) -> Ids: ...

    def action(self, completion: Completion, turn: int, tools: Sequence[Mapping[str, Any]] = ()) -> Action: ...

    def reply(self, action: Action, tools: Sequence[Mapping[str, Any]] = ()) -> Message: ...


@frozen
class RolloutLimits:
    """The limits of every attempt. `keeps_history` appends to what stands there; otherwise later prompts are rendered anew.

    `all_may_fail` goes on where all of the first attempts failed.
    """

    group_size: int
    max_prompt_tokens: int
    max_tokens: int
    min_group_size: int = 1
    max_failure_share: float = 1.0
    all_may_fail: bool = False
    keeps_history: bool = True

    @property
    def longest(self) -> int:
        """Count the tokens that may stand in front of the model, the sampled ones among them."""
        return self.max_prompt_tokens + self.max_tokens


@define(eq=False)
class _Attempt:
    ticket: int
    member: int
    number: int
    environment: int
    task: Task
    version: int
    messages: list[Message]
    transcript: Transcript | None = None
    sampling: Mapping[str, Any] = field(factory=dict)
    last: Completion | None = None
    tool_problems: int = 0
    success: bool | None = None
    parts: dict[str, float] = field(factory=dict)
    metrics: dict[str, float] = field(factory=dict)
    info: dict[str, Any] = field(factory=dict)
    seconds: dict[str, float] = field(factory=dict)
    since: float = 0.0

    def spend(self, phase: str) -> None:
        """Count the time since the last call as spent in `phase`."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.since
        self.since = now


@define(eq=False)
class _Running:
    environment: int
    task: Task
    version: int
    ended: dict[int, Trajectory] = field(factory=dict)


@define(eq=False)
class RolloutRunner:
    """Runs the attempts of groups side by side. `start` begins a group, `advance` brings groups that have ended.

    What is sampled depends on `seed`, the ticket, the attempt's number in its group and the turn, and on nothing else. `names` and `claims` are
    those of the environments, in their order; `sampling` holds for every turn, within `bounds`. Runners that share a sampler or environments
    number their attempts from different `first_number`s on. Time that goes by in the sampler counts as `generate` among `phases`, time that
    environments are waited for as `environment`.
    """

    sampler: CompletionSource
    episodes: Episodes
    turns: Turns
    names: Sequence[str]
    claims: Sequence[EnvironmentClaims]
    sampling: Sampling
    bounds: RolloutLimits
    seed: int
    first_number: int = 0
    phases: Phases = field(factory=Phases)
    _running: dict[int, _Running] = field(factory=dict, init=False)
    _attempts: dict[int, _Attempt] = field(factory=dict, init=False)
    _requests: dict[int, _Attempt] = field(factory=dict, init=False)
    _to_send: list[GenerationRequest] = field(factory=list, init=False)
    _numbers: int = field(init=False)
    _request_ids: int = field(init=False)
    _warned_of: set[str] = field(factory=set, init=False)
    _failed_answering: int = field(default=0, init=False)
    _failed: deque[tuple[str, str] | None] = field(factory=lambda: deque(maxlen=FAILURES_OF), init=False)

    @_numbers.default
    @_request_ids.default
    def _first(self) -> int:
        return self.first_number

    @property
    def running(self) -> int:
        """Count the groups under way."""
        return len(self._running)

    def start(self, ticket: int, environment: int, task: Task, version: int) -> None:
        """Begin the attempts at a task, with weights of `version`."""
        self._running[ticket] = _Running(environment, task, version)
        for member in range(self.bounds.group_size):
            self._numbers += 1
            attempt = _Attempt(ticket, member, self._numbers, environment, task, version, list(task.messages))
            attempt.since = time.monotonic()
            self._attempts[attempt.number] = attempt
            with self.phases("environment"):
                self.episodes.open(attempt.number, environment, task, self._seed(ticket, member))

    def advance(self, timeout: float) -> list[Group]:
        """Go on for about `timeout` seconds, or until a group has ended. Raises RolloutError where too many attempts fail."""
        ended: list[Group] = []
        until = time.monotonic() + timeout
        while self._running and not ended:
            waiting = max(0.0, until - time.monotonic())
            # sampling many requests at once costs little more than sampling one: quick answers are all waited for
            while replies := self._replies(_QUICK_S if self._to_send else 0.0 if self._requests else min(waiting, _IDLE_S)):
                for reply in replies:
                    ended += self._on_reply(reply)
                if not self.episodes.pending:
                    break
            self._send()
            if self._requests:
                # an answer that is still owed shall not wait for long: its attempt would be sampled alone behind the others
                for completion in self._completions(min(waiting, _SOON_S if self.episodes.pending else _IDLE_S)):
                    ended += self._on_completion(completion)
            if time.monotonic() >= until:
                break
        return ended

    def stop(self) -> None:
        """Give up all groups under way: their attempts are forgotten."""
        if self._requests:
            self.sampler.abort()
            while self._requests:
                for completion in self.sampler.poll(_IDLE_S):
                    self._requests.pop(completion.request_id, None)
        for number in self._attempts:
            self.episodes.close(number)
        self._attempts.clear()
        self._running.clear()
        self._to_send.clear()

    def _replies(self, timeout: float) -> list[EpisodeReply]:
        with self.phases("environment"):
            return self.episodes.poll(timeout)

    def _completions(self, timeout: float) -> list[Completion]:
        with self.phases("generate"):
            return self.sampler.poll(timeout)

    def _seed(self, *place: int) -> int:
        return int(np.random.SeedSequence([self.seed, *place]).generate_state(1, np.uint64)[0])

    def _on_reply(self, reply: EpisodeReply) -> list[Group]:
        attempt = self._attempts.get(reply.episode)
        if attempt is None:
            return []
        attempt.spend("environment")
        if reply.failure is not None:
            return self._end(attempt, "failed", reply.failure)
        if reply.messages is not None:
            attempt.messages += reply.messages
            try:
                attempt.transcript = Transcript(self._first_prompt(attempt))
            except DataError as error:
                # of what planning did not see: tasks further on, and what this episode begins with
                return self._end(attempt, "failed", error.cause)
            return self._ask(attempt)
        assert reply.result is not None, "an answer is one of three"
        return self._on_step_result(attempt, reply.result)

    def _first_prompt(self, attempt: _Attempt) -> Ids:
        task = attempt.task
        ids = np.asarray(task.prompt_ids, dtype=np.int32) if task.prompt_ids else self.turns.prompt(attempt.messages, task.tools)
        if len(ids) > self.bounds.max_prompt_tokens:
            raise DataError(
                f"task {task.key!r} of environment {self.names[attempt.environment]} has a prompt of {len(ids):,} tokens, and "
                f"rl.max_prompt_tokens is {self.bounds.max_prompt_tokens:,}",
                remedy="Raise rl.max_prompt_tokens, or leave such tasks out",
            )
        return ids

    def _ask(self, attempt: _Attempt) -> list[Group]:
        """Ask the sampler for the attempt's next turn, for which some room is left."""
        transcript = attempt.transcript
        assert transcript is not None, "a prompt comes first"
        prompt_ids = transcript.prompt_ids
        # a history that was rendered anew may leave less room than the attempt has tokens
        room = min(transcript.room(self.bounds.max_tokens), self.bounds.longest - len(prompt_ids))
        given = attempt.sampling
        sampling = evolve(
            self.sampling,
            max_tokens=min(room, int(given.get("max_tokens", room))),
            stop_strings=tuple(given.get("stop_strings", self.sampling.stop_strings)),
        )
        self._request_ids += 1
        session = attempt.ticket * self.bounds.group_size + attempt.member
        request = GenerationRequest(
            self._request_ids,
            prompt_ids,
            sampling,
            self._seed(attempt.ticket, attempt.member, transcript.turns + 1),
            session=session,
            prefix_group=attempt.ticket if transcript.turns == 0 else None,
        )
        self._requests[request.request_id] = attempt
        self._to_send.append(request)
        return []

    def _send(self) -> None:
        if self._to_send:
            requests, self._to_send = sorted(self._to_send, key=lambda each: (each.session, each.request_id)), []
            with self.phases("generate"):
                self.sampler.submit(requests)

    def _on_completion(self, completion: Completion) -> list[Group]:
        attempt = self._requests.pop(completion.request_id, None)
        if attempt is None or attempt.number not in self._attempts:
            return []
        attempt.spend("generate")
        transcript = attempt.transcript
        assert transcript is not None, "a prompt comes first"
        if completion.finish in ("error", "abort") or not len(completion.token_ids):
            return self._end(attempt, "failed", f"the generator gave up: {completion.error or completion.finish}")
        transcript.add_completion(completion)
        attempt.last = completion
        action = self.turns.action(completion, transcript.turns - 1, attempt.task.tools)
        attempt.tool_problems += action.tool_problem is not None
        attempt.messages.append(self.turns.reply(action, attempt.task.tools))
        with self.phases("environment"):
            self.episodes.step(attempt.number, action)
        return []

    def _on_step_result(self, attempt: _Attempt, result: StepResult) -> list[Group]:
        transcript, last = attempt.transcript, attempt.last
        assert transcript is not None, "a turn comes first"
        assert last is not None, "a turn comes first"
        transcript.add_reward(result.reward, result.token_rewards)
        for kept, given in ((attempt.parts, result.parts), (attempt.metrics, result.metrics)):
            for name, value in given.items():
                kept[name] = kept.get(name, 0.0) + value
        attempt.info |= result.info
        attempt.sampling = result.sampling
        if result.success is not None:
            attempt.success = result.success
        # a turn that the environment itself had cut short is followed by others
        full = transcript.room(self.bounds.max_tokens) < 1
        if result.done:
            return self._end(attempt, "truncated" if last.finish == "length" and full else "finished")
        if full or transcript.turns >= self.claims[attempt.environment].max_turns:
            return self._end(attempt, "truncated")
        attempt.messages += result.messages
        try:
            fits = self._observe(attempt, transcript, result.messages, int(last.token_ids[-1]))
        except DataError as error:
            # what this environment answered to this turn
            return self._end(attempt, "failed", error.cause)
        return self._ask(attempt) if fits else self._end(attempt, "truncated")

    def _observe(self, attempt: _Attempt, transcript: Transcript, messages: Sequence[Message], last: int) -> bool:
        """Put what the environment answered in front of the model: nothing, and False, where that would leave no token to sample."""
        room = transcript.room(self.bounds.max_tokens)
        if self.bounds.keeps_history:
            added = self.turns.suffix(messages, last, attempt.task.tools)
            if len(added) < room:
                transcript.add_observation(added)
            return len(added) < room
        prompt_ids = self.turns.prompt(attempt.messages, attempt.task.tools)
        more = transcript.behind(prompt_ids)
        fits = len(prompt_ids) < self.bounds.longest if more is None else len(more) < room
        if fits:
            transcript.restart(prompt_ids)
        return fits

    def _end(self, attempt: _Attempt, status: Status, cause: str | None = None) -> list[Group]:
        del self._attempts[attempt.number]
        self.episodes.close(attempt.number)
        transcript = attempt.transcript or Transcript(np.zeros(0, dtype=np.int32))
        success = attempt.success
        made = transcript.trajectory(
            ticket=attempt.ticket,
            member=attempt.member,
            start_version=attempt.version,
            status=status,
            cause=cause,
            tool_problems=attempt.tool_problems,
            parts=attempt.parts,
            metrics=attempt.metrics,
            info=attempt.info,
            seconds=attempt.seconds,
        )
        if success is None and status != "failed":
            success = self.claims[attempt.environment].succeeds(made.reward)
        self._failed_answering += status == "failed" and transcript.turns > 0
        self._count(cause, f"task {attempt.task.key!r}")
        running = self._running[attempt.ticket]
        running.ended[attempt.member] = evolve(made, success=success)
        if len(running.ended) < self.bounds.group_size:
            return []
        del self._running[attempt.ticket]
        trajectories = tuple(running.ended[member] for member in range(self.bounds.group_size))
        group = Group(attempt.ticket, self.names[running.environment], running.task.key, running.version, trajectories)
        few = len(group.finished) < min(self.bounds.min_group_size, self.bounds.group_size)
        return [evolve(group, dropped="failed") if few else group]

    def _count(self, cause: str | None, task: str) -> None:
        """Count failures, and warn of the first of a kind. Raises RolloutError, with the commonest causes, where too many of the last failed,
        or where all did since the run began.
        """
        # one mistake fails attempts at many tasks: it is one cause
        kind = None if cause is None else cause.replace(task, _A_TASK)
        self._failed.append(None if kind is None else (kind, task))
        if kind is None:
            return
        first = kind not in self._warned_of and len(self._warned_of) < _KINDS_WARNED_OF
        self._warned_of |= {kind} if first else set()
        logger.log(logging.WARNING if first else logging.INFO, "an attempt failed: %s", cause)
        failures = [each for each in self._failed if each is not None]
        share = self.bounds.max_failure_share
        least = max(_ALL_OF, self.bounds.group_size)
        # an attempt that cannot begin fails before others answer: of those that end first all may fail
        known = self._failed_answering >= least or next(iter(self._attempts), math.inf) > self.first_number + least
        every = not self.bounds.all_may_fail and known and len(failures) == len(self._failed) >= least
        if not every and len(failures) <= share * FAILURES_OF:
            return
        tasks: dict[str, dict[str, None]] = {}
        for said, name in failures:
            tasks.setdefault(said, {})[name] = None
        common = Counter(said for said, _ in failures).most_common(_COMMON)
        names = {said: next(iter(own)) + (" and others" if len(own) > 1 else "") for said, own in tasks.items()}
        allowed = f"rollouts.max_failure_share is {share:g} of {FAILURES_OF}"
        raise RolloutError(
            f"all of the first {len(failures)} attempts failed"
            if every
            else f"{len(failures)} of the last {len(self._failed)} attempts failed, and {allowed}",
            remedy=f"Correct the environment, or raise rollouts.timeout_s or rollouts.max_failure_share{' to 1' if every else ''}",
            details=[f"{count} x {said.replace(_A_TASK, names[said])}" for said, count in common],
        )
