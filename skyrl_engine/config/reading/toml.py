"""Read TOML text into plain values, with the line of every key.

`tomllib` reads the text and refuses what is not TOML; it tells no positions. The scanner below finds them in text that is known to be
well-formed, so it only has to recognise strings, comments, brackets and keys.
"""

import re
import tomllib
from typing import Any

from skyrl_engine.config.reading.origins import KeyPath
from skyrl_engine.errors import ConfigError, Problem

_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_PLAIN_MESSAGES = {
    "Cannot overwrite a value": "a key is given twice",
    "Cannot declare": "a table is given twice",
    "Cannot mutate immutable namespace": "a table that was written in braces is extended elsewhere",
    "Invalid value": "a value is missing or is not TOML; text needs quotes",
}
_PIECE = re.compile(
    r'"""(?:[^\\]|\\.)*?"""+|\'\'\'.*?\'\'\'+'  # multi-line strings, which may end in more than three quotes
    r'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\''
    r"|\#[^\n]*|[\[\]{},=.\n]|[^\s\[\]{},=.\#\"']+",
    re.DOTALL,
)


def read_toml(text: str, label: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The table, and the line (from 1) of its keys. Raises ConfigError with line and column where the text is not TOML."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_syntax_problem(str(error), label)]) from error
    return table, key_lines(text)


def _syntax_problem(message: str, label: str) -> Problem:
    position = _POSITION.search(message)
    cause = message[: position.start()] if position else message
    where = f"{label}:{position[1]}:{position[2]}" if position and position[1] else label
    plain = next((words for start, words in _PLAIN_MESSAGES.items() if cause.startswith(start)), None)
    if plain is None:
        plain = f"is not TOML: {cause[:1].lower()}{cause[1:]}"
    return Problem(where, plain, "Correct the file at this place")


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) on which each table header and each key outside braces is, in well-formed TOML."""
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    statement: list[str] = []
    depth = 0
    line = statement_line = 1
    for match in _PIECE.finditer(text + "\n"):
        piece = match[0]
        if piece == "\n" and depth == 0:
            if statement[:1] == ["["]:
                table = _header(statement, counts)
                lines[table] = statement_line
            elif "=" in statement:
                path = (*table, *_key_parts(statement[: statement.index("=")]))
                for end in range(len(table) + 1, len(path) + 1):
                    lines.setdefault(path[:end], statement_line)
            statement = []
        elif piece != "\n" and not piece.startswith("#"):
            if not statement:
                statement_line = line
            # Brackets of a header open and close on one line, so that one depth serves headers and values alike.
            depth += (piece in "[{") - (piece in "]}")
            statement.append(piece)
        line += piece.count("\n")
    return lines


def _header(statement: list[str], counts: dict[KeyPath, int]) -> KeyPath:
    """The table that `[a.b]` or `[[a.b]]` opens; a name that belongs to a list of tables means its newest element."""
    is_list = statement[1] == "["
    names = _key_parts(statement[2:-2] if is_list else statement[1:-1])
    path: KeyPath = ()
    for position, name in enumerate(names):
        path = (*path, name)
        if is_list and position == len(names) - 1:
            counts[path] = counts.get(path, 0) + 1
        if path in counts:
            path = (*path, counts[path] - 1)
    return path


def _key_parts(tokens: list[str]) -> list[str]:
    parts = []
    for piece in tokens:
        if piece == ".":
            continue
        # A quoted key follows the rules of strings: let tomllib undo the escapes.
        parts.append(str(tomllib.loads(f"key = {piece}")["key"]) if piece[0] in "\"'" else piece)
    return parts
