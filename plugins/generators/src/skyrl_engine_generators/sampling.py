"""Draw tokens by inverting the distribution function, in float64, with one uniform number per token.

Drawing a random number per token of the vocabulary (multinomial, Gumbel) costs five times as much, and a running sum in float32 never reaches
tokens that add less than its last digit. A row's draw depends on its logits and its uniform number alone.
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine.contracts import Sampling

BLOCK = 128
"""Probabilities are added up in blocks of so many tokens; then inside the block that the draw fell into."""


@frozen(eq=False)
class DrawnTokens:
    """`tokens` int64[n], `logprobs` float64[n]; `scaled` [n, vocabulary] less `normalizer` [n, 1] are the log-probabilities of all tokens."""

    tokens: Tensor
    logprobs: Tensor
    scaled: Tensor
    normalizer: Tensor


@frozen(eq=False)
class RowDistributions:
    """The distributions of n rows, laid out once for as long as the rows stay.

    `divisor` [n, 1] is None where no temperature changes anything, `greedy` bool[n] where no row takes the most likely token.
    """

    divisor: Tensor | None
    greedy: Tensor | None
    cut_off: tuple[tuple[int, Sampling], ...]

    @classmethod
    def of(cls, rows: Sequence[Sampling], device: torch.device) -> "RowDistributions":
        temperatures = [row.temperature for row in rows]
        divisors = [1.0 if temperature == 0 else temperature for temperature in temperatures]
        greedy = [temperature == 0 for temperature in temperatures]
        return cls(
            None if all(divisor == 1 for divisor in divisors) else torch.tensor(divisors, device=device)[:, None],
            torch.tensor(greedy, device=device) if any(greedy) else None,
            tuple((place, row) for place, row in enumerate(rows) if row.filtered and row.temperature > 0),
        )


def draw(logits_NV: Tensor, uniforms_N: Tensor, settings: RowDistributions) -> DrawnTokens:
    """Draw one token per row; `uniforms_N` float64[n] in [0, 1). Rows of temperature 0 take the most likely token."""
    scaled_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if settings.divisor is not None:
        scaled_NV = scaled_NV / settings.divisor.to(scaled_NV.dtype)
    if settings.cut_off:
        if scaled_NV is logits_NV:
            scaled_NV = scaled_NV.clone()
        for row, sampling in settings.cut_off:
            scaled_NV[row] = cut_off(scaled_NV[row], sampling)
    highest_N1 = scaled_NV.amax(-1, keepdim=True)
    weights_NV = (scaled_NV - highest_N1).exp_()
    vocabulary = weights_NV.shape[1]
    running = _block_sums(weights_NV).cumsum(-1)
    total_N1 = running[:, -1:]
    target = uniforms_N[:, None] * total_N1
    # a rounded product may reach the total, after the last block that holds anything; the same for positions inside the block
    block = torch.minimum(torch.searchsorted(running, target, right=True), (running < total_N1).sum(-1, keepdim=True))
    rest = target - torch.where(block > 0, running.gather(1, (block - 1).clamp(min=0)), 0.0)
    columns = block * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = weights_NV.gather(1, columns.clamp(max=vocabulary - 1)).double() * (columns < vocabulary)
    within = inside.cumsum(-1)
    place = torch.minimum(torch.searchsorted(within, rest, right=True), (within < within[:, -1:]).sum(-1, keepdim=True))
    tokens_N1 = block * BLOCK + place
    if settings.greedy is not None:
        tokens_N1 = torch.where(settings.greedy[:, None], scaled_NV.argmax(-1, keepdim=True), tokens_N1)
    tokens_N1 = tokens_N1.clamp(max=vocabulary - 1)
    normalizer_N1 = highest_N1 + total_N1.log()
    # subtracted in float64: the sum of all weights is at least 1, so no logarithm of a probability comes out above 0
    logprobs = (scaled_NV.gather(1, tokens_N1).double() - highest_N1.double() - total_N1.log())[:, 0]
    return DrawnTokens(tokens_N1[:, 0], logprobs, scaled_NV, normalizer_N1)


def logprobs_of(logits_NV: Tensor, tokens_NK: Tensor, temperature: float) -> Tensor:
    """float64[n, k]: log-probabilities of given tokens under softmax(logits / temperature); temperature 0 counts as 1."""
    scaled = (logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()) / (temperature or 1.0)
    return scaled.gather(1, tokens_NK).double() - scaled.double().logsumexp(-1, keepdim=True)


def cut_off(scaled_V: Tensor, sampling: Sampling) -> Tensor:
    """Set the logits of one row to minus infinity where `top_k`, then `top_p`, then `min_p` cut its distribution off."""
    ordered, places = scaled_V.sort(descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        kept[sampling.top_k :] = False
    probabilities = ordered.masked_fill(~kept, -torch.inf).double().softmax(-1)
    # the first token that reaches the mass stays
    kept &= probabilities.cumsum(-1) - probabilities < sampling.top_p
    kept &= probabilities >= sampling.min_p * probabilities[0]
    kept[0] = True
    return scaled_V.masked_fill(~torch.zeros_like(kept).scatter(0, places, kept), -torch.inf)


def _block_sums(weights_NV: Tensor) -> Tensor:
    """float64[n, blocks]."""
    blocks, rest = divmod(weights_NV.shape[1], BLOCK)
    parts = []
    if blocks:
        parts.append(weights_NV[:, : blocks * BLOCK].view(-1, blocks, BLOCK).sum(-1, dtype=torch.float64))
    if rest:
        parts.append(weights_NV[:, blocks * BLOCK :].sum(-1, keepdim=True, dtype=torch.float64))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
