"""Noise on input embeddings in training (NEFTune; Jain et al. 2023, arXiv 2310.05914, algorithm 1), a function of keys alone.

A token's noise depends on its key and on nothing else: not on its row, micro-batch, rank or device. The bits of component i of a token with key
k are those of SplitMix64 (Steele et al. 2014, figure 16) at state k + i * `GOLDEN`; 24 of them give a number uniform in [-1, 1).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from skyrl_engine.contracts.kinds.backend import EmbeddingNoise
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import ModelError, UnsupportedError

GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_SHIFTS: Final = (30, 27)
_AT_ONCE: Final = 1 << 22
"""Components that are drawn at a time, of eight bytes and several temporaries each."""


def draw_noise(keys: Tensor, width: int) -> Tensor:
    """Return float32[n, width], uniform in [-1, 1), from the keys int64[n] of tokens; alike on every device."""
    counters = torch.arange(width, device=keys.device) * GOLDEN
    noise = torch.empty(len(keys), width, device=keys.device)
    size = max(1, _AT_ONCE // width)
    for start in range(0, len(keys), size):
        bits = keys[start : start + size, None] + counters
        for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
            bits = (bits ^ _shift_right(bits, shift)) * factor
        bits ^= _shift_right(bits, 31)
        noise[start : start + size] = _shift_right(bits, 40).float() * 2.0**-23 - 1.0
    return noise


def make_noise(noise: EmbeddingNoise, width: int, dtype: torch.dtype) -> Tensor:
    """Return the noise [tokens, width] of all tokens, in their order."""
    areas = noise.lengths.flatten()[:, None].double() * width
    scales = (noise.alpha / areas.sqrt()).masked_fill(areas == 0, 0.0).to(dtype)
    return scales * draw_noise(noise.keys.flatten(), width).to(dtype)


@contextmanager
def noisy_embeddings(decoder: Any, noise: EmbeddingNoise | None) -> Iterator[None]:
    """Add noise to what the decoder's input embeddings give, until the context is left; None: none.

    Raises ModelError at the end where the decoder did not look its tokens up once.
    """
    if noise is None:
        yield
        return
    calls = 0

    def add(_embeddings: nn.Module, _inputs: Any, embedded_BTH: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return embedded_BTH + make_noise(noise, embedded_BTH.shape[-1], embedded_BTH.dtype).view_as(embedded_BTH)

    handle = decoder.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
    if calls != 1:
        raise ModelError(
            f"{type(decoder).__name__} looked up its embeddings {calls} times in a pass, and noise is of one lookup",
            remedy="Remove model.neftune_alpha",
        )


def refuse_noise(spec: ModelConfig) -> None:
    """Raises UnsupportedError for noise where samples share prefixes: their tokens are computed once, with one noise."""
    if spec.neftune_alpha is not None:
        raise UnsupportedError(
            "model.neftune_alpha gives every sample noise of its own, and samples that share a prefix would have the same in it",
            remedy="Remove model.neftune_alpha, or choose the collator packed",
        )


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift int64 as if it were unsigned."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
