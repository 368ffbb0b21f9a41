"""The caller's own word on code that a run directory names."""

from collections.abc import Callable, Sequence

from attrs import define

Ask = Callable[[Sequence[str]], bool]
"""Shows lines to a person, asks whether to go on, and returns the answer."""


@define(eq=False)
class Consent:
    """The word of a caller on code that the configuration of a run directory names: it may run, or not.

    `is_given` is a word in advance, such as `--trust-code`, or the answer to a question; `ask` is None where nobody can answer.
    """

    is_given: bool = False
    ask: Ask | None = None

    def obtain(self, lines: Sequence[str]) -> bool:
        """Return the caller's word; who was not asked yet is asked, once."""
        if not self.is_given and self.ask is not None:
            self.is_given = self.ask(lines)
        return self.is_given
