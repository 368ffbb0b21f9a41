"""Attention over rows of trees: the runs of a row one by one, or on CUDA all of them in one kernel over a block mask."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling import tree_kernel
from skyrl_engine.modeling.segments import Run, Segments


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scaling: float | None,
    window: int | None,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention [1, tokens, heads, d] for query [1, heads, tokens, d], key and value [1, key heads, tokens, d].

    A token sees itself, what comes before it in its run, and the path of the run; of all these the last `window` (None: all of them).
    A run without a path is computed as a document of a packed row is, with the same bits. Raises UnsupportedError for dropout, which would
    drop the same entries in all samples that share a prefix.
    """
    if dropout:
        raise UnsupportedError(
            f"{type(module).__name__} drops attention at the rate {dropout}, and samples that share a prefix would drop the same of it",
            remedy="Set the dropout of the model to 0, or choose the collator packed",
        )
    if tree_kernel.takes(query, key, value, window=window):
        return tree_kernel.attend(query, key, value, segments, scaling=scaling, window=window)
    outputs = [_attend_run(module, query, key, value, run, segments, scaling, window) for run in segments.runs]
    return torch.cat(outputs, 1)


def _attend_run(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    run: Run,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return [1, tokens of the run, heads, d]."""
    pieces = _within(run, window)
    length, prefix = run.stop - run.start, sum(stop - start for start, stop in pieces)
    own_query = query[:, :, run.start : run.stop]
    seen_key, seen_value = (_take(tensor, (*pieces, (run.start, run.stop))) for tensor in (key, value))
    if not prefix and (window is None or length <= window):
        output, _ = sdpa_attention_forward(module, own_query, seen_key, seen_value, None, scaling=scaling, is_causal=True)
        return output
    mask_key = (length, prefix, window, query.device)
    if mask_key not in segments.kept:
        segments.kept[mask_key] = mask_of_run(length, prefix, window, query.device)
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        own_query, seen_key, seen_value, attn_mask=segments.kept[mask_key], scale=scaling, enable_gqa=grouped
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
