"""Attention over a whole row of trees in one CUDA kernel: torch's FlexAttention over a block mask.

NOT PROVEN HERE: tests on a machine without a CUDA device run its mask alone, in FlexAttention's plain form. So the first call with new sizes
compares the kernel's output and gradients, on that device, with attention over an explicit mask; if they differ, runs are attended one by one,
as on the CPU.
"""

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyrl_engine.modeling.document_kernel import DTYPES, LARGEST_HEAD, TOLERANCE, isolate
from skyrl_engine.modeling.segments import Segments

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

PROBE = Segments((40, 18, 5, 7, 30), parents=(-1, 0, 1, 0, -1))
PROBE_WINDOW, PROBE_SCALE = 23, 0.7
"""A window shorter than some documents of the probe, and a scale relative to the kernel's default that differs from it."""

BLOCK = 128
"""Tokens of a block's side, FlexAttention's own."""

logger = logging.getLogger(__name__)


def takes(query: Tensor, key: Tensor, value: Tensor, *, window: int | None) -> bool:
    """Return True if the kernel correctly attends from `query` [1, heads, tokens, d] to `key` and `value` [1, key heads, tokens, d]."""
    head = query.shape[3]
    alike = key.dtype == value.dtype == query.dtype and key.shape[3] == value.shape[3] == head
    if not query.is_cuda or query.dtype not in DTYPES or not alike or head > LARGEST_HEAD or head & (head - 1):
        return False
    return _is_kernel_right(query.device, query.dtype, query.shape[1], key.shape[1], head, window is not None)


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, window: int | None) -> Tensor:
    """Return attention [1, tokens, heads, d]; a token sees what `run_attention.attend_runs` says."""
    mask = segments.keep(("block mask", window, query.device), lambda: block_mask(segments, window, query.device))
    kernel = _kernel(compiled=query.is_cuda)
    grouped = query.shape[1] != key.shape[1]
    output: Tensor = kernel(query, key, value, block_mask=mask, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2)


def block_mask(segments: Segments, window: int | None, device: torch.device) -> "BlockMask":
    """Return the mask of a row: token q sees column k from k on up to the end of the last segment below k's own.

    `window` counts positions, which are columns but for the pieces between a path and its run. Blocks are found by arithmetic on their bounds,
    because a mask of tokens x tokens, from which FlexAttention's own `create_block_mask` counts them, takes gigabytes for long rows.
    """
    from torch.nn.attention.flex_attention import BlockMask  # it takes long to import, and on CUDA alone is it needed

    until_T = torch.tensor(segments.seen_until).repeat_interleave(torch.tensor(segments.lengths))
    position_T = positions_of(segments)
    partial_QK, full_QK = _sort_blocks(until_T, position_T, window)
    until_T, position_T = until_T.to(device), position_T.to(device)

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k <= q) & (q < until_T[k])
        return seen if window is None else seen & (position_T[q] - position_T[k] < window)

    (asked, asked_columns), (whole, whole_columns) = (_list_columns(blocks.to(device)) for blocks in (partial_QK, full_QK))
    tokens = len(until_T)
    return BlockMask.from_kv_blocks(
        asked, asked_columns, whole, whole_columns, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tokens, tokens)
    )


def _sort_blocks(until_T: Tensor, position_T: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Return two bool[blocks, blocks] of queries x columns: blocks whose mask must be asked, and those of which everything is seen.

    Blocks in neither have no pair that sees. A block whose mask must be asked may have none either.
    """
    tokens = len(until_T)
    start = torch.arange(0, tokens, BLOCK)
    stop = start + BLOCK
    beyond = -(-tokens // BLOCK) * BLOCK - tokens
    latest, earliest = (_by_block(until_T, beyond, fill).aminmax(dim=1) for fill in (0, tokens))
    low, high = (_by_block(position_T, beyond, fill).aminmax(dim=1) for fill in (tokens, -1))
    partial_QK = (start[None, :] <= start[:, None]) & (latest.max[None, :] > start[:, None])
    full_QK = (stop[None, :] <= start[:, None]) & (earliest.min[None, :] >= stop[:, None]) & (stop[:, None] <= tokens)
    if window is not None:
        full_QK &= high.max[:, None] - low.min[None, :] < window
        partial_QK &= low.min[:, None] - high.max[None, :] < window
    return partial_QK & ~full_QK, full_QK


def _by_block(value_T: Tensor, beyond: int, fill: int) -> Tensor:
    """Return [blocks, `BLOCK`] of a value per token, with `fill` for the tokens that the last block is short of."""
    return torch.nn.functional.pad(value_T, (0, beyond), value=fill).reshape(-1, BLOCK)


def _list_columns(blocks_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32[1, 1, blocks] and int32[1, 1, blocks, blocks]: how many of a row are set, and their columns first."""
    columns = blocks_QK.int().argsort(dim=1, descending=True, stable=True)
    return blocks_QK.sum(1, dtype=torch.int32)[None, None], columns.int()[None, None]


def positions_of(segments: Segments) -> Tensor:
    """Return int64[tokens]: the place of every token in its documents, which count from 0."""
    return torch.cat([torch.arange(start, start + length) for start, length in zip(segments.starts, segments.lengths, strict=True)])


@cache
def _kernel(*, compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


@cache
def _is_kernel_right(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head: int, windowed: bool) -> bool:
    """Compare one forward and backward pass over `PROBE`; return False, with a warning, if the kernel fails or differs."""
    try:
        compare(device, dtype, heads, key_heads, head, PROBE_WINDOW if windowed else None)
    except torch.OutOfMemoryError:
        # it says nothing about the kernel
        raise
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises on a device that it was not built for
        lines = str(error).strip().splitlines()
        logger.warning(
            "rows of trees are attended run by run: FlexAttention does not serve %s heads of %s on %s (%s: %s)",
            heads,
            head,
            device,
            type(error).__name__,
            lines[0] if lines else "no message",
        )
        return False
    return True


def compare(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head: int, window: int | None) -> None:
    """Raises if output or gradients over `PROBE` differ from the float32 definition by more than `TOLERANCE`."""
    draw, tokens = torch.Generator().manual_seed(0), sum(PROBE.lengths)
    shapes = ((1, heads, tokens, head), (1, key_heads, tokens, head), (1, key_heads, tokens, head), (1, tokens, heads, head))
    segments = Segments(PROBE.lengths, PROBE.parents)
    results = []
    with isolate(device):
        *drawn, upstream = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
        for compute in (attend_by_mask, attend):
            inputs = query, key, value = tuple(tensor.clone().requires_grad_() for tensor in drawn)
            output = compute(query, key, value, segments, scaling=PROBE_SCALE * head**-0.5, window=window)
            results.append([output.detach(), *torch.autograd.grad(output, inputs, upstream)])
    for what, wanted, got in zip(("output", "query's gradient", "keys' gradient", "values' gradient"), *results, strict=True):
        difference = float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
        if not difference <= TOLERANCE:
            raise ArithmeticError(f"its {what} is off by {difference:.1e}")


def attend_by_mask(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, window: int | None
) -> Tensor:
    """Compute `attend` by its definition, in float32 with a mask of tokens x tokens."""
    parents = segments.parents or (-1,) * len(segments.lengths)
    above: list[set[int]] = []
    for segment, parent in enumerate(parents):
        above.append({segment} | (above[parent] if parent >= 0 else set()))
    owner = torch.arange(len(parents)).repeat_interleave(torch.tensor(segments.lengths))
    on_path = torch.tensor([[other in seen for other in range(len(parents))] for seen in above])[owner][:, owner]
    place = torch.arange(len(owner))
    position = positions_of(segments)
    distance = position[:, None] - position
    seen = on_path & (place[:, None] >= place) & (distance < (len(owner) if window is None else window))
    output = torch.nn.functional.scaled_dot_product_attention(
        query.float(),
        key.float(),
        value.float(),
        attn_mask=seen.to(query.device),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).to(query.dtype)
