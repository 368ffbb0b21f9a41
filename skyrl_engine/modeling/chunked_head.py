"""The language-model head and log-softmax in chunks of positions: forward and backward hold the logits of one chunk at a time."""

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from skyrl_engine.modeling.causal_lm import LogitRule

VOCABULARY_SCORES = ("logprobs", "entropy", "logits")
"""The scores that a head computes from a position's logits, in this order. "logits" is the label's logit, scaled and divided by temperature."""


def asked_of_head(needs: Collection[str]) -> tuple[str, ...]:
    """Return the scores to ask of a head for these `needs`, in order; log-probabilities are always among them."""
    return tuple(name for name in VOCABULARY_SCORES if name == "logprobs" or name in needs)


class ChunkedHead(nn.Module):
    """A linear head that computes logits chunk by chunk and recomputes them in backward instead of keeping them.

    One module contains the whole loop, so that a framework that gathers weights per module call gathers the head once. Its forward must run
    inside the forward of the sharded root, where the head's weight is whole.
    """

    def __init__(self, linear: nn.Linear, rule: LogitRule, logits_per_chunk: int) -> None:
        super().__init__()
        self.linear = linear
        self.rule = rule
        self.positions_per_chunk = max(1, logits_per_chunk // linear.out_features)

    def forward(self, hidden_NH: Tensor, labels_N: Tensor, temperature: float, asked: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Return the scores of `asked_of_head`, each [n], in nats; float32, or float64 for a float64 model.

        They are a tuple, not a list, because DeepSpeed ZeRO-3 follows tensors through tuples only.
        """
        score = Score(self.rule, temperature, asked)
        # some models keep a residual in float32 whatever precision computes (Mamba), and cast it to the head's own, as here
        hidden_NH = hidden_NH.to(self.linear.weight.dtype)
        return chunked_scores(hidden_NH, self.linear.weight, self.linear.bias, labels_N, score, self.positions_per_chunk)


class ChunkScore(Protocol):
    """The function from a chunk's raw logits [n, v] and labels [n] to its scores, each [n], and its gradient."""

    def __call__(self, raw_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, ...]: ...

    def gradient(self, raw_NV: Tensor, labels_N: Tensor, upstream: list[Tensor]) -> Tensor:
        """Return the gradient of the scores, weighted by `upstream`, with respect to the raw logits, in their dtype."""


def chunked_scores(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_N: Tensor, score: ChunkScore, positions_per_chunk: int
) -> tuple[Tensor, ...]:
    """Return the scores [n] of `hidden_NH @ weight_VH.T + bias_V`, chunk by chunk; backward recomputes the logits."""
    # torch leaves `apply` and its result untyped
    return _ChunkedScores.apply(hidden_NH, weight_VH, bias_V, labels_N, score, positions_per_chunk)  # type: ignore[no-any-return, no-untyped-call]


class Score:
    """The `ChunkScore` of a whole vocabulary on one rank."""

    def __init__(self, rule: LogitRule, temperature: float, asked: tuple[str, ...]) -> None:
        self.rule, self.temperature, self.asked = rule, temperature, asked

    def __call__(self, raw_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, ...]:
        logits_NV = self._logits(raw_NV)
        total_N = logits_NV.logsumexp(-1)
        label_N = logits_NV.gather(-1, labels_N[:, None])[:, 0]
        scores = [label_N - total_N]
        if "entropy" in self.asked:
            probabilities_NV = torch.exp(logits_NV - total_N[:, None])
            scores.append(total_N - (probabilities_NV * logits_NV).sum(-1))
        if "logits" in self.asked:
            scores.append(label_N)
        return tuple(scores)

    def gradient(self, raw_NV: Tensor, labels_N: Tensor, upstream: list[Tensor]) -> Tensor:
        """Return the gradient of the scores, weighted by `upstream`, with respect to the raw logits, in their dtype.

        Log-probabilities alone, without a soft cap, have the closed form scale / temperature * (one_hot(label) - softmax), which takes a third
        of the passes over memory that autograd takes.
        """
        if len(self.asked) > 1 or self.rule.softcap is not None:
            with torch.enable_grad():
                raw_NV = raw_NV.requires_grad_()
                scores = self(raw_NV, labels_N)
            return torch.autograd.grad(scores, raw_NV, upstream)[0]
        weight_N = upstream[0] * (self.rule.scale / self.temperature)
        gradient_NV = torch.softmax(self._logits(raw_NV), -1).mul_(-weight_N[:, None])
        return gradient_NV.scatter_add_(-1, labels_N[:, None], weight_N[:, None]).to(raw_NV.dtype)

    def _logits(self, raw_NV: Tensor) -> Tensor:
        """Return the logits that softmax is taken of: by the rule and the temperature, in float32 or float64."""
        logits_NV = self.rule(raw_NV if raw_NV.dtype == torch.float64 else raw_NV.float())
        return logits_NV if self.temperature == 1.0 else logits_NV / self.temperature


class _ChunkedScores(torch.autograd.Function):
    """Sums the weight gradients of all chunks in one buffer of float32 (float64 for a float64 model).

    Autograd's own graph would make a gradient as large as the head for each chunk, beside the sum so far; and for a bfloat16 weight it would
    round the sum to 8 bits after each of perhaps thousands of chunks.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_N: Tensor, score: ChunkScore, size: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, labels_N)
        ctx.score, ctx.size = score, size
        parts = [
            score(nn.functional.linear(hidden, weight_VH, bias_V), labels)
            for hidden, labels in zip(torch.split(hidden_NH, size), torch.split(labels_N, size), strict=True)
        ]
        return tuple(torch.cat(values) for values in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, labels_N = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        sums = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
        hidden_gradient = torch.empty_like(hidden_NH) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight_VH, dtype=sums) if wants_weight else None
        bias_gradient = torch.zeros_like(bias_V, dtype=sums) if wants_bias else None
        for start in range(0, len(labels_N), ctx.size):
            chosen = slice(start, start + ctx.size)
            hidden = hidden_NH[chosen]
            raw_NV = nn.functional.linear(hidden, weight_VH, bias_V)
            gradient_NV = ctx.score.gradient(raw_NV, labels_N[chosen], [each[chosen] for each in upstream])
            del raw_NV
            if hidden_gradient is not None:
                torch.mm(gradient_NV, weight_VH, out=hidden_gradient[chosen])
            if weight_gradient is not None:
                _add_outer(weight_gradient, gradient_NV, hidden)
            if bias_gradient is not None:
                bias_gradient += gradient_NV.sum(0, dtype=sums)
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight_VH.dtype),
            None if bias_gradient is None or bias_V is None else bias_gradient.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _add_outer(total_VH: Tensor, gradient_NV: Tensor, hidden_NH: Tensor) -> None:
    """Add gradient^T hidden to `total_VH`, without a temporary if the dtypes are equal."""
    if gradient_NV.dtype == total_VH.dtype:
        total_VH.addmm_(gradient_NV.T, hidden_NH)
    else:
        total_VH += gradient_NV.T @ hidden_NH
