"""Masks as transformers' layers take them ready-made: every row has places of its own."""

from typing import Any

import torch
from torch import Tensor

from skyrl_engine import UnsupportedError
from skyrl_engine_generators.batch_invariance import EAGER, SDPA

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def kinds_of_attention(config: Any) -> tuple[str, ...]:
    """Return the kinds that layers of a text model have. Raises UnsupportedError for others than those that `make_masks` makes."""
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None)
    kinds = tuple(sorted(set(types))) if types else (SLIDING if getattr(text, "sliding_window", None) else FULL,)
    if strange := set(kinds) - {FULL, SLIDING, CHUNKED}:
        raise UnsupportedError(
            f"layers of the type {min(strange)} hold more than keys and values",
            remedy="Sample without a cache, as the fall-back does",
        )
    return kinds


def make_masks(config: Any, kinds: tuple[str, ...], places_NQ: Tensor, end: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Let the tokens at `places_NQ` int64[n, q] see those of their rows, themselves included, that their layer may see, among `end` places.

    [n, 1, q, end], in boolean, or to be added where attention is not torch's; by kind where layers differ.
    """
    text = config.get_text_config(decoder=True)
    attention = config._attn_implementation  # noqa: SLF001 - transformers offers no other way to read it
    places = torch.arange(end, device=places_NQ.device)
    at = places_NQ[..., None]
    masks = {}
    for kind in kinds:
        seen = places <= at
        if kind == SLIDING:
            seen = seen & (places > at - text.sliding_window)
        elif kind == CHUNKED:
            seen = seen & (places >= at // text.attention_chunk_size * text.attention_chunk_size)
        seen = seen[:, None]
        hidden = {"eager": torch.finfo(dtype).min, EAGER: torch.finfo(dtype).min, SDPA: -torch.inf}.get(attention)
        if hidden is not None:
            # filled in the dtype itself: the least of float64 is no float32
            seen = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, hidden)
        masks[kind] = seen
    return masks if len(masks) > 1 else next(iter(masks.values()))
