"""Keys and values that outlive their requests, until the session's next turn, its end, or others need the memory; and what all rows may hold.

Tokens are compared one by one: neither ids nor lengths decide what a row goes on from.
"""

import logging
from collections.abc import Callable, Iterable

from attrs import define, evolve, field

from skyrl_engine_generators.rows import Ids
from skyrl_engine_generators.slots import KeptPiece

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""A weight set and a session."""


def count_common(one: Ids, other: Ids) -> int:
    """Count the tokens that two rows begin with alike."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


@define(eq=False)
class KeptRow:
    """The beginning of a session's row. `pieces` hold its tokens, in their order."""

    key: Key
    group: int | None
    ids: Ids
    pieces: tuple[KeptPiece, ...]

    def cut(self, tokens: int) -> "KeptRow":
        """Return the row with its first tokens alone."""
        pieces, left = [], tokens
        for piece in self.pieces:
            if left:
                pieces.append(piece if piece.tokens <= left else piece.cut(left))
                left -= pieces[-1].tokens
        return evolve(self, ids=self.ids[:tokens], pieces=tuple(pieces))


@define(eq=False)
class Room:
    """The memory of one weight set's rows that are sampled: `bound` is the most tokens that they may come to, `held` what there is room for."""

    _budget: "CacheBudget"
    bound: int = field(default=0, init=False)
    held: int = field(default=0, init=False)
    shrink: Callable[[], None] = field(default=lambda: None, init=False)
    """Frees what is held beyond what the rows that are sampled need now."""

    def fits(self, tokens: int) -> bool:
        return self._budget.used - self.held + tokens <= self._budget.tokens

    def grow(self, tokens: int) -> None:
        self.held = tokens
        self._budget.make_room(self)

    def admits(self, bound: int) -> bool:
        """Say whether rows may come to so many tokens; the only ones always may."""
        others = sum(room.bound for room in self._budget.rooms if room is not self)
        return others + bound <= self._budget.tokens or not (others or self.bound)

    def close(self) -> None:
        self._budget.rooms.remove(self)


@define(eq=False)
class CacheBudget:
    """Up to `tokens` of keys and values, of all weight sets together: of rows that are sampled, and of kept ones.

    Rows that are sampled go first: kept ones make room, the least recently used first.
    """

    tokens: int
    rooms: list[Room] = field(factory=list, init=False)
    kept_tokens: int = field(default=0, init=False)
    _kept: dict[Key, KeptRow] = field(factory=dict, init=False)
    """In the order of last use, the most recent last."""
    _groups: dict[tuple[str, int], dict[Key, KeptRow]] = field(factory=dict, init=False)
    _short: set[Key] | None = field(factory=set, init=False)
    """Sessions of which something was not kept for want of room; None after the warning."""

    @property
    def used(self) -> int:
        """Count the tokens that there is room for now."""
        return sum(room.held for room in self.rooms) + self.kept_tokens

    def open_room(self) -> Room:
        """Return the room of one more weight set."""
        self.rooms.append(room := Room(self))
        return room

    def make_room(self, taker: Room | None, more: int = 0) -> None:
        """Free what the rows of other rooms do not need, and then kept rows, as far as it takes to hold so many more tokens."""
        for room in self.rooms:
            if self.used + more > self.tokens and room is not taker and room.held > room.bound:
                room.shrink()
        while self._kept and self.used + more > self.tokens:
            key = next(iter(self._kept))
            self.drop([key])
            self.note_short(key)

    def note_short(self, key: Key) -> None:
        """Note that there was no room for a session: its next turn, if one comes, warns that it reads again; one of them does."""
        if self._short is not None:
            self._short.add(key)

    def find(self, key: Key, group: int | None, ids: Ids) -> tuple[KeptRow | None, int]:
        """Return the kept row that has most tokens in common with a new one, of its session or its group, and how many."""
        if self._short is not None and key in self._short:
            logger.warning(
                "keys and values of %d tokens are fewer than the dialogues under way have: turns read the history again that gave way to "
                "others, which takes time and changes nothing that is sampled; raise generator.cache_tokens",
                self.tokens,
            )
            self._short = None
        candidates = [self._kept[key]] if key in self._kept else []
        if group is not None:
            candidates += self._groups.get((key[0], group), {}).values()
        best, most = None, 0
        for row in candidates:
            if (common := count_common(row.ids, ids)) > most:
                best, most = row, common
        if best is not None:
            self._kept[best.key] = self._kept.pop(best.key)
        return best, most

    def takes(self, tokens: int) -> bool:
        """Say whether a row of so many tokens may be kept, if others make room."""
        return sum(min(room.held, room.bound) for room in self.rooms) + tokens <= self.tokens

    def keep(self, row: KeptRow) -> None:
        """Keep a row in the place of what was kept of its session."""
        self.drop([row.key])
        self.make_room(None, len(row.ids))
        self._kept[row.key] = row
        self.kept_tokens += len(row.ids)
        if row.group is not None:
            self._groups.setdefault((row.key[0], row.group), {})[row.key] = row

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget what is kept under these keys; unknown ones are passed over."""
        for key in keys:
            if self._short is not None:
                self._short.discard(key)
            row = self._kept.pop(key, None)
            if row is None:
                continue
            self.kept_tokens -= len(row.ids)
            if row.group is not None:
                members = self._groups[key[0], row.group]
                del members[key]
                if not members:
                    del self._groups[key[0], row.group]

    def drop_target(self, target: str) -> None:
        """Forget what was computed with a weight set."""
        self.drop([key for key in (*self._kept, *(self._short or ())) if key[0] == target])
