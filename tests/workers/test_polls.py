"""Polls of many ranks that are simulated, on a clock of their own: an answer comes when it is there, and the controller asks once a slice."""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from attrs import define, field

from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.contracts.values.rollout import VersionSpans
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.workers import polls
from skyrl_engine.workers.generator_hosts import RankHost
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.messages import PollCompletions, SubmitRequests
from skyrl_engine.workers.polls import ANSWER_SECONDS, SLICE_SECONDS, RankPolls


@define(eq=False)
class Ranks:
    """A transport whose rank r takes `seconds(r)` for a request; `now` is their clock, and waiting moves it on.

    `took` has the time at which the completion of every request was collected, and `posts` counts the calls of a rank.
    """

    seconds: Callable[[int], float]
    now: float = 0.0
    posts: int = 0
    took: dict[int, float] = field(factory=dict)
    _open: dict[int, list[tuple[float, int]]] = field(factory=dict)
    _answers: list[tuple[float, int, list[Completion]]] = field(factory=list)
    posted_ranks: set[int] = field(factory=set)

    concurrent, ended, ray_resources = True, None, None

    def send(self, messages: Sequence[Any]) -> Callable[[], list[Any]]:
        for rank, message in enumerate(messages):
            if message is not None:
                assert isinstance(message, SubmitRequests)
                assert rank not in self.posted_ranks, "a submit waits for the poll of its rank, and these ranks have none"
                self._open.setdefault(rank, []).extend(
                    (self.now + self.seconds(rank), each.request_id) for each in message.requests
                )
        return lambda: [None] * len(messages)

    def post(self, rank: int, message: Any) -> None:
        assert isinstance(message, PollCompletions)
        assert message.eager
        assert rank not in self.posted_ranks
        self.posts += 1
        self.posted_ranks.add(rank)
        until = self.now + message.timeout
        due = min(self._open[rank])
        if due[0] <= until:
            self._open[rank].remove(due)
            until = max(due[0], self.now)
        heapq.heappush(self._answers, (until, rank, [complete(due[1])] if due[0] <= until else []))

    def collect(self, timeout: float) -> dict[int, Any]:
        until = self.now + timeout
        if self._answers and self._answers[0][0] > self.now:
            self.now = min(self._answers[0][0], until)
        arrived: dict[int, list[Completion]] = {}
        while self._answers and self._answers[0][0] <= self.now:
            _, rank, completions = heapq.heappop(self._answers)
            arrived[rank] = completions
            self.posted_ranks.discard(rank)
            self.took |= {completion.request_id: self.now for completion in completions}
        return arrived

    def put(self, shard: Any) -> Any:
        return shard

    def close(self) -> None:
        pass


def complete(request_id: int) -> Completion:
    return Completion(request_id, np.zeros(1, np.int32), np.zeros(1, np.float32), VersionSpans.one(0, 1), "length")


def sample_once(monkeypatch: pytest.MonkeyPatch, count: int, seconds: Callable[[int], float]) -> Ranks:
    """Let every rank sample one request, and return the ranks after the last completion."""
    ranks = Ranks(seconds)
    monkeypatch.setattr(polls, "monotonic", lambda: ranks.now)
    host = RankHost(WorkerGroup(ranks, Topology(dp=count)))
    prompt = np.ones(4, dtype=np.int32)
    host.submit([GenerationRequest(rank, prompt, Sampling(max_tokens=4), seed=0, session=rank) for rank in range(count)])
    done: list[int] = []
    while len(done) < count:
        came = [completion.request_id for completion in host.poll(60.0)]
        assert came, "a poll of busy ranks came back without a completion before its time"
        done += came
    assert sorted(done) == list(range(count))
    assert host.poll(60.0) == []
    return ranks


def test_every_completion_is_taken_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes forty times as long as the last one: in polls of all ranks together the others would wait for the end of a slice."""
    seconds = {rank: 4.0 if rank == 0 else 0.1 + rank / 1000 for rank in range(64)}
    ranks = sample_once(monkeypatch, 64, seconds.__getitem__)
    assert ranks.took == pytest.approx(seconds)


@pytest.mark.parametrize("count", [2, 64, 1024])
def test_a_slice_leaves_the_controller_time_for_an_answer_of_every_rank(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """No rank is asked more often than once a slice, and once more for what it finished."""
    ranks = sample_once(monkeypatch, count, lambda rank: 3.0 + rank / 10_000)
    slice_seconds = RankPolls(ranks, Topology(dp=count)).slice_seconds
    assert slice_seconds == max(SLICE_SECONDS, count * ANSWER_SECONDS)
    assert ranks.posts <= count * (ranks.now / slice_seconds + 1)


def test_ranks_that_share_a_sample_are_asked_together_once_all_have_answered() -> None:
    ranks = Ranks(lambda _: 1.0)
    asked = RankPolls(ranks, Topology(dp=2, tp=2, pp=2))
    ranks._open = {rank: [(1.0, rank)] for rank in range(8)}
    asked.begin({0, 1})
    topology = Topology(dp=2, tp=2, pp=2)
    assert ranks.posted_ranks == {rank for rank in range(8) if topology.coords(rank).pp == 0}
    (one, *_) = sorted(ranks.posted_ranks)
    ranks.posted_ranks.discard(one)
    asked.begin({0, 1})
    assert one not in ranks.posted_ranks, "its peers have not answered"
