"""Text that no chat template writes."""

from attrs import frozen


@frozen
class PlainText:
    """Text without a template. Loss falls on everything from character `response_start` on, and on the end-of-text token that follows."""

    text: str
    response_start: int = 0
