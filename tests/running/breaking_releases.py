"""Which of many new releases break tests: a search that asks for few trials, since each takes a resolve, an installation and tests."""

from collections.abc import Callable, Iterator, Sequence

Breaks = Callable[[Sequence[str]], bool]
"""Says whether tests fail with these distributions changed, and all others as locked."""


def find_breaking(names: Sequence[str], breaks: Breaks) -> Iterator[tuple[str, ...]]:
    """Yield small groups of `names` that break the tests, until all others together do not.

    A group is one distribution, or several that break the tests only together. Without any of `names` the tests must pass.
    """
    left = list(names)
    while breaks(left):
        group = shrink(left, breaks)
        yield group
        left = [name for name in left if name not in group]


def shrink(names: Sequence[str], breaks: Breaks) -> tuple[str, ...]:
    """Return a group of `names` that breaks the tests and would not without any of its own, if more changes never repair what fewer break.

    Each of the group's k names costs about log2(len(names)) trials: the shortest beginning of the list that breaks the tests ends with one.
    """
    group: list[str] = []
    left = list(names)
    while not breaks(group):
        low, high = 0, len(left)  # group + left[:low] passes, group + left[:high] breaks
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if breaks([*group, *left[:middle]]) else (middle, high)
        assert high, "the tests break without any of the names"
        group.append(left[high - 1])
        left = left[: high - 1]
    return tuple(group)
