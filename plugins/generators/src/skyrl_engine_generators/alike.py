"""Rows that come out alike whatever is computed beside them: sums are rounded in one order on a CPU.

Matrix products of few rows, and attention of a single query, are added up by kernels of their own, so that the last bits of a row would tell
how many others there were. With sixteen rows or a multiple of it all are computed by the same kernel, for any number of threads: measured
with MKL and oneDNN as torch 2.13 brings them. Runs that were killed rely on it, since they sample again with other rows beside.
"""

from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ROWS: Final = 16
"""Rows of matrix products come in multiples of this, and so do the places that attention looks at."""

QUERIES: Final = 4
"""Queries that attend to the same keys come in multiples of this."""

NAME = "skyrl_engine_generators_sdpa"


def filled_up(count: int, device: torch.device) -> int:
    """Return the number of rows, at least `count`, of which each comes out as it would beside any others."""
    return -(-count // ROWS) * ROWS if device.type == "cpu" else count


def filled_rows(rows: Tensor) -> Tensor:
    """Return [m, width]: the n rows, and zeros behind them."""
    missing = filled_up(len(rows), rows.device) - len(rows)
    return pad(rows, (0, 0, 0, missing)) if missing else rows


def attend_alike(model: Any) -> None:
    """Let a model on a CPU, whose attention is torch's, attend from single tokens as from whole prompts; leave others as they are."""
    device = next(model.parameters()).device
    if device.type != "cpu" or model.config._attn_implementation != "sdpa":  # noqa: SLF001 - transformers offers no other way to read it
        return
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Attend from [rows, heads, tokens, d] to keys and values [rows, key heads, places, d]; [rows, tokens, heads, d].

    The heads that share keys are queries of one product where each has one token, filled up to `QUERIES`.
    """
    masked = attention_mask is not None and attention_mask.shape[1] == 1
    if query.shape[2] != 1 or not masked or others.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)  # type: ignore[no-any-return] # untyped there
    rows, heads, _, width = query.shape
    key_heads = key.shape[1]
    shared = heads // key_heads
    packed = pad(query.view(rows, key_heads, shared, width), (0, 0, 0, -shared % QUERIES))
    # the module would say that heads share keys, which is taken care of
    output, _ = sdpa_attention_forward(SimpleNamespace(is_causal=False), packed, key, value, attention_mask, **others)
    return output[:, :shared].transpose(1, 2).reshape(rows, 1, heads, value.shape[-1]), None
