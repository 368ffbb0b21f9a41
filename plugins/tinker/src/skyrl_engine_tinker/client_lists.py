"""Requests that are parts of one list of datums: the SDK cuts long lists, and whoever reads an error counts in the list as it was given.

The SDK gives the parts of a list consecutive numbers and sends the first part last, when the others have arrived. It begins the next call after
that. So when request n arrives, the requests n + 1, n + 2, ... that are there already are the rest of its list.
"""

from attrs import define, field


@define(eq=False)
class ClientLists:
    """The forward and forward_backward requests of one model, by number: how many datums they have, and which are of one list."""

    _datums: dict[int, int] = field(factory=dict)
    _first: dict[int, int] = field(factory=dict)

    def arrive(self, number: int, datums: int) -> None:
        """Note a request when it arrives; one that arrives again changes nothing."""
        if number in self._datums:
            return
        self._datums[number] = datums
        part = number
        while part in self._datums:
            self._first[part] = number
            part += 1

    def before(self, number: int) -> int:
        """Count the datums of the same list that come before those of request `number`, which runs now; its whole list has arrived."""
        first = self._first.get(number, number)
        return sum(self._datums[part] for part in range(first, number))

    def forget_before(self, number: int) -> None:
        """Forget the requests of lists that ended before `number`."""
        first = self._first.get(number, number)
        for part in [number for number in self._datums if number < first]:
            self._first.pop(part, None)
            del self._datums[part]
