"""Episodes of environments in processes of their own: dispatched, timed, ended where they hang, and tried again with the same seed.

An episode that loses its process, because another one in it hung or because it died, is rebuilt in the next one from its seed and the turns
that it was given; a rebuilt episode that answers otherwise than before has failed. A process is no sandbox.
"""

import logging
import math
import os
import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
from attrs import frozen

from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.environment import Action, EndedAttempt, Message, StepResult, Task
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.failure_monitor import TIMED_OUT
from skyrl_engine.rollout.process_handle import Drain, EpisodeProcess, HostedEpisode, answer_of, json_line, unsendable_error

logger = logging.getLogger(__name__)

_START_S: Final = 120.0
"""Seconds that a process may take to make its environments, beyond the time of a call."""

_PATIENCE_S: Final = 2.0
"""Seconds in which processes may close their episodes in the end."""

_MORE: Final = 64
"""Most processes in addition to the workers."""


@frozen
class EpisodeReply:
    """The answer to `open` (`messages`), to `step` (`result`), to `compare` (`results`), or the `failure` of an episode, which is over then.

    `seconds` are those from the request to the answer.
    """

    episode: int
    messages: tuple[Message, ...] | None = None
    result: StepResult | None = None
    results: tuple[StepResult, ...] | None = None
    failure: str | None = None
    seconds: float = 0.0


def count_workers(workers: int | None) -> int:
    """Return the number of processes for environments, as `rollouts.workers` says."""
    return workers or max(1, (os.cpu_count() or 2) - 1)


class EpisodePool:
    """Runs episodes of several environments, given as the locks of their plugins.

    `workers` processes compute at once. A call that takes longer than `timeout_s` ends its process. An episode that failed is tried again
    `retries` times, with the same seed and turns. `shutdown` ends all processes.
    """

    def __init__(
        self,
        locks: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        context: FactoryContext,
        *,
        workers: int | None = None,
        timeout_s: float = 60.0,
        retries: int = 1,
    ) -> None:
        self._setup = json_line({"locks": list(locks), "context": attrs.asdict(context)})
        self._names = list(names)
        self._workers = count_workers(workers)
        self._timeout_s, self._retries = timeout_s, retries
        self._episodes: dict[int, HostedEpisode] = {}
        self._waiting: deque[HostedEpisode] = deque()
        self._processes: list[EpisodeProcess] = []
        self._replies: list[EpisodeReply] = []
        self._selector = selectors.DefaultSelector()
        self._drain = Drain()
        self._to_tell: set[EpisodeProcess] = set()
        # no call is too old before this moment
        self._alarm = math.inf
        # an episode waits for any process
        self._short = False

    @property
    def pending(self) -> int:
        """Count the episodes that owe an answer."""
        busy = sum(process.episode is not None for process in self._processes)
        waiting = len(self._waiting) + sum(len(process.waiting) for process in self._processes)
        return busy + waiting + len(self._replies)

    def open(self, episode: int, environment: int, task: Task, seed: int) -> None:
        """Start an episode; `poll` brings its first messages."""
        opening = {"do": "open", "environment": environment, "task": attrs.asdict(task), "seed": seed}
        hosted = HostedEpisode(episode, environment, f"environment {self._names[environment]}, task {task.key!r}", opening)
        self._episodes[episode] = hosted
        self._ask(hosted)

    def compare(self, episode: int, environment: int, task: Task, attempts: Sequence[EndedAttempt]) -> None:
        """Let an environment compare the attempts at a task, as an episode of its own; `poll` brings its answers."""
        opening = {
            "do": "compare",
            "environment": environment,
            "task": attrs.asdict(task),
            "attempts": [attrs.asdict(attempt) for attempt in attempts],
        }
        hosted = HostedEpisode(episode, environment, f"environment {self._names[environment]}, task {task.key!r}", opening)
        self._episodes[episode] = hosted
        self._ask(hosted)

    def step(self, episode: int, action: Action) -> None:
        """Give an episode a turn; `poll` brings its answer."""
        hosted = self._episodes[episode]
        hosted.actions.append({"do": "step", "action": attrs.asdict(action)})
        self._ask(hosted)

    def close(self, episode: int) -> None:
        """Forget an episode, which frees what it holds."""
        hosted = self._episodes.pop(episode, None)
        if hosted is not None:
            self._leave(hosted)

    def poll(self, timeout: float) -> list[EpisodeReply]:
        """Return answers that are there, or that come within `timeout` seconds; several calls wait for several answers."""
        until = time.monotonic() + timeout
        # a process whose answer is there already is not stuck, however long nobody asked for it
        self._wait(0.0)
        while True:
            self._dispatch()
            if self._replies or not self._selector.get_map():
                break
            self._wait(max(0.0, min(until, self._next_event()) - time.monotonic()))
            if time.monotonic() >= until:
                self._dispatch()
                break
        replies, self._replies = self._replies, []
        return replies

    def shutdown(self) -> None:
        """Let idle processes close their episodes, and end all."""
        until = time.monotonic() + _PATIENCE_S
        idle = [process for process in self._processes if process.episode is None and process.ready]
        for process in idle:
            if process.requests in self._selector.get_map():
                self._selector.unregister(process.requests)
            process.finish()
        for process in idle:
            process.wait_for_end(until - time.monotonic())
        for process in list(self._processes):
            self._end(process)
        self._selector.close()
        self._drain.close()

    def _ask(self, episode: HostedEpisode) -> None:
        episode.asked_at = time.monotonic()
        (self._waiting if episode.process is None else episode.process.waiting).append(episode)

    def _next_event(self) -> float:
        """Return the moment at which a call may be too old, or its process may no longer count."""
        now = time.monotonic()
        moments = [now + 60.0, self._alarm]
        if self._short:
            for process in self._processes:
                if process.busy and process.ready:
                    moments += process.looks(now)
        return min(moments)

    def _time_limit(self, process: EpisodeProcess) -> float:
        return self._timeout_s if process.ready else self._timeout_s + _START_S

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            process = key.data
            if process not in self._processes:
                continue
            if key.fd == process.answers:
                self._read(process)
            else:
                self._write(process)
        if time.monotonic() >= self._alarm:
            self._end_late_calls()

    def _end_late_calls(self) -> None:
        now, self._alarm = time.monotonic(), math.inf
        for process in [process for process in self._processes if process.busy]:
            allowed = self._time_limit(process)
            if now - process.since > allowed:
                self._on_lost_process(process, f"{TIMED_OUT} {allowed:g} s{process.place}")
            else:
                self._alarm = min(self._alarm, process.since + allowed)

    def _dispatch(self) -> None:
        """Give waiting episodes to processes that have nothing to do: first those that they hold."""
        for process in list(self._processes):
            while process.episode is None and process.waiting:
                episode = process.waiting.popleft()
                if self._is_open(episode):
                    self._send(process, episode)
        self._short = False
        while self._waiting and not self._short:
            if not self._is_open(self._waiting[0]):
                self._waiting.popleft()
            elif (free := self._free_process()) is not None:
                self._send(free, self._waiting.popleft())
            else:
                self._short = True
        for process in [process for process in self._to_tell if process.episode is None]:
            self._to_tell.discard(process)
            process.tell_closed()
            self._alarm = min(self._alarm, process.since + self._time_limit(process))
            self._write(process)

    def _free_process(self) -> EpisodeProcess | None:
        """Return a process for an episode that none holds; None where it must wait."""
        now = time.monotonic()
        # one that closes an episode is free at once, unless that takes long
        free = [
            process for process in self._processes if process.episode is None and not (process.unclosed and process.is_stuck(now))
        ]
        if free:
            return min(free, key=lambda process: (len(process.unclosed) > 0, len(process.held)))
        counted = sum(not process.is_stuck(now) for process in self._processes)
        if counted < self._workers and len(self._processes) < self._workers + _MORE:
            return self._start()
        return None

    def _start(self) -> EpisodeProcess:
        """Start a process. Its first call is written with what it is made of: where it is gone by then, an episode is there to have failed."""
        process = EpisodeProcess.start(self._setup, self._drain)
        self._processes.append(process)
        self._selector.register(process.answers, selectors.EVENT_READ, process)
        return process

    def _send(self, process: EpisodeProcess, episode: HostedEpisode) -> None:
        """Send the next call that the episode's process has not answered yet: those of before, where it is being rebuilt."""
        if episode.process is None:
            episode.process, episode.rebuilt = process, 0
            process.held[episode.number] = episode
        call = episode.opening if episode.rebuilt == 0 else episode.actions[episode.rebuilt - 1]
        try:
            process.send(episode, call)
        except (TypeError, ValueError) as error:
            raise unsendable_error(episode.label, error) from error
        self._alarm = min(self._alarm, process.since + self._time_limit(process))
        self._write(process)

    def _write(self, process: EpisodeProcess) -> None:
        """Write the requests to the process, as many bytes as its pipe takes now."""
        try:
            all_told = process.flush()
        except OSError:
            self._on_lost_process(process, process.cause_of_end())
            return
        registered = process.requests in self._selector.get_map()
        if all_told and registered:
            self._selector.unregister(process.requests)
        elif not all_told and not registered:
            self._selector.register(process.requests, selectors.EVENT_WRITE, process)

    def _read(self, process: EpisodeProcess) -> None:
        lines, ended = process.receive_lines()
        for line in lines:
            answer = answer_of(line)
            if answer is None:
                self._on_lost_process(process, f"its process wrote what is no answer{process.place}")
                return
            if answer["id"] == 0 and process.unclosed:
                self._on_closed(process, answer)
            elif answer["id"] == process.awaited and process.episode is not None:
                episode, process.episode = process.episode, None
                self._on_answer(episode, answer)
            elif answer["id"] == -1 and "failure" not in answer:
                process.ready, process.since = True, time.monotonic()
                self._alarm = min(self._alarm, process.since + self._timeout_s)
            elif answer["id"] == -1:
                raise RolloutError(
                    f"an environment cannot be made in a process of its own: {answer['failure']}",
                    remedy="Check that the environment's plugin is installed where the run is, in the same version",
                )
        if ended:
            self._on_lost_process(process, process.cause_of_end())

    def _on_closed(self, process: EpisodeProcess, answer: Mapping[str, Any]) -> None:
        """Record that a process closed an episode; the time of the next call begins now."""
        label = process.unclosed.popleft()
        process.since = time.monotonic()
        if "failure" in answer:
            logger.warning("%s, close: %s", label, answer["failure"])
            logger.info("%s, close: %s", label, answer.get("traceback", "no traceback"))

    def _on_answer(self, episode: HostedEpisode, answer: dict[str, Any]) -> None:
        if not self._is_open(episode):
            return
        reply = {key: value for key, value in answer.items() if key in ("messages", "result", "results", "failure")}
        if "failure" in reply:
            cause = f", {episode.turn}: {reply['failure']}"
            if "traceback" in answer:
                # the cause says where it is raised; the run's log has the whole traceback
                logger.info("%s%s\n%s", episode.label, cause, answer["traceback"])
            self._on_failure(episode, cause)
            return
        if episode.rebuilt == len(episode.answers):
            episode.answers.append(reply)
        elif reply != episode.answers[episode.rebuilt]:
            self._over(episode, ": answers otherwise when it is played again with the same seed and turns")
            return
        episode.rebuilt += 1
        if episode.rebuilt < 1 + len(episode.actions):
            assert episode.process is not None, "what answered holds the episode"
            episode.process.waiting.appendleft(episode)
        else:
            self._on_reply(episode, reply)

    def _is_open(self, episode: HostedEpisode) -> bool:
        """Return False for an episode that was closed while its process worked on it."""
        return self._episodes.get(episode.number) is episode

    def _on_reply(self, episode: HostedEpisode, reply: Mapping[str, Any]) -> None:
        seconds = time.monotonic() - episode.asked_at
        if "messages" in reply:
            self._replies.append(EpisodeReply(episode.number, messages=tuple(reply["messages"]), seconds=seconds))
        elif "results" in reply:
            self._replies.append(EpisodeReply(episode.number, results=tuple(map(_result, reply["results"])), seconds=seconds))
        else:
            self._replies.append(EpisodeReply(episode.number, result=_result(reply["result"]), seconds=seconds))

    def _on_failure(self, episode: HostedEpisode, cause: str) -> None:
        """Try an episode again, in another process where there is one, or report its failure. `cause` is the text after its label."""
        if episode.tries >= self._retries:
            self._over(episode, cause)
            return
        episode.tries += 1
        self._leave(episode)
        self._waiting.append(episode)

    def _over(self, episode: HostedEpisode, cause: str) -> None:
        self._leave(episode)
        self._episodes.pop(episode.number, None)
        seconds = time.monotonic() - episode.asked_at
        self._replies.append(EpisodeReply(episode.number, failure=f"{episode.label}{cause}", seconds=seconds))

    def _leave(self, episode: HostedEpisode) -> None:
        if episode.process is not None:
            episode.process.held.pop(episode.number, None)
            episode.process.closing.append(episode)
            self._to_tell.add(episode.process)
        episode.process, episode.rebuilt = None, 0

    def _on_lost_process(self, process: EpisodeProcess, cause: str) -> None:
        """End a process: the episode it worked on has failed, the others it held are rebuilt when they are asked next.

        Where it was still closing an episode before that, that one is to blame, and the one that waited after it is rebuilt like the others.
        """
        culprit, process.episode = process.episode, None
        episodes = [episode for episode in process.held.values() if episode is not culprit]
        self._end(process)
        for episode in episodes:
            episode.process, episode.rebuilt = None, 0
        self._waiting.extend(process.waiting)
        process.waiting.clear()
        if culprit is not None:
            culprit.process, culprit.rebuilt = None, 0
        if process.unclosed:
            logger.warning("%s, close: %s", process.unclosed[0], cause)
        if culprit is not None and self._is_open(culprit):
            if process.unclosed:
                self._waiting.append(culprit)
            else:
                self._on_failure(culprit, f": {cause}")

    def _end(self, process: EpisodeProcess) -> None:
        self._processes.remove(process)
        self._to_tell.discard(process)
        for descriptor in (process.answers, process.requests):
            if descriptor >= 0 and descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        process.end()


def _result(table: Mapping[str, Any]) -> StepResult:
    rewards = table["token_rewards"]
    columns = {name: tuple(values) if isinstance(values, list) else values for name, values in table["columns"].items()}
    lists = {"messages": tuple(table["messages"]), "token_rewards": None if rewards is None else tuple(rewards), "columns": columns}
    return StepResult(**{**table, **lists})
