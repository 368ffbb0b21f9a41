"""Polls of several data-parallel ranks: each rank answers when something is finished there, whatever the others do."""

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from attrs import define, field

from skyrl_engine.contracts.kinds.generator import Completion
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.workers.messages import Message, PollCompletions

SLICE_SECONDS = 0.25
"""The longest that a rank samples without a word: other calls, such as an abort or a turn that follows, wait so long for it at most."""

ANSWER_SECONDS = 0.0005
"""Time that the controller may take over one answer: slices are so long that answers of all ranks fit into one."""


@runtime_checkable
class AnswersApart(Protocol):
    """A transport whose ranks can be asked, and answer, one by one."""

    @property
    def posted_ranks(self) -> AbstractSet[int]:
        """Return the ranks with a posted call whose reply was not collected."""

    def post(self, rank: int, message: Message[Any]) -> None:
        """Begin a call of one rank, which has no other posted call. `send` to this rank waits for it, and leaves its reply to `collect`."""

    def collect(self, timeout: float) -> dict[int, Any]:
        """Return the replies to posted calls that are there, by rank: at least one, unless `timeout` seconds go by without any.

        Raises WorkerError, or the typed error that a rank met, as waiting for the replies of `send` does; no call is posted after that.
        """


@define(eq=False)
class RankPolls:
    """The polls under way, at most one per data-parallel rank. Tensor-parallel ranks of one sample together, and their poll is over when all
    have answered.
    """

    _transport: AnswersApart
    _topology: Topology
    _ranks: tuple[tuple[int, ...], ...] = field(init=False)
    """By data-parallel rank, the ranks that may sample."""

    def __attrs_post_init__(self) -> None:
        ranks: list[list[int]] = [[] for _ in range(self._topology.dp)]
        for rank in range(self._topology.world_size):
            place = self._topology.coords(rank)
            if place.cp == place.pp == 0:
                ranks[place.dp].append(rank)
        self._ranks = tuple(map(tuple, ranks))

    @property
    def slice_seconds(self) -> float:
        """Return how long a rank samples without a word at most."""
        return max(SLICE_SECONDS, ANSWER_SECONDS * self._topology.dp * self._topology.tp)

    def begin(self, busy: Collection[int]) -> None:
        """Ask those of the data-parallel ranks `busy` whose last poll is over."""
        message, posted = PollCompletions(self.slice_seconds, eager=True), self._transport.posted_ranks
        for dp in busy:
            if posted.isdisjoint(self._ranks[dp]):
                for rank in self._ranks[dp]:
                    self._transport.post(rank, message)

    def wait(self, timeout: float, busy: Collection[int]) -> list[Completion]:
        """Return completions as soon as a rank has some, of all that have; none after `timeout` seconds, or where no rank is `busy`."""
        until = monotonic() + timeout
        while True:
            self.begin(busy)
            if not self._transport.posted_ranks:
                return []
            completions = self.take_answers(max(0.0, until - monotonic()))
            if completions or monotonic() >= until:
                return completions

    def take_answers(self, timeout: float = 0.0) -> list[Completion]:
        """Return the completions of the polls that are answered within `timeout` seconds, or were while another call waited for them."""
        replies: Mapping[int, Sequence[Completion]] = self._transport.collect(timeout)
        return [completion for reply in replies.values() for completion in reply]
