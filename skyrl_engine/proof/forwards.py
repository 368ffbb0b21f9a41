"""Forward passes of a model, watched: how many rows of how many tokens it got each time, and where they were padded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen


@frozen
class Forward:
    """One forward pass that a gradient is computed of: `rows` of `tokens` positions each, padding included.

    `left` and `right` are the padded positions of all rows on either side, as an attention mask of rows and positions shows them; None where
    there was no such mask.
    """

    rows: int
    tokens: int
    left: int | None = None
    right: int | None = None


@contextmanager
def watch_forwards(model: torch.nn.Module) -> Iterator[list[Forward]]:
    """Yield a list that grows with every forward pass of `model` that records for backward, in this process."""
    watcher = _Watcher([])
    handle = model.register_forward_pre_hook(watcher, with_kwargs=True)
    try:
        yield watcher.seen
    finally:
        handle.remove()


@frozen(eq=False)
class _Watcher:
    """The hook; an object of a class, so that a model that is watched can be copied and sent to ranks."""

    seen: list[Forward]

    def __call__(self, _module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids = keywords.get("input_ids", arguments[0] if arguments else None)
        if torch.is_grad_enabled() and isinstance(ids, torch.Tensor) and ids.ndim == 2:
            self.seen.append(Forward(*ids.shape, *_count_padding(keywords.get("attention_mask"), ids)))


def _count_padding(mask: Any, ids: torch.Tensor) -> tuple[int, int] | tuple[None, None]:
    """Count the positions before the first token of every row, and after its last one. A row of padding alone counts as padded on the right."""
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        return None, None
    tokens = mask.bool()
    after = int((~tokens).flip(1).int().cumprod(1).sum())
    before = int(((~tokens).int().cumprod(1) * tokens.any(1, keepdim=True)).sum())
    return before, after
