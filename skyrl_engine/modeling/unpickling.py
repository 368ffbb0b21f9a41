"""Read files that torch pickled without running code that they may hold, and say in our own words why one is refused.

torch's own message advises to switch this protection off.
"""

import pickle
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from skyrl_engine.errors import ModelError

UNREADABLE: Final = (
    OSError,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    EOFError,
    AssertionError,
    pickle.UnpicklingError,
    SafetensorError,
)
"""Exceptions that are raised for a file that is missing, damaged or made to do harm."""


TO_SAFETENSORS: Final = "Use the model's safetensors files, or convert this one to safetensors on a machine where you trust it"


def refuse_code(files: Iterable[Path]) -> None:
    """Raise ModelError for files of torch.save among these whose pickle names functions or classes that would run. Runs none of it."""
    for file in files:
        if file.suffix == ".safetensors":
            continue
        try:
            named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        except UNREADABLE:
            # damaged, or of the form before torch 1.6: what reads it says so
            continue
        if named:
            raise ModelError(
                f"{file} holds more than tensors and plain values, which could run code while it is read: {', '.join(sorted(named)[:3])}",
                remedy=TO_SAFETENSORS,
            )


def load_pickled(path: Path) -> Any:
    """Return the tensors and plain values in a file of torch.save, on the CPU and mapped into memory. Raises one of `UNREADABLE`."""
    if path.is_file() and not zipfile.is_zipfile(path):
        # torch would say how to save it otherwise
        raise pickle.UnpicklingError(f"{path} is no file of torch.save")
    with warnings.catch_warnings():
        # about pickles that torch.save does not write: they are refused, or hold nothing but plain values
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def failure(error: BaseException) -> str:
    """Return why a file cannot be read, in one clause: the first line of the error, or our own words where its content is refused."""
    if is_refused(error):
        return "it is damaged, or holds more than tensors and plain values, which could run code while it is read"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).strip().rstrip(".")


def is_refused(error: BaseException) -> bool:
    """Return True if this error, or one that caused it, is the refusal to unpickle a file's content."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, pickle.UnpicklingError):
            return True
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False
