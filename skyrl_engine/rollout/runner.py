"""The rollout runner: it sends prompts to the sampler and turns to the environments until every attempt of every group has ended."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
from attrs import define, evolve, field

from skyrl_engine.contracts.kinds.environment import Action, EndedAttempt, EnvironmentClaims, Message, StepResult, Task
from skyrl_engine.contracts.kinds.generator import Completion, Sampling
from skyrl_engine.contracts.values.rollout import Group, Status, Trajectory
from skyrl_engine.errors import DataError
from skyrl_engine.rollout.attempt import RolloutLimits, RunningAttempt
from skyrl_engine.rollout.env_pool import EpisodeReply
from skyrl_engine.rollout.failure_monitor import GAVE_UP, FailureMonitor
from skyrl_engine.rollout.request_queue import CompletionSource, RequestQueue
from skyrl_engine.rollout.seeds import derive_seeds
from skyrl_engine.rollout.transcript import Ids, Transcript
from skyrl_engine.spans import Phases

_IDLE_S: Final = 0.5
_SOON_S: Final = 0.02
_QUICK_S: Final = 0.005


class Episodes(Protocol):
    """Runs environments; `EpisodePool` is one."""

    @property
    def pending(self) -> int: ...

    def open(self, episode: int, environment: int, task: Task, seed: int) -> None: ...

    def compare(self, episode: int, environment: int, task: Task, attempts: Sequence[EndedAttempt]) -> None: ...

    def step(self, episode: int, action: Action) -> None: ...

    def close(self, episode: int) -> None: ...

    def poll(self, timeout: float) -> list[EpisodeReply]: ...


class Turns(Protocol):
    """Renders messages as tokens, and reads a turn from tokens."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Ids: ...

    def suffix(self, messages: Sequence[Message], last_token: int | None, tools: Sequence[Mapping[str, Any]] = ()) -> Ids: ...

    def action(self, completion: Completion, turn: int, tools: Sequence[Mapping[str, Any]] = ()) -> Action: ...

    def reply(self, action: Action, tools: Sequence[Mapping[str, Any]] = ()) -> Message: ...


@define(eq=False)
class _RunningGroup:
    environment: int
    task: Task
    version: int
    ended: dict[int, Trajectory] = field(factory=dict)
    said: dict[int, EndedAttempt] = field(factory=dict)
    """By member, what an environment that compares sees."""


@define(eq=False)
class RolloutRunner:
    """Runs the attempts of groups side by side. `start` begins a group, `advance` returns groups that have ended.

    What is sampled depends on `seed`, the ticket, the attempt's number in its group and the turn, and on nothing else. `names` and `claims` are
    those of the environments, in their order; `sampling` holds for every turn, within `limits`. Runners that share a sampler or environments
    number their attempts from different `first_number`s on. Time in the sampler counts as `generate` among `phases`, time that environments
    are waited for as `environment`.
    """

    sampler: CompletionSource
    episodes: Episodes
    turns: Turns
    names: Sequence[str]
    claims: Sequence[EnvironmentClaims]
    sampling: Sampling
    limits: RolloutLimits
    seed: int
    first_number: int = 0
    phases: Phases = field(factory=Phases)
    _running: dict[int, _RunningGroup] = field(factory=dict, init=False)
    _attempts: dict[int, RunningAttempt] = field(factory=dict, init=False)
    """By number, in the order in which they began."""
    _comparisons: dict[int, int] = field(factory=dict, init=False)
    """Tickets of the groups that their environment compares now, by the number of the call."""
    _last_number: int = field(init=False)
    _requests: RequestQueue = field(init=False)
    _failures: FailureMonitor = field(init=False)
    _samplings: dict[tuple[int, tuple[str, ...]], Sampling] = field(factory=dict, init=False)
    """By most tokens and stop strings."""
    _ended: deque[Group] = field(factory=deque, init=False)
    """Groups that ended and that `advance` has not returned yet."""

    @_last_number.default
    def _number_from(self) -> int:
        return self.first_number

    @_requests.default
    def _open_queue(self) -> RequestQueue:
        return RequestQueue(self.sampler, self.phases, self.seed, self.first_number)

    @_failures.default
    def _open_monitor(self) -> FailureMonitor:
        return FailureMonitor(self.limits.max_failure_share, self.limits.group_size, self.limits.all_may_fail)

    @property
    def running(self) -> int:
        """Number of groups under way."""
        return len(self._running)

    @property
    def at_generator(self) -> int:
        """Number of attempts that wait for the sampler."""
        return self._requests.pending

    @property
    def at_environment(self) -> int:
        """Number of attempts that wait for their environment."""
        return len(self._attempts) - self._requests.pending

    def start(self, ticket: int, environment: int, task: Task, version: int) -> None:
        """Begin the attempts at a task, with weights of `version`."""
        self._running[ticket] = _RunningGroup(environment, task, version)
        seeds = derive_seeds(self.seed, [(ticket, member) for member in range(self.limits.group_size)])
        with self.phases("environment"):
            for member, seed in enumerate(seeds):
                self._last_number += 1
                attempt = RunningAttempt(ticket, member, self._last_number, environment, task, version, list(task.messages))
                attempt.since = time.monotonic()
                self._attempts[attempt.number] = attempt
                self.episodes.open(attempt.number, environment, task, seed)

    def advance(self, timeout: float) -> list[Group]:
        """Run for about `timeout` seconds, or until a group has ended. Raises RolloutError where too many attempts fail."""
        until = time.monotonic() + timeout
        while self._running and not self._ended:
            waiting = max(0.0, until - time.monotonic())
            self._take_replies(waiting)
            self._requests.send()
            if self._requests.pending:
                # replies still pending: poll briefly, or their attempts would be sampled alone after the others
                actions: dict[int, Action] = {}
                for attempt, completion in self._requests.poll(min(waiting, _SOON_S if self.episodes.pending else _IDLE_S)):
                    if (action := self._on_completion(attempt, completion)) is not None:
                        actions[attempt.number] = action
                with self.phases("environment"):
                    for number, action in actions.items():
                        self.episodes.step(number, action)
            if time.monotonic() >= until:
                break
        # what follows may want the memory
        self._requests.send_ends()
        groups = list(self._ended)
        self._ended.clear()
        return groups

    def stop(self) -> None:
        """Give up all groups under way: their attempts are forgotten."""
        self._requests.abort()
        for number in (*self._attempts, *self._comparisons):
            self.episodes.close(number)
        self._attempts.clear()
        self._comparisons.clear()
        self._running.clear()
        self._ended.clear()

    def _take_replies(self, waiting: float) -> None:
        """Handle the environments' replies. All that come quickly are awaited: sampling many requests costs little more than sampling one."""
        while replies := self._poll_replies(
            _QUICK_S if self._requests.has_queued else 0.0 if self._requests.pending else min(waiting, _IDLE_S)
        ):
            for reply in replies:
                self._on_reply(reply)
            if not self.episodes.pending:
                break

    def _poll_replies(self, timeout: float) -> list[EpisodeReply]:
        with self.phases("environment"):
            return self.episodes.poll(timeout)

    def _session(self, attempt: RunningAttempt) -> int:
        return self.first_number + attempt.ticket * self.limits.group_size + attempt.member

    def _on_reply(self, reply: EpisodeReply) -> None:
        if reply.episode in self._comparisons:
            self._on_comparison(reply)
            return
        attempt = self._attempts.get(reply.episode)
        if attempt is None:
            return
        attempt.spend("environment")
        if reply.failure is not None:
            self._end(attempt, "failed", reply.failure)
        elif reply.messages is not None:
            attempt.messages += reply.messages
            try:
                attempt.transcript = Transcript(self._first_prompt(attempt))
            except DataError as error:
                # planning checks the first tasks alone, and not what an episode begins with
                self._end(attempt, "failed", error.cause)
            else:
                self._request_turn(attempt)
        else:
            assert reply.result is not None, "a reply is one of three"
            self._on_step_result(attempt, reply.result)

    def _first_prompt(self, attempt: RunningAttempt) -> Ids:
        task = attempt.task
        ids = np.asarray(task.prompt_ids, dtype=np.int32) if task.prompt_ids else self.turns.prompt(attempt.messages, task.tools)
        if len(ids) > self.limits.max_prompt_tokens:
            raise DataError(
                f"task {task.key!r} of environment {self.names[attempt.environment]} has a prompt of {len(ids):,} tokens, and "
                f"rl.max_prompt_tokens is {self.limits.max_prompt_tokens:,}",
                remedy="Raise rl.max_prompt_tokens, or leave such tasks out",
            )
        return ids

    def _request_turn(self, attempt: RunningAttempt) -> None:
        """Request the attempt's next turn; there is room for at least one token."""
        transcript = attempt.transcript
        assert transcript is not None, "a prompt comes first"
        prompt_ids = transcript.prompt_ids
        # a history that was rendered again may leave less room than the attempt has tokens
        room = min(transcript.room(self.limits.max_tokens), self.limits.longest - len(prompt_ids))
        chosen = attempt.sampling
        self._requests.add(
            attempt,
            prompt_ids,
            self._sampling(
                min(room, int(chosen.get("max_tokens", room))), tuple(chosen.get("stop_strings", self.sampling.stop_strings))
            ),
            turn=transcript.turns + 1,
            session=self._session(attempt),
            prefix_group=self.first_number + attempt.ticket,
            last_turn=transcript.turns + 1 >= self.claims[attempt.environment].max_turns,
        )

    def _sampling(self, max_tokens: int, stop_strings: tuple[str, ...]) -> Sampling:
        """Return how a turn is sampled; the many turns that are sampled alike share one."""
        key = max_tokens, stop_strings
        if key not in self._samplings:
            self._samplings[key] = evolve(self.sampling, max_tokens=max_tokens, stop_strings=stop_strings)
        return self._samplings[key]

    def _on_completion(self, attempt: RunningAttempt, completion: Completion) -> Action | None:
        """Take a turn; return the action that its environment answers, None where there is none."""
        if attempt.number not in self._attempts:
            return None
        attempt.spend("generate")
        transcript = attempt.transcript
        assert transcript is not None, "a prompt comes first"
        if completion.finish in ("error", "abort") or not len(completion.token_ids):
            self._end(attempt, "failed", f"{GAVE_UP}: {completion.error or completion.finish}")
            return None
        transcript.add_completion(completion)
        attempt.last = completion
        action = self.turns.action(completion, transcript.turns - 1, attempt.task.tools)
        attempt.text = action.text
        attempt.tool_problems += action.tool_problem is not None
        attempt.messages.append(self.turns.reply(action, attempt.task.tools))
        return action

    def _on_step_result(self, attempt: RunningAttempt, result: StepResult) -> None:
        transcript, last = attempt.transcript, attempt.last
        assert transcript is not None, "a turn comes first"
        assert last is not None, "a turn comes first"
        transcript.add_reward(result.reward, result.token_rewards)
        transcript.add_columns(result.columns)
        for sums, values in ((attempt.parts, result.parts), (attempt.metrics, result.metrics)):
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value
        attempt.info |= result.info
        attempt.sampling = result.sampling
        if result.success is not None:
            attempt.success = result.success
        # a turn that the environment itself limited is followed by others
        is_full = transcript.room(self.limits.max_tokens) < 1
        if result.done:
            self._end(attempt, "truncated" if last.finish == "length" and is_full else "finished")
            return
        if is_full or transcript.turns >= self.claims[attempt.environment].max_turns:
            self._end(attempt, "truncated")
            return
        attempt.messages += result.messages
        try:
            fits = self._observe(attempt, transcript, result.messages, int(last.token_ids[-1]))
        except DataError as error:
            self._end(attempt, "failed", error.cause)
            return
        if fits:
            self._request_turn(attempt)
        else:
            self._end(attempt, "truncated")

    def _observe(self, attempt: RunningAttempt, transcript: Transcript, messages: Sequence[Message], last: int) -> bool:
        """Append the environment's messages to the prompt. Append nothing and return False where no token could be sampled after them."""
        room = transcript.room(self.limits.max_tokens)
        if self.limits.keeps_history:
            added = self.turns.suffix(messages, last, attempt.task.tools)
            if len(added) < room:
                transcript.add_observation(added)
            return len(added) < room
        prompt_ids = self.turns.prompt(attempt.messages, attempt.task.tools)
        more = transcript.find_added_ids(prompt_ids)
        fits = len(prompt_ids) < self.limits.longest if more is None else len(more) < room
        if fits:
            transcript.restart(prompt_ids)
        return fits

    def _end(self, attempt: RunningAttempt, status: Status, cause: str | None = None) -> None:
        """End an attempt, and its group where it is the last. Raises RolloutError where too many attempts fail."""
        del self._attempts[attempt.number]
        self._requests.end_session(self._session(attempt))
        self.episodes.close(attempt.number)
        transcript = attempt.transcript or Transcript(np.zeros(0, dtype=np.int32))
        success = attempt.success
        trajectory = transcript.trajectory(
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
            **self._dialogue_of(attempt),
        )
        claims, running = self.claims[attempt.environment], self._running[attempt.ticket]
        if claims.compares:
            running.said[attempt.member] = EndedAttempt(attempt.text, tuple(attempt.messages))
        elif success is None and status != "failed":
            success = claims.succeeds(trajectory.reward)
        oldest = next(iter(self._attempts), None)
        self._failures.record(
            attempt.task.key,
            cause,
            has_answered=transcript.turns > 0,
            all_first_ended=oldest is None or oldest > self.first_number + self._failures.first,
        )
        running.ended[attempt.member] = evolve(trajectory, success=success)
        if len(running.ended) == self.limits.group_size:
            if claims.compares:
                self._request_comparison(attempt.ticket)
            else:
                self._end_group(attempt.ticket)

    def _request_comparison(self, ticket: int) -> None:
        """Let the environment compare the attempts of a group that did not fail, where there are several."""
        running = self._running[ticket]
        members = _list_finished(running)
        if len(members) < 2:
            self._add_comparison(ticket, [StepResult(0.0) for _ in members])
            return
        self._last_number += 1
        self._comparisons[self._last_number] = ticket
        attempts = [running.said[member] for member in members]
        self.episodes.compare(self._last_number, running.environment, running.task, attempts)

    def _on_comparison(self, reply: EpisodeReply) -> None:
        """Take what an environment says of the attempts of a group. Without an answer they have failed: nobody knows what they are worth."""
        ticket = self._comparisons.pop(reply.episode)
        self.episodes.close(reply.episode)
        if reply.results is not None:
            self._add_comparison(ticket, reply.results, reply.seconds)
            return
        running = self._running[ticket]
        for member in _list_finished(running):
            running.ended[member] = evolve(running.ended[member], status="failed", cause=reply.failure)
            self._failures.record(running.task.key, reply.failure, has_answered=True, all_first_ended=False)
        self._end_group(ticket)

    def _add_comparison(self, ticket: int, results: Sequence[StepResult], seconds: float = 0.0) -> None:
        """Add to the attempts of a group that did not fail what their comparison gave each, and end the group."""
        running = self._running[ticket]
        claims = self.claims[running.environment]
        for member, result in zip(_list_finished(running), results, strict=True):
            attempt = running.ended[member]
            attempt = evolve(
                attempt,
                unplaced_reward=attempt.unplaced_reward + result.reward,
                parts=_sum_by_name(attempt.parts, result.parts),
                metrics=_sum_by_name(attempt.metrics, result.metrics),
                info={**attempt.info, **result.info},
                seconds=_sum_by_name(attempt.seconds, {"environment": seconds}),
            )
            known = attempt.success if result.success is None else result.success
            running.ended[member] = evolve(attempt, success=claims.succeeds(attempt.reward) if known is None else known)
        self._end_group(ticket)

    def _dialogue_of(self, attempt: RunningAttempt) -> dict[str, Any]:
        """Return messages and tools of an attempt, where they are kept and are all that the model was given."""
        if not self.limits.keeps_messages or attempt.task.prompt_ids:
            return {}
        roles = [message["role"] for message in attempt.messages]
        # what an environment answered, and there was no room for, was not in front of the model
        said = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
        return {"messages": attempt.messages[:said], "tools": attempt.task.tools}

    def _end_group(self, ticket: int) -> None:
        ended = self._running.pop(ticket)
        trajectories = tuple(ended.ended[member] for member in range(self.limits.group_size))
        group = Group(ticket, self.names[ended.environment], ended.task.key, ended.version, trajectories)
        has_too_few = len(group.finished) < min(self.limits.min_group_size, self.limits.group_size)
        self._ended.append(evolve(group, dropped="failed") if has_too_few else group)


def _list_finished(group: _RunningGroup) -> list[int]:
    """Return the members of a group whose attempts did not fail, in their order."""
    return [member for member in sorted(group.ended) if group.ended[member].status != "failed"]


def _sum_by_name(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {
        name: first.get(name, 0.0) + second.get(name, 0.0) for name in (*first, *(name for name in second if name not in first))
    }
