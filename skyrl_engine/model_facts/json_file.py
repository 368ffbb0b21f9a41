"""Read a JSON file of a model's directory, with errors that name the file and the place in it."""

import json
from pathlib import Path
from typing import Any, Final

from skyrl_engine.errors import ModelError

_AGAIN: Final = "Repair it, or copy it again from the model's source"
_POINTER: Final = b"version https://git-lfs.github.com/spec/"
_NAMES: Final = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth value", type(None): "null"}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError that names file, line and column."""
    refuse_pointer(path)
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is no text file: byte {error.start} is not UTF-8", remedy=_AGAIN) from error
    except json.JSONDecodeError as error:
        what = "is empty" if not text.strip() else f"is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        raise ModelError(f"{path} {what}", remedy=_AGAIN) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", remedy="Make it readable") from error
    except RecursionError as error:
        raise ModelError(f"{path} is nested too deeply to be read", remedy=_AGAIN) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds {_NAMES[type(content)]}, where a JSON object ({{...}}) is due", remedy=_AGAIN)
    return content


def refuse_pointer(path: Path) -> None:
    """Raise ModelError for the pointer that a clone without Git LFS leaves in the place of a large file."""
    try:
        with path.open("rb") as file:
            pointer = file.read(len(_POINTER)) == _POINTER
    except OSError:
        return
    if pointer:
        raise ModelError(
            f"{path} is a Git LFS pointer: the file itself was not downloaded", remedy="Run `git lfs pull` in the model's directory"
        )
