"""Attention on a CPU in shapes that a token's own place decides, for tokens that are sampled and for prompts; see `batch_invariance`.

A prompt may be read in any number of passes, each from any place on: its tokens attend in pieces of `PIECE`, which begin at multiples of it
wherever the pass begins, to blocks of `PLACES` (`reading`). So keys and values of a token follow from the tokens up to it alone, to the last
bit, and those of a history that was kept are those of the history read again.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skyrl_engine_generators.buckets import BUCKET, PIECE, PLACES, QUERIES, apply_aligned, round_up
from skyrl_engine_generators.reading import READ_LAYOUT, ReadLayout


def attend_in_blocks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Attend from single tokens [rows, heads, 1, d], or a line of new ones [1, heads, tokens, d], to keys [live, key heads, places, d].

    To `PLACES` places at a time; the heads that share keys are queries of one product. [rows, 1, heads, d], with zeros after the live rows, or
    [1, tokens, heads, d].
    """
    reading = READ_LAYOUT.get()
    of_model = others.get("position_bias") is not None or others.get("softcap") is not None
    if reading is not None and of_model:
        return _attend_apart(module, query, key, value, attention_mask, reading, **others), None
    masked = attention_mask is not None and attention_mask.shape[1] == 1
    if of_model or not masked or (query.shape[2] > 1 and reading is None):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)  # type: ignore[no-any-return] # untyped there
    assert attention_mask is not None
    if attention_mask.dtype == torch.bool:
        attention_mask = torch.where(attention_mask, 0.0, -torch.inf).to(query.dtype)
    scale = others.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if reading is None:
        attended = _fill(_attend_from_last(query[: len(key)], key, value, attention_mask, scale), len(query))
    else:
        attended = _attend_from_pieces(query, key, value, attention_mask, scale, reading)
    return attended.to(query.dtype), None


def _attend_from_last(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One token per row."""
    rows, heads, _, width = query.shape
    group_size = heads // key.shape[1]
    packed = pad(query.reshape(rows, key.shape[1], group_size, width), (0, 0, 0, -group_size % QUERIES))
    joined = _attend_to_blocks(packed, key, value, mask, scale)[:, :, :group_size]
    return joined.reshape(rows, 1, heads, value.shape[-1])


def _attend_from_pieces(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, reading: ReadLayout) -> Tensor:
    """Tokens of prompts, piece by piece: each stands in the piece of its place, whose other tokens it does not see."""
    _, heads, tokens, width = query.shape
    key_heads = key.shape[1]
    group_size = heads // key_heads
    grouped = query[0].view(key_heads, group_size, tokens, width)
    pieces = []
    for piece in reading.pieces:
        rows, end = len(piece.tokens), piece.end
        packed = grouped[:, :, piece.tokens].permute(2, 0, 1, 3, 4).reshape(rows, key_heads, group_size * PIECE, width)
        seen = mask[0, 0, :, :end][piece.tokens][:, None].repeat(1, 1, group_size, 1)
        joined = _attend_to_blocks(packed, key[:rows, :, :end], value[:rows, :, :end], seen, scale)
        pieces.append(joined.view(rows, key_heads, group_size, PIECE, -1).permute(0, 3, 1, 2, 4).reshape(rows * PIECE, heads, -1))
    return _fill(torch.cat(pieces)[reading.line], tokens)[None]


def _attend_apart(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, reading: ReadLayout, **others: Any
) -> Tensor:
    """Attend as the model does without this module, each row of a line by itself: not in pieces, so that nothing of such a row is kept."""
    rows = []
    for place, tokens in enumerate(reading.rows()):
        row, end = slice(place, place + 1), round_up(reading.starts[place] + reading.lengths[place], PLACES)
        seen = None if mask is None else mask[:, :, tokens, :end]
        rows.append(
            sdpa_attention_forward(module, query[:, :, tokens], key[row, :, :end], value[row, :, :end], seen, **others)[0][0]
        )
    return _fill(torch.cat(rows), query.shape[2])[None]


def attend_row_by_row(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Attend by the model's own code: each row by itself, in pieces, to the places up to its token or to the end of its piece."""
    own, reading = get_own_attention(module), READ_LAYOUT.get()
    if attention_mask is None or (query.shape[2] > 1 and reading is None):
        return own(module, query, key, value, attention_mask, **others)[0], None
    if reading is None:
        rows = []
        for place in range(len(key)):
            row, end = slice(place, place + 1), _find_end(attention_mask[place])
            rows.append(
                own(module, query[row], key[row, :, :end], value[row, :, :end], attention_mask[row, ..., :end], **others)[0]
            )
        return _fill(torch.cat(rows), len(query)), None
    pieces = []
    for number, piece in enumerate(reading.pieces):
        for place, tokens in enumerate(piece.tokens):
            row, end = slice(place, place + 1), (reading.starts[place] // PIECE + number + 1) * PIECE
            seen = attention_mask[:, :, tokens, :end]
            pieces.append(own(module, query[:, :, tokens], key[row, :, :end], value[row, :, :end], seen, **others)[0][0])
    return _fill(torch.cat(pieces)[reading.line], query.shape[2])[None], None


def _find_end(mask: Tensor) -> int:
    """Return the end of the places that a single token sees, as a multiple of `BUCKET`."""
    seen = mask[0, 0] > torch.finfo(mask.dtype).min
    return round_up(int(seen.nonzero().max()) + 1, BUCKET)


def _fill(attended: Tensor, count: int) -> Tensor:
    """Return [count, ...], zeros after what there is."""
    missing = count - len(attended)
    return torch.cat([attended, attended.new_zeros(missing, *attended.shape[1:])]) if missing else attended


def has_own_attention(module: nn.Module) -> bool:
    """Say whether the file of a model has the function that it attends by where no other is chosen."""
    return callable(getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None))


def get_own_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the function that the file of a model attends by where no other is chosen."""
    own: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return own


def _attend_to_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend from [rows, key heads, queries, d], whose masks are [rows, 1, queries or 1, places]; [rows, key heads, queries, d]."""
    parts = []
    for at in range(0, key.shape[2], PLACES):
        places = slice(at, at + PLACES)
        parts.append(_attend(query, key[:, :, places], value[:, :, places], mask[..., places], scale))
    return _join_blocks(parts, mask)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to one block: outputs [rows, heads, queries, d] and the logarithm [rows, heads, queries] of the sum of their weights."""
    if key.shape[-1] == value.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scale)  # type: ignore[no-any-return] # noqa: SLF001 - the function of torch that tells this logarithm
    scores = (query @ key.transpose(-1, -2)).float() * scale + mask
    highest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = apply_aligned(torch.exp, scores - highest)
    total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    return (weights.to(value.dtype) @ value) / total, (highest + apply_aligned(torch.log, total))[..., 0]


def _join_blocks(parts: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """Join the outputs of blocks, in their order: what a block adds to a row that sees none of it is exactly 0."""
    if len(parts) == 1:
        return parts[0][0]
    logs = torch.stack([log for _, log in parts])
    unseen = mask.view(*mask.shape[:-1], len(parts), PLACES).amax(-1).movedim(-1, 0) == -torch.inf
    logs.masked_fill_(unseen, -torch.inf)
    shares = apply_aligned(torch.exp, logs - logs.amax(0))[..., None]
    joined, total = parts[0][0].mul_(shares[0]), shares[0].clone()
    for (outputs, _), share in zip(parts[1:], shares[1:], strict=True):
        joined.add_(outputs.mul_(share))
        total.add_(share)
    return joined.div_(total)
