"""Find every row of a dataset that cannot be used, and refuse them together or leave them out, as `data.bad_rows` says."""

from collections.abc import Callable
from typing import Final, Literal, TypeVar

from attrs import define, field, frozen

from skyrl_engine.errors import DataError, ImageError

T = TypeVar("T")

BadRowPolicy = Literal["error", "drop"]

MOST_NAMED: Final = 10
"""Bad rows that an error or a warning names; the others are counted."""

_MOST_COUNTED: Final = 1000
"""Bad rows after which reading ends."""


@frozen(order=True)
class _Bad:
    """Row number `row`, and its error; `where` names it where the error does not."""

    row: int
    error: DataError = field(order=False)
    where: str = field(order=False)

    def __str__(self) -> str:
        return f"{self.where}: {self.error}" if self.where else str(self.error)


@define(eq=False)
class BadRows:
    """The rows of the source `name` that raised DataError. With the policy "drop" they are left out; with "error" reading goes on to find all
    of them, and `raise_all` refuses them together.

    What another key governs is refused whatever the policy says: bad images (`data.bad_images`), and what `attempt` is told of.
    """

    name: str
    policy: BadRowPolicy
    numbers: set[int] = field(factory=set, init=False)
    """Numbers of the rows that must not become samples."""
    _refused: list[_Bad] = field(factory=list, init=False)
    _refused_count: int = field(default=0, init=False)
    _dropped: list[_Bad] = field(factory=list, init=False)
    dropped_count: int = field(default=0, init=False)
    """The number of rows that are left out."""

    def attempt(self, row: int, make: Callable[[], T], *, may_drop: bool = True, where: str = "") -> T | None:
        """Return `make()`, or None where it raises DataError; row number `row` is bad then. Rows are not left out unless `may_drop`; `where`
        names the row where errors do not.
        """
        try:
            return make()
        except DataError as error:
            self.add(row, error, may_drop=may_drop, where=where)
            return None

    def add(self, row: int, error: DataError, *, may_drop: bool = True, where: str = "") -> None:
        """Note that row number `row` is bad. Raises the error of all of them where they are very many."""
        self.numbers.add(row)
        if self.policy == "drop" and may_drop and not isinstance(error, ImageError):
            self.dropped_count += 1
            if len(self._dropped) < MOST_NAMED:
                self._dropped.append(_Bad(row, error, where))
            return
        self._refused_count += 1
        if len(self._refused) < MOST_NAMED:
            self._refused.append(_Bad(row, error, where))
        if self._refused_count >= _MOST_COUNTED:
            self.raise_all(row + 1)

    @property
    def examples(self) -> list[str]:
        """Return what is wrong with the first rows that are left out."""
        return list(map(str, sorted(self._dropped)))

    @property
    def first(self) -> DataError:
        """Return the error of the first bad row, to raise it where no row can be used: that is no matter of single rows."""
        return min(self._refused or self._dropped).error

    def raise_all(self, rows: int) -> None:
        """Raise DataError if a row is refused, of `rows` that were read: of one row its own error, of several one with a line for each of the
        first.
        """
        if not self._refused_count:
            return
        if self._refused_count == 1:
            raise self._refused[0].error
        further = self._refused_count - len(self._refused)
        more = [f"and {further:,} more"] if further else []
        drops = all(not isinstance(bad.error, ImageError) for bad in self._refused)
        raise DataError(
            f"{self._refused_count:,} of {rows:,} rows of {self.name} cannot be used",
            remedy="Correct the rows above" + (', or set data.bad_rows = "drop" to leave such rows out' if drops else ""),
            details=[*map(str, sorted(self._refused)), *more],
        )
