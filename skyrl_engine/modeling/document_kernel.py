"""Attention over all documents of a packed row in one CUDA kernel: torch's `varlen_attn`, which is flash attention.

Tests on a machine without a CUDA device cannot run the kernel. So the first call with new sizes compares its output and gradients, on that
device, with attention over an explicit mask; if they differ, documents are attended one by one, as on the CPU.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from skyrl_engine.modeling.segments import Segments

DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
PROBE = Segments((5, 1, 40, 18))
PROBE_WINDOW, PROBE_SCALE = 7, 0.7
"""A window shorter than some documents of the probe, and a scale relative to the kernel's default that differs from it."""

TOLERANCE = 3e-2
"""Largest difference relative to the largest entry: bfloat16 keeps 8 bits. In short documents a token too many or too few differs by more."""

logger = logging.getLogger(__name__)


def takes(query: Tensor, key: Tensor, value: Tensor, *, window: int | None, dropout: float) -> bool:
    """Return True if the kernel correctly attends from `query` [1, heads, tokens, d] to `key` and `value` [1, key heads, tokens, d]."""
    head = query.shape[3]
    alike = key.dtype == value.dtype == query.dtype and key.shape[3] == value.shape[3] == head
    if not query.is_cuda or query.dtype not in DTYPES or not alike or dropout or head > LARGEST_HEAD or head % HEAD_MULTIPLE:
        return False
    return _is_kernel_right(query.device, query.dtype, query.shape[1], key.shape[1], head, window is not None)


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, window: int | None) -> Tensor:
    """Return attention [1, tokens, heads, d] for query [1, heads, tokens, d], key and value [1, key heads, tokens, d] that `takes` accepts.

    A token attends to itself and to the `window` - 1 tokens before it (None: all tokens before it) of its own document.
    """
    query_THD, key_TGD, value_TGD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    ends, longest = segments.ends(query.device), max(segments.lengths)
    output_THD: Tensor = load_kernel()(
        query_THD,
        key_TGD,
        value_TGD,
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output_THD[None]


def load_kernel() -> Any:
    """Import torch's kernel, which runs on the CPU have no use for, and return it; None where this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return varlen_attn


def find_missing() -> str | None:
    """Return why this torch has no kernel for documents, as a clause; None where it has one."""
    kernel = load_kernel()
    if kernel is None or "enable_gqa" not in inspect.signature(kernel).parameters:
        return f"torch {torch.__version__} has no varlen_attn with grouped heads"
    return None


@cache
def _is_kernel_right(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head: int, windowed: bool) -> bool:
    """Compare one forward and backward pass over `PROBE`; return False, with a warning, if the kernel fails or differs."""
    try:
        _compare(device, dtype, heads, key_heads, head, PROBE_WINDOW if windowed else None)
    except torch.OutOfMemoryError:
        # it says nothing about the kernel
        raise
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises on a device that it was not built for
        lines = str(error).strip().splitlines()
        logger.warning(
            "documents are attended one by one: torch's varlen_attn does not serve %s heads of %s on %s (%s: %s)",
            heads,
            head,
            device,
            type(error).__name__,
            lines[0] if lines else "no message",
        )
        return False
    return True


def _compare(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head: int, window: int | None) -> None:
    """Raises if the kernel's output or gradients differ from the float32 definition by more than `TOLERANCE`.

    Queries, keys and values are laid out in memory as in models: transposed, and as slices of a wider projection.
    """
    if (missing := find_missing()) is not None:
        raise NotImplementedError(missing)
    draw, tokens = torch.Generator().manual_seed(0), sum(PROBE.lengths)
    shapes = ((1, tokens, heads, head), (1, tokens, key_heads, 2 * head), (1, tokens, heads, head))
    results = []
    with isolate(device):
        query, both, upstream = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
        for compute in (_by_mask, attend):
            inputs = query.clone().requires_grad_(), both.clone().requires_grad_()
            key, value = torch.split(inputs[1].transpose(1, 2), head, -1)
            output = compute(inputs[0].transpose(1, 2), key, value, PROBE, scaling=PROBE_SCALE * head**-0.5, window=window)
            results.append([output.detach(), *torch.autograd.grad(output, inputs, upstream)])
    for what, wanted, got in zip(("output", "query's gradient", "keys' and values' gradient"), *results, strict=True):
        difference = float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
        if not difference <= TOLERANCE:
            raise ArithmeticError(f"its {what} is off by {difference:.1e}")


@contextmanager
def isolate(device: torch.device) -> Iterator[None]:
    """Isolate a pass from the one around it: from its gradient mode, autocast, and hooks on saved tensors."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast(device.type, enabled=False), hooks:
        yield


def _by_mask(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scaling: float | None, window: int | None) -> Tensor:
    """Compute `attend` by its definition, in float32 with a mask of tokens x tokens."""
    lengths = torch.tensor(segments.lengths, device=query.device)
    owner = torch.arange(len(lengths), device=query.device).repeat_interleave(lengths)
    place = torch.arange(len(owner), device=query.device)
    distance = place[:, None] - place
    seen = (owner[:, None] == owner) & (distance >= 0) & (distance < (window or len(owner)))
    output = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=seen, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).to(query.dtype)
