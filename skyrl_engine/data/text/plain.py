"""Text that no chat template writes."""

from attrs import frozen


@frozen
class PlainText:
    """Text without a template. Loss falls on everything from character `response_start` on, and on the end-of-text token that follows.

    `spans`, where there are any, are the characters [start, end) that carry loss instead; such a text is complete, and gets no token at its
    ends.
    """

    text: str
    response_start: int = 0
    spans: tuple[tuple[int, int], ...] | None = None
