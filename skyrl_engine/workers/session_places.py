"""The generator of each session, chosen by load: a session stays where its keys and values are, and a new one goes where least is under way."""

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from attrs import define, field

from skyrl_engine.contracts.kinds.generator import GenerationRequest


@define(eq=False)
class SessionPlaces:
    """The places of sessions among `count` generators. A place's load is the tokens of its requests under way: prompts and what may follow.

    Which answers have come decides the loads, and so clocks do; what is sampled does not depend on the place of a request, whose seed alone
    decides what is drawn.
    """

    count: int
    loads: list[int] = field(init=False)
    """Tokens under way, by place."""
    _ranked: list[tuple[int, int]] = field(init=False)
    """A heap of loads and their places, with loads among them that places had before."""
    _places: dict[int, int] = field(factory=dict, init=False)
    """By session that may go on."""
    _under_way: dict[int, tuple[GenerationRequest, int]] = field(factory=dict, init=False)
    """By request_id, the request and its place."""
    _open: Counter[int] = field(factory=Counter, init=False)
    """By session, its requests under way."""

    def __attrs_post_init__(self) -> None:
        self.loads = [0] * self.count
        self._rank_places()

    @property
    def busy(self) -> frozenset[int]:
        """The places where requests are under way."""
        return frozenset(place for place, load in enumerate(self.loads) if load)

    def share(self, requests: Sequence[GenerationRequest]) -> list[list[GenerationRequest]]:
        """Give every request a place, those of a session the same; requests by place."""
        shares: list[list[GenerationRequest]] = [[] for _ in range(self.count)]
        for request in requests:
            place = self._places.get(request.session)
            if place is None:
                place = self._places[request.session] = self._find_least()
            shares[place].append(request)
            self._under_way[request.request_id] = request, place
            self._open[request.session] += 1
            self._add(place, _count_tokens(request))
        return shares

    def finish(self, request_ids: Iterable[int]) -> None:
        """Note that requests were answered, or are given up; unknown ones are passed over."""
        for number in request_ids:
            if number not in self._under_way:
                continue
            request, place = self._under_way.pop(number)
            self._add(place, -_count_tokens(request))
            self._open[request.session] -= 1
            if not self._open[request.session]:
                del self._open[request.session]
                if request.last_turn:
                    self._places.pop(request.session, None)

    def end(self, sessions: Iterable[int]) -> None:
        """Note that no turn of these sessions follows those that are under way."""
        self._forget(session for session in sessions if session in self._places)

    def forget_idle(self) -> None:
        """Let sessions of which nothing is under way begin anywhere again: nothing is kept of them, as after an update of the weights."""
        self._forget(list(self._places))

    def _find_least(self) -> int:
        """Return the place with the least under way, the first of several."""
        while self._ranked[0][0] != self.loads[self._ranked[0][1]]:
            heappop(self._ranked)
        return self._ranked[0][1]

    def _add(self, place: int, tokens: int) -> None:
        self.loads[place] += tokens
        heappush(self._ranked, (self.loads[place], place))
        if len(self._ranked) > 4 * self.count + 64:
            self._rank_places()

    def _rank_places(self) -> None:
        self._ranked = [(load, place) for place, load in enumerate(self.loads)]
        heapify(self._ranked)

    def _forget(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            if session not in self._open:
                del self._places[session]


def _count_tokens(request: GenerationRequest) -> int:
    return len(request.prompt_ids) + request.sampling.max_tokens
