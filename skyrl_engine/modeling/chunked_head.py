"""The language-model head and log-softmax in chunks of positions, so that the logits of few positions are held at a time."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from skyrl_engine.modeling.causal_lm import LogitRule

VOCABULARY_SCORES = ("logprobs", "entropy", "logits")
"""The scores that a head computes from a position's logits, in this order. "logits" is the label's logit, scaled and divided by temperature."""


CHUNKS_KEPT = 2
"""Logits of no more chunks than these are kept for backward; if there are more, each chunk is computed again there."""


def asked_of_head(needs: Collection[str]) -> tuple[str, ...]:
    """Return the scores to ask of a head for these `needs`, in order; log-probabilities are always among them."""
    return tuple(name for name in VOCABULARY_SCORES if name == "logprobs" or name in needs)


class ChunkedHead(nn.Module):
    """A linear head that computes logits chunk by chunk and, beyond a few, computes them again in backward instead of keeping them.

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


@frozen(eq=False)
class Score:
    """The function from a chunk's raw logits [n, v] and labels [n] to its scores, each [n], and its gradient; of a vocabulary on one rank.

    Let y be the logits that softmax is taken of and p their softmax. The log-probability of a label is y(label) - log Z, and the entropy is
    log Z - E, where log Z = logsumexp of y and E = the mean of y under p. `asked` names the scores, as `asked_of_head` does.
    """

    rule: LogitRule
    temperature: float
    asked: tuple[str, ...]

    def __call__(self, raw_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, ...]:
        total_N, mean_N, label_N = self._sums(self._logits(raw_NV), labels_N, "entropy" in self.asked)
        scores = {"logprobs": label_N - total_N, "entropy": total_N - mean_N, "logits": label_N}
        return tuple(scores[name] for name in self.asked)

    def gradient(self, raw_NV: Tensor, labels_N: Tensor, upstream: Sequence[Tensor | None]) -> Tensor:
        """Return the gradient of the scores, weighted by `upstream`, with respect to the raw logits, in their dtype.

        With respect to y, and for upstream u, it is u (one_hot(label) - p) of a log-probability, -u p (y - E) of an entropy, and
        u one_hot(label) of the label's logit; None stands for a score that nothing was computed from. A rule without a soft cap is a factor.
        """
        factor = 1.0 if self.rule.softcap is not None else self.rule.scale / self.temperature
        of = {name: each * factor for name, each in zip(self.asked, upstream, strict=True) if each is not None}
        if self.rule.softcap is not None:
            raw_NV = raw_NV.detach().requires_grad_()
        with torch.set_grad_enabled(self.rule.softcap is not None):
            logits_NV = self._logits(raw_NV)
        values_NV = logits_NV.detach()
        probabilities_NV, mean_N = self._softmax(values_NV, labels_N, "entropy" in of)
        zeros_N = values_NV.new_zeros(len(labels_N))
        weight_N = of.get("logprobs", zeros_N)
        if "entropy" in of:
            gradient_NV = (
                (values_NV - mean_N[:, None]).mul_(of["entropy"][:, None]).add_(weight_N[:, None]).neg_().mul_(probabilities_NV)
            )
        else:
            gradient_NV = probabilities_NV.mul_(-weight_N[:, None])
        self._add_at_labels(gradient_NV, labels_N, weight_N + of["logits"] if "logits" in of else weight_N)
        if self.rule.softcap is not None:
            return torch.autograd.grad(logits_NV, raw_NV, gradient_NV)[0]
        return gradient_NV.to(raw_NV.dtype)

    def _logits(self, raw_NV: Tensor) -> Tensor:
        """Return the logits that softmax is taken of: by the rule and the temperature, in float32 or float64."""
        logits_NV = self.rule(raw_NV if raw_NV.dtype == torch.float64 else raw_NV.float())
        return logits_NV if self.temperature == 1.0 else logits_NV / self.temperature

    def _sums(self, logits_NV: Tensor, labels_N: Tensor, wants_mean: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return log Z, E (0 unless it is wanted) and the label's y, each [n]."""
        total_N = logits_NV.logsumexp(-1)
        label_N = logits_NV.gather(-1, labels_N[:, None])[:, 0]
        mean_N = (torch.exp(logits_NV - total_N[:, None]) * logits_NV).sum(-1) if wants_mean else torch.zeros_like(total_N)
        return total_N, mean_N, label_N

    def _softmax(self, logits_NV: Tensor, labels_N: Tensor, wants_mean: bool) -> tuple[Tensor, Tensor]:
        """Return p, a tensor of its own, and E, 0 unless it is wanted."""
        probabilities_NV = torch.softmax(logits_NV, -1)
        return probabilities_NV, (probabilities_NV * logits_NV).sum(-1) if wants_mean else logits_NV.new_zeros(len(labels_N))

    def _add_at_labels(self, gradient_NV: Tensor, labels_N: Tensor, weight_N: Tensor) -> None:
        gradient_NV.scatter_add_(-1, labels_N[:, None], weight_N[:, None])


def chunked_scores(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_N: Tensor, score: Score, positions_per_chunk: int
) -> tuple[Tensor, ...]:
    """Return the scores [n] of `hidden_NH @ weight_VH.T + bias_V`, chunk by chunk.

    Backward computes the logits of each chunk again, unless they were kept (`CHUNKS_KEPT`).
    """
    # torch leaves `apply` and its result untyped
    return _ChunkedScores.apply(hidden_NH, weight_VH, bias_V, labels_N, score, positions_per_chunk)  # type: ignore[no-any-return, no-untyped-call]


class _ChunkedScores(torch.autograd.Function):
    """Sums the weight gradients of all chunks in one buffer of float32 (float64 for a float64 model).

    Autograd's own graph would make a gradient as large as the head for each chunk, beside the sum so far; and for a bfloat16 weight it would
    round the sum to 8 bits after each of perhaps thousands of chunks.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_N: Tensor, score: Score, size: int
    ) -> tuple[Tensor, ...]:
        # a score that nothing was computed from has None for its gradient, not zeros that cost as much as any other
        ctx.set_materialize_grads(False)
        ctx.score, ctx.size = score, size
        keeps = len(labels_N) <= CHUNKS_KEPT * size
        kept, parts = [], []
        for hidden, labels in zip(torch.split(hidden_NH, size), torch.split(labels_N, size), strict=True):
            raw_NV = nn.functional.linear(hidden, weight_VH, bias_V)
            parts.append(score(raw_NV, labels))
            if keeps:
                kept.append(raw_NV)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, labels_N, *kept)
        return tuple(torch.cat(values) for values in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, labels_N, *kept = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        sums = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
        hidden_gradient = torch.empty_like(hidden_NH) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight_VH, dtype=sums) if wants_weight else None
        bias_gradient = torch.zeros_like(bias_V, dtype=sums) if wants_bias else None
        for number, start in enumerate(range(0, len(labels_N), ctx.size)):
            chosen = slice(start, start + ctx.size)
            hidden = hidden_NH[chosen]
            raw_NV = kept[number] if kept else nn.functional.linear(hidden, weight_VH, bias_V)
            gradient_NV = ctx.score.gradient(
                raw_NV, labels_N[chosen], [None if each is None else each[chosen] for each in upstream]
            )
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
