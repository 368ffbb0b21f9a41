"""Attention over a row of segments, one run after the other, with torch's scaled dot-product attention."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyrl_engine.modeling.segments import Run, Segments, join_pieces

AttendDocument = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Causal attention within one document: query, key, value [1, heads, tokens, d] and a mask (None: causal alone) to [1, tokens, heads, d]."""


def attend_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    attend_document: AttendDocument,
    *,
    scaling: float | None,
    window: int | None,
    dropout: float = 0.0,
    attend_path: AttendDocument | None = None,
) -> Tensor:
    """Return attention [1, tokens, heads, d] for query [1, heads, tokens, d] of the tokens of runs, one run after another.

    `key` and `value` [1, key heads, row, d] are those of the row that the runs lie in. A token sees itself, what comes before it in its run,
    and the path of the run; of all these the last `window` (None: all of them). A run without a path begins a document, for which
    `attend_document` is called: the same bits, whatever other runs share. Runs with a path are attended by `attend_path` (None: torch's kernel,
    which drops `dropout` of their scores).
    """
    queries = torch.split(query, [run.stop - run.start for run in segments.runs], 2)
    outputs = [
        _attend_run(own, key, value, run, segments, attend_document, scaling, window, dropout, attend_path)
        for own, run in zip(queries, segments.runs, strict=True)
    ]
    return torch.cat(outputs, 1)


def _attend_run(
    own_query: Tensor,
    key: Tensor,
    value: Tensor,
    run: Run,
    segments: Segments,
    attend_document: AttendDocument,
    scaling: float | None,
    window: int | None,
    dropout: float,
    attend_path: AttendDocument | None,
) -> Tensor:
    """Return [1, tokens of the run, heads, d]."""
    pieces = _within(run, window)
    length, prefix = run.stop - run.start, sum(stop - start for start, stop in pieces)
    seen_key, seen_value = (_take(tensor, join_pieces((*pieces, (run.start, run.stop)))) for tensor in (key, value))
    mask = None
    if prefix or (window is not None and length > window):
        device = own_query.device
        mask = segments.keep((length, prefix, window, device), lambda: mask_of_run(length, prefix, window, device))
    if not prefix:
        return attend_document(own_query, seen_key, seen_value, mask)
    if attend_path is not None:
        return attend_path(own_query, seen_key, seen_value, mask)
    grouped = own_query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        own_query, seen_key, seen_value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2)


def _within(run: Run, window: int | None) -> tuple[tuple[int, int], ...]:
    """Return the pieces of the run's path that any of its tokens sees through a sliding window."""
    if window is None:
        return run.path
    left = window - 1  # the first token of the run sees the most of the path
    pieces: list[tuple[int, int]] = []
    for start, stop in reversed(run.path):
        if left <= 0:
            break
        pieces.append((max(start, stop - left), stop))
        left -= stop - start
    return tuple(reversed(pieces))


def _take(tensor: Tensor, pieces: tuple[tuple[int, int], ...]) -> Tensor:
    parts = [tensor[:, :, start:stop] for start, stop in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def mask_of_run(length: int, prefix: int, window: int | None, device: torch.device) -> Tensor:
    """Return a mask, bool [1, 1, length, prefix + length], by which token i of a run sees the tokens of its path, and its run up to itself.

    `prefix` counts the tokens of the path; with a `window` it sees the last so many of all these alone.
    """
    place = torch.arange(prefix + length, device=device)
    distance = place[prefix:, None] - place
    seen = distance >= 0
    return (seen if window is None else seen & (distance < window))[None, None]
