"""Cost of a request where 10,000 are in flight: ledger, queues and dispatch at most 50 microseconds of CPU time each.

625 groups of 16 attempts start at once, as a run does that samples far ahead; every attempt has a prompt of 64 tokens and one turn of 64. The
source of groups, its ledger, runner and router are those of a run. Generator and environments answer at once, out of memory, and only when all
requests are under way; their time does not count. Beside the bar are the parts of an attempt that are not of a request: what attempts are made
of (transcripts, trajectories, groups, actions), the journal on the disk, and the same requests and completions as JSON, as over HTTP. CPU time
of the thread that samples. Run with `nox -s bench`.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from attrs import define, field
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine

from skyrl_engine.contracts import Action, EnvironmentClaims, GenerationRequest, Sampling, StepResult, Task
from skyrl_engine.contracts.kinds.generator import Completion
from skyrl_engine.contracts.values.rollout import VersionSpans
from skyrl_engine.rollout.attempt import RolloutLimits
from skyrl_engine.rollout.env_pool import EpisodeReply
from skyrl_engine.rollout.group_source import RolloutSource
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.ledger import RolloutLedger
from skyrl_engine.rollout.request_queue import RequestQueue
from skyrl_engine.rollout.routing import SamplerRouter
from skyrl_engine.rollout.runner import RolloutRunner
from skyrl_engine.spans import Spans

GROUPS, GROUP_SIZE, PROMPT, NEW = 625, 16, 64, 64
ROUNDS = 3
BAR = 50.0
"""Microseconds of CPU time."""


@define(eq=False)
class Answers:
    """Environments of one turn, all of which answer at once."""

    replies: list[EpisodeReply] = field(factory=list)

    @property
    def pending(self) -> int:
        return len(self.replies)

    def open(self, episode: int, environment: int, task: Task, seed: int) -> None:
        self.replies.append(EpisodeReply(episode, messages=()))

    def step(self, episode: int, action: Action) -> None:
        self.replies.append(EpisodeReply(episode, result=StepResult(1.0, success=True)))

    def close(self, episode: int) -> None:
        pass

    def poll(self, timeout: float) -> list[EpisodeReply]:
        replies, self.replies = self.replies, []
        return replies


@define(eq=False)
class Completions:
    """A generator that holds all requests until they are `expected`, and gives its completions in parts as a server would, last ones first."""

    expected: int
    requests: list[GenerationRequest] = field(factory=list)
    kept: list[GenerationRequest] = field(factory=list)
    ready: list[Completion] = field(factory=list)
    tokens: Any = field(factory=lambda: np.arange(NEW, dtype=np.int32))
    logprobs: Any = field(factory=lambda: np.full(NEW, -1.0, dtype=np.float32))

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests += requests
        if len(self.requests) == self.expected:
            self.kept, self.requests = self.requests, []
            self.ready = [self.complete(request) for request in self.kept]

    def complete(self, request: GenerationRequest) -> Completion:
        return Completion(request.request_id, self.tokens, self.logprobs, VersionSpans.one(0, NEW), "stop", int(self.tokens[-1]))

    def poll(self, timeout: float) -> list[Completion]:
        return [self.ready.pop() for _ in range(min(64, len(self.ready)))]

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        raise AssertionError("nothing is given up")

    def end_sessions(self, sessions: Sequence[int]) -> None:
        pass


class Turns:
    """Text of turns that nobody reads."""

    def prompt(self, messages: Any, tools: Any = ()) -> Any:
        raise AssertionError("tasks have prompts of their own")

    suffix = prompt

    def action(self, completion: Completion, turn: int, tools: Any = ()) -> Action:
        return Action("", tuple(completion.token_ids.tolist()), turn, "stop")

    def reply(self, action: Action, tools: Any = ()) -> dict[str, str]:
        return {"role": "assistant", "content": ""}


PARTS: Mapping[str, tuple[type, tuple[str, ...]]] = {
    "ledger": (RolloutLedger, ("may_start", "start_tickets", "next_batch", "finish_group")),
    "queues": (RequestQueue, ("add", "send", "poll", "end_session", "send_ends")),
    "dispatch": (RolloutRunner, ("start", "_request_turn")),
}
"""Methods whose time counts, less that of those that they call and of the stand-ins."""


def count_time(spans: Spans, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*arguments: Any, **named: Any) -> Any:
        with spans(part):
            return method(*arguments, **named)

    return counted


def measure(folder: Path) -> tuple[dict[str, float], Completions]:
    """Start all groups, answer all requests, and take the groups of the one step that they make; return CPU seconds by part."""
    tasks = [
        Task(str(number), prompt_ids=tuple(np.random.default_rng(number).integers(0, 30_000, PROMPT).tolist()))
        for number in range(GROUPS)
    ]
    completions, spans = Completions(GROUPS * GROUP_SIZE), Spans(time.thread_time)
    with ExitStack() as stack:
        stand_in = (Completions, ("submit", "poll"))
        for part, (owner, names) in {**PARTS, "stand-in": stand_in}.items():
            for name in names:
                stack.enter_context(patch.object(owner, name, count_time(spans, part, getattr(owner, name))))
        runner = RolloutRunner(
            sampler=SamplerRouter(completions).open_client(),
            episodes=Answers(),
            turns=Turns(),
            names=["one turn"],
            claims=[EnvironmentClaims(max_turns=1)],
            sampling=Sampling(max_tokens=NEW),
            limits=RolloutLimits(group_size=GROUP_SIZE, max_prompt_tokens=PROMPT, max_tokens=NEW),
            seed=0,
        )
        journal = stack.enter_context(open_journal(folder, run="benchmark"))
        source = RolloutSource(RolloutLedger(GROUPS), runner, journal, lambda ticket: (0, tasks[ticket]), phases=runner.phases)
        started = time.thread_time()
        batch = source.take(1)
        total = time.thread_time() - started
    assert len(batch.groups) == GROUPS
    assert len(completions.kept) == GROUPS * GROUP_SIZE
    spent = spans.drain()
    journal_seconds = runner.phases.cpu.drain()["journal"]
    return {**spent, "journal": journal_seconds, "attempts": total - sum(spent.values()) - journal_seconds}, completions


def main() -> None:
    print(machine())
    count = GROUPS * GROUP_SIZE
    rounds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            spent, completions = measure(Path(name))
        rounds.append({part: 1e6 * seconds / count for part, seconds in spent.items()})
    least = min(rounds, key=lambda spent: sum(spent[part] for part in PARTS))
    own = sum(least[part] for part in PARTS)
    said = ", ".join(f"{part} {least[part]:.1f}" for part in PARTS)
    print(f"{count} requests in flight: {own:.1f} us each ({said}) {compare_with_bar(own, at_most=BAR)}")
    print(f"beside it, each: {least['attempts']:.1f} us of what attempts are made of, and {least['journal']:.1f} us of the journal")
    started = time.thread_time()
    for request in completions.kept:
        sent = {"token_ids": request.prompt_ids.tolist(), "seed": request.seed, "max_tokens": request.sampling.max_tokens}
        json.loads(json.dumps(sent))
        answer = completions.complete(request)
        json.loads(json.dumps({"token_ids": answer.token_ids.tolist(), "logprobs": answer.logprobs.tolist()}))
    print(f"and {1e6 * (time.thread_time() - started) / count:.1f} us of JSON, written and read, where a server samples")


if __name__ == "__main__":
    main()
