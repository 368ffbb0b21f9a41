"""Rows on their way into slots, and what each need not read: a kept row, a live one or one that is read before it has the same beginning."""

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor

from skyrl_engine_generators.buckets import BUCKET
from skyrl_engine_generators.kept import CacheBudget, KeptRow, Key, count_common
from skyrl_engine_generators.rows import Ids, TokenDecoder
from skyrl_engine_generators.sampled_row import SampledRow


@define(eq=False)
class Arrival:
    """A row that gets a slot. One of `kept`, the live row in slot `live` and `leader`, which is read before, holds its first `start` tokens."""

    row: SampledRow
    ids: Ids
    start: int = 0
    kept: KeptRow | None = None
    live: int | None = None
    leader: "Arrival | None" = None
    slot: int = -1
    hidden: Tensor | None = None
    """The hidden states [tokens, width] from `start` on; of a twin, that after its last token alone."""

    @property
    def unread(self) -> int:
        return len(self.ids) - self.start

    @property
    def order(self) -> tuple[int, int]:
        """Leaders are read first, and of rows that are read together the longest; what reads nothing comes last."""
        return (2 if not self.unread else 1 if self.leader else 0), -self.unread


@define(eq=False)
class Admission:
    """Takes in rows while `live` ones are sampled. `keeps` says whether parts of a row may come from another; whole prompts always may."""

    live: Sequence[SampledRow]
    budget: CacheBudget
    target: str
    keeps: bool
    arrivals: list[Arrival]

    def plan(self, row: SampledRow) -> Arrival:
        """Find the longest beginning of a row that need not be read."""
        if (twin := self._find_twin(row)) is not None:
            return twin
        arrival = Arrival(row, row.ids)
        if self.keeps and not row.needs_prompt_logprobs:
            self._find_beginning(arrival)
        return arrival

    def _find_twin(self, row: SampledRow) -> Arrival | None:
        """Find a row of the group whose prompt is the same, to the last token."""
        prefix = row.prefix
        if prefix is None:
            return None
        for slot, live in enumerate(self.live):
            if live.prompt_hidden is not None and live.request.prefix_group == prefix[0] and live.prompt.tobytes() == prefix[1]:
                return Arrival(row, row.prompt, len(row.prompt), live=slot)
        for other in self.arrivals:
            if other.row.prefix == prefix:
                return Arrival(row, row.prompt, len(row.prompt), leader=other.leader if other.unread == 0 else other)
        return None

    def _find_beginning(self, arrival: Arrival) -> None:
        """Let a row begin where the longest beginning that others hold ends; its last token is always read."""
        row, ids = arrival.row, arrival.ids
        group = row.request.prefix_group
        kept, best = self.budget.find(self.key_of(row), group, ids)
        arrival.kept = kept
        if group is not None:
            for slot, live in enumerate(self.live):
                if live.request.prefix_group == group and (common := count_common(live.prompt, ids)) > best:
                    arrival.kept, arrival.live, best = None, slot, common
            for other in self.arrivals:
                # a row that waits for another one is worth a pass of its own
                if other.leader is None and other.unread and other.row.request.prefix_group == group:
                    common = count_common(other.ids, ids)
                    if common >= best + BUCKET:
                        arrival.kept, arrival.live, arrival.leader, best = None, None, other, common
        arrival.start = min(best, len(ids) - 1)
        if arrival.start < BUCKET:
            arrival.start, arrival.kept, arrival.live, arrival.leader = 0, None, None, None

    def key_of(self, row: SampledRow) -> Key:
        return self.target, row.request.session

    def place(self, rows: TokenDecoder, first: int) -> list[Arrival]:
        """Put all rows into the slots from `first` on, and read what is to be read; in the order of their slots."""
        ordered = sorted(self.arrivals, key=lambda arrival: arrival.order)
        longest = max(*(len(arrival.ids) for arrival in ordered), *(row.cached_length for row in self.live), 0)
        rows.reserve(first + len(ordered), longest)
        for slot, arrival in enumerate(ordered, first):
            arrival.slot = slot
        for wave in (0, 1, 2):
            arrivals = [arrival for arrival in ordered if arrival.order[0] == wave]
            for arrival in arrivals:
                self._bring_beginning(rows, arrival)
            if wave < 2 and arrivals:
                hidden = rows.read(
                    [arrival.slot for arrival in arrivals],
                    [arrival.ids for arrival in arrivals],
                    [arrival.start for arrival in arrivals],
                )
                for arrival, states in zip(arrivals, hidden, strict=True):
                    arrival.hidden = states
                    if arrival.row.prefix is not None:
                        arrival.row.prompt_hidden = states[-1].clone()
        return ordered

    def _bring_beginning(self, rows: TokenDecoder, arrival: Arrival) -> None:
        """Copy what need not be read into the row's slot."""
        source = None
        if arrival.kept is not None:
            rows.restore(arrival.slot, arrival.kept.pieces, arrival.start)
        elif arrival.live is not None:
            rows.copy(arrival.live, [arrival.slot], arrival.start)
            source = self.live[arrival.live]
        elif arrival.leader is not None:
            rows.copy(arrival.leader.slot, [arrival.slot], arrival.start)
            source = arrival.leader.row
        if not arrival.unread:
            assert source is not None, "a twin has another one's prompt"
            assert source.prompt_hidden is not None, "a twin has another one's prompt"
            arrival.row.prompt_hidden = source.prompt_hidden
            arrival.hidden = source.prompt_hidden[None]


def stack_ends(arrivals: Sequence[Arrival]) -> Tensor:
    """Return the hidden states [n, width] after the last tokens."""
    return torch.stack([arrival.hidden[-1] for arrival in arrivals if arrival.hidden is not None])
