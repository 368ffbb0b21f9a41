"""Text on its way to a terminal or to a log: what came from data, files and plugins cannot move the cursor, hide lines or turn them around."""

from unicodedata import category

_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that turn the order of what a terminal shows."""

_OF_LINES = "\n\t"


def visible(text: str) -> str:
    r"""Return the text with control characters written out, such as `\x1b` for an escape; line ends and tabs stay.

    These are the control characters C0, DEL and C1, those that reorder text, separators of lines and paragraphs, and halves of characters,
    which stand for undecodable bytes of a file's name. The characters that join emoji and letters stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(repr(each)[1:-1] if _is_control(each) else each for each in text)


def visible_line(text: str) -> str:
    """Return the text as `visible` does, on one line: a name must not look like the lines after it."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def in_quotes(text: str) -> str:
    r"""Return JSON or TOML with the control characters of its strings as `\uXXXX`, which both read back to the same."""
    return "".join(f"\\u{ord(each):04x}" if _is_control(each) else each for each in text)


def _is_control(each: str) -> bool:
    return each not in _OF_LINES and (each in _REORDERING or category(each) in ("Cc", "Cs", "Zl", "Zp"))
