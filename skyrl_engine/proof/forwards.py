"""Forward passes of a model, watched: how many rows of how many tokens it got each time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen


@frozen
class Forward:
    """One forward pass that a gradient is computed of: `rows` of `tokens` positions each, padding included."""

    rows: int
    tokens: int


@contextmanager
def watch_forwards(model: torch.nn.Module) -> Iterator[list[Forward]]:
    """Yield a list that grows with every forward pass of `model` that records for backward, in this process."""
    seen: list[Forward] = []

    def note(_module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids = keywords.get("input_ids", arguments[0] if arguments else None)
        if torch.is_grad_enabled() and isinstance(ids, torch.Tensor) and ids.ndim == 2:
            seen.append(Forward(*ids.shape))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()
