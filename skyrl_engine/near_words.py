"""The known word that a misspelt one is nearest to: every message that suggests a word finds it here."""

from collections.abc import Callable, Iterable


def find_near_word(written: object, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known word most like what was written; None where none has a similarity (`difflib`, 0 to 1) of `cutoff`."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(str(written), list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(written: object, known: Iterable[str], *, show: Callable[[str], str] = repr, cutoff: float = 0.6) -> str | None:
    """Return `Did you mean 'WORD'?` with the known word most like what was written, in the form that `show` gives it; None without one."""
    near = find_near_word(written, known, cutoff=cutoff)
    return None if near is None else f"Did you mean {show(near)}?"
