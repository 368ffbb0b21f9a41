"""From datasets to sample columns."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_engine.data.dataset import DataCounts, TokenizedDataset, load_columns
    from skyrl_engine.data.tokenizer import load_tokenizer

__all__ = ["DataCounts", "TokenizedDataset", "load_columns", "load_tokenizer"]

_HOMES = {
    "DataCounts": "skyrl_engine.data.dataset",
    "TokenizedDataset": "skyrl_engine.data.dataset",
    "load_columns": "skyrl_engine.data.dataset",
    "load_tokenizer": "skyrl_engine.data.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
