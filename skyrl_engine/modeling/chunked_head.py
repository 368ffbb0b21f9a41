"""The language-model head and log-softmax in chunks of positions, so that the logits of few positions are held at a time."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from skyrl_engine.contracts.kinds.needs import LOGPROBS_AT, asks_a_teacher, candidate_columns
from skyrl_engine.modeling.causal_lm import LogitRule

VOCABULARY_SCORES = ("logprobs", "entropy", "logits", "logsumexp", "mean_logprob", "log_sum_squares")
"""The scores [n] that a head computes from a position's logits, in this order; `contracts.MODEL_SCORES` defines them."""


CHUNKS_KEPT = 2
"""Logits of no more chunks than these are kept for backward; if there are more, each chunk is computed again there."""


@frozen(eq=False)
class RequestedScores:
    """Scores asked of a head at n positions: scores by name, and the token ids to score.

    `tokens` int64[n, 1 + k] holds the label of each position, and after it the candidates of every need `logprobs_at:COLUMN`, of which
    `widths` says how many there are. `scores` has "logprobs" always, "logprobs_at" where there is such a need, and the needs of a teacher.
    """

    scores: tuple[str, ...]
    tokens: Tensor
    widths: Mapping[str, int]

    @classmethod
    def of(cls, needs: Iterable[str], labels_N: Tensor, candidates: Mapping[str, Tensor]) -> Self:
        """Collect what `needs` ask at these labels int64[n]; `candidates` int64[n, k] by column. Needs of no head are left out."""
        names = set(needs)
        scores = tuple(name for name in VOCABULARY_SCORES if name == "logprobs" or name in names)
        scores += tuple(sorted(name for name in names if asks_a_teacher((name,))))
        wide = {need: candidates[column] for need, column in candidate_columns(sorted(names)).items()}
        return cls(
            (*scores, LOGPROBS_AT) if wide else scores,
            torch.cat([labels_N[:, None], *wide.values()], 1),
            {need: ids_NK.shape[1] for need, ids_NK in wide.items()},
        )

    def name_values(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the head's values, in the order of `scores`, by need."""
        scores = dict(zip(self.scores, values, strict=True))
        wide_NK = scores.pop(LOGPROBS_AT, None)
        if wide_NK is not None:
            # cloned, because FSDP2 warns if the root returns a view
            parts = (
                [wide_NK]
                if len(self.widths) == 1
                else [part.clone() for part in torch.split(wide_NK, list(self.widths.values()), 1)]
            )
            scores.update(zip(self.widths, parts, strict=True))
        return scores


def asks_a_head(needs: Iterable[str]) -> bool:
    """Return True where some need is of the vocabulary, and not of a value head alone."""
    names = set(needs)
    return not names.isdisjoint(VOCABULARY_SCORES) or bool(candidate_columns(names)) or asks_a_teacher(names)


class ChunkedHead(nn.Module):
    """A linear head that computes logits chunk by chunk and, beyond a few, computes them again in backward instead of keeping them.

    One module contains the whole loop, so that a framework that gathers weights per module call gathers the head once. Its forward must run
    inside the forward of the sharded root, where the head's weight is whole. `compares` says that it has the scores of a teacher.
    """

    compares = True

    def __init__(self, linear: nn.Linear, rule: LogitRule, logits_per_chunk: int) -> None:
        super().__init__()
        self.linear = linear
        self.rule = rule
        self.positions_per_chunk = max(1, logits_per_chunk // linear.out_features)

    def forward(
        self,
        hidden_NH: Tensor,
        tokens_NK: Tensor,
        temperature: float,
        names: tuple[str, ...],
        teacher: "ScoringTeacher | None" = None,
    ) -> tuple[Tensor, ...]:
        """Return the scores of `RequestedScores`, each [n] (`logprobs_at`: [n, k]), in nats; float32, or float64 for a float64 model.

        `teacher` has the states at these positions, for scores that compare with one. The scores are a tuple, not a list, because DeepSpeed
        ZeRO-3 follows tensors through tuples only.
        """
        score = (
            Score(self.rule, temperature, names)
            if teacher is None
            else teacher.score(self.rule, temperature, names, self.linear.out_features)
        )
        # some models keep a residual in float32 whatever precision computes (Mamba), and cast it to the head's own, as here
        hidden_NH = hidden_NH.to(self.linear.weight.dtype)
        return compute_chunked_scores(hidden_NH, self.linear.weight, self.linear.bias, tokens_NK, score, self.positions_per_chunk)


@frozen(eq=False)
class Sums:
    """The numbers from which scores of n positions are made, with y and p as in `Score`.

    `total` [n] is log Z, `picked` [n, k] y of the tokens that were asked about; `expected` [n] is the mean of y under p, and `mean` [n] that
    over the vocabulary, `squares` [n] log sum exp(2 y); each 0 unless it was asked for.
    """

    total: Tensor
    picked: Tensor
    expected: Tensor
    mean: Tensor
    squares: Tensor


@frozen(eq=False)
class Score:
    """The function from a chunk's raw logits [n, v] and tokens [n, 1 + k] of `RequestedScores` to scores, and its gradient.

    The vocabulary is on one rank. Let y be the logits that softmax is taken of and p their softmax. The log-probability of a token is
    y(token) - log Z, and the entropy is log Z - E, where log Z = logsumexp of y and E = the mean of y under p. The mean log-probability is
    M - log Z, where M = the mean of y over the vocabulary, and the log of the sum S of squares of p is log sum exp(2 y) -
    2 log Z. `names` are those of the scores, as `RequestedScores` does.
    """

    rule: LogitRule
    temperature: float
    names: tuple[str, ...]

    def __call__(self, raw_NV: Tensor, tokens_NK: Tensor) -> tuple[Tensor, ...]:
        named = self._name_scores(self._logits(raw_NV), tokens_NK)
        return tuple(named[name] for name in self.names)

    def positions_per_chunk(self, limit: int, count: int) -> int:  # noqa: ARG002 - others divide few positions too
        """Return how many of `count` positions are scored at a time, where the logits of `limit` positions may be held."""
        return limit

    @property
    def chunks_kept(self) -> int:
        """The number of chunks up to which logits are kept for backward."""
        return CHUNKS_KEPT

    def at(self, chosen: slice) -> Self:  # noqa: ARG002 - others know something of each position
        """Return the score of the chunk of these positions."""
        return self

    def differentiable(self, name: str) -> bool:  # noqa: ARG002 - others have scores that count
        """Say whether a score depends on the logits differentiably."""
        return True

    def _name_scores(self, logits_NV: Tensor, tokens_NK: Tensor) -> dict[str, Tensor]:
        """Return scores by name, those that are asked for and perhaps others."""
        sums = self._sums(
            logits_NV,
            tokens_NK,
            expected="entropy" in self.names,
            mean="mean_logprob" in self.names,
            squares="log_sum_squares" in self.names,
        )
        label_N, others_NK = sums.picked[:, 0], sums.picked[:, 1:]
        return {
            "logprobs": label_N - sums.total,
            "entropy": sums.total - sums.expected,
            "logits": label_N,
            "logsumexp": sums.total,
            "mean_logprob": sums.mean - sums.total,
            "log_sum_squares": sums.squares - 2 * sums.total,
            LOGPROBS_AT: others_NK - sums.total[:, None],
        }

    def gradient(self, raw_NV: Tensor, tokens_NK: Tensor, upstream: Sequence[Tensor | None]) -> Tensor:
        """Return the gradient of the scores, weighted by `upstream`, with respect to the raw logits, in their dtype.

        None stands for a score that nothing was computed from. A rule without a soft cap is a factor.
        """
        factor = 1.0 if self.rule.softcap is not None else self.rule.scale / self.temperature
        of = {name: gradient * factor for name, gradient in zip(self.names, upstream, strict=True) if gradient is not None}
        if self.rule.softcap is not None:
            raw_NV = raw_NV.detach().requires_grad_()
        with torch.set_grad_enabled(self.rule.softcap is not None):
            logits_NV = self._logits(raw_NV)
        gradient_NV = self._gradient(logits_NV.detach(), tokens_NK, of)
        if self.rule.softcap is not None:
            return torch.autograd.grad(logits_NV, raw_NV, gradient_NV)[0]
        return gradient_NV.to(raw_NV.dtype)

    def _gradient(self, values_NV: Tensor, tokens_NK: Tensor, of: Mapping[str, Tensor]) -> Tensor:
        """Return the gradient with respect to y = `values_NV`, for the upstream gradients `of` scores by name.

        For upstream u, it is u (one_hot(token) - p) of a log-probability, -u p (y - E) of an entropy, u one_hot(label) of the label's logit,
        u p of log Z, u (1 / V - p) of the mean log-probability over V tokens, and 2 u (p^2 / S - p) of log S, the log of the sum of squares.
        """
        probabilities_NV, expected_N, squares_N = self._softmax(
            values_NV, expected="entropy" in of, squares="log_sum_squares" in of
        )
        zeros_N = values_NV.new_zeros(len(tokens_NK))
        at_NK = values_NV.new_zeros(tokens_NK.shape)
        at_NK[:, 0] = of.get("logprobs", zeros_N)
        if LOGPROBS_AT in of:
            at_NK[:, 1:] = of[LOGPROBS_AT]
        # p is taken away as often as a log Z is
        weight_N = at_NK.sum(1) + of.get("mean_logprob", zeros_N) - of.get("logsumexp", zeros_N)
        if "logits" in of:
            at_NK[:, 0] += of["logits"]
        if "log_sum_squares" in of:
            weight_N = weight_N + 2 * of["log_sum_squares"]
            squared_NV = probabilities_NV.square().mul_((2 * of["log_sum_squares"] / squares_N)[:, None])
        else:
            squared_NV = None
        if "entropy" in of:
            gradient_NV = (
                (values_NV - expected_N[:, None]).mul_(of["entropy"][:, None]).add_(weight_N[:, None]).neg_().mul_(probabilities_NV)
            )
        else:
            gradient_NV = probabilities_NV.mul_(-weight_N[:, None])
        if squared_NV is not None:
            gradient_NV += squared_NV
        if "mean_logprob" in of:
            gradient_NV += (of["mean_logprob"] / self._vocabulary(values_NV))[:, None]
        self._add_at_tokens(gradient_NV, tokens_NK, at_NK)
        return gradient_NV

    def _logits(self, raw_NV: Tensor) -> Tensor:
        """Return the logits that softmax is taken of: by the rule and the temperature, in float32 or float64."""
        logits_NV = self.rule(raw_NV if raw_NV.dtype == torch.float64 else raw_NV.float())
        return logits_NV if self.temperature == 1.0 else logits_NV / self.temperature

    def _vocabulary(self, logits_NV: Tensor) -> int:
        """Return V, the number of tokens that softmax is taken over."""
        return logits_NV.shape[1]

    def _sums(self, logits_NV: Tensor, tokens_NK: Tensor, *, expected: bool, mean: bool, squares: bool) -> Sums:
        total_N = logits_NV.logsumexp(-1)
        zeros_N = torch.zeros_like(total_N)
        return Sums(
            total_N,
            logits_NV.gather(-1, tokens_NK),
            (torch.exp(logits_NV - total_N[:, None]) * logits_NV).sum(-1) if expected else zeros_N,
            logits_NV.mean(-1) if mean else zeros_N,
            (2 * logits_NV).logsumexp(-1) if squares else zeros_N,
        )

    def _softmax(self, logits_NV: Tensor, *, expected: bool, squares: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return p, a tensor of its own, and E and S, each 0 unless it is wanted."""
        probabilities_NV = torch.softmax(logits_NV, -1)
        zeros_N = logits_NV.new_zeros(len(logits_NV))
        return (
            probabilities_NV,
            (probabilities_NV * logits_NV).sum(-1) if expected else zeros_N,
            probabilities_NV.square().sum(-1) if squares else zeros_N,
        )

    def _add_at_tokens(self, gradient_NV: Tensor, tokens_NK: Tensor, weight_NK: Tensor) -> None:
        gradient_NV.scatter_add_(-1, tokens_NK, weight_NK)


class ScoringTeacher(Protocol):
    """A teacher at the positions of a micro-batch (`modeling.teaching.TeacherStates`)."""

    def score(self, rule: LogitRule, temperature: float, names: tuple[str, ...], vocabulary: int) -> Score:
        """Return the score of a student's head with this `rule` over so many tokens, which compares it with the teacher."""
        ...


def compute_chunked_scores(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, tokens_NK: Tensor, score: Score, positions_per_chunk: int
) -> tuple[Tensor, ...]:
    """Return the scores of `hidden_NH @ weight_VH.T + bias_V` at the tokens [n, 1 + k] of `RequestedScores`, chunk by chunk.

    Backward computes the logits of each chunk again, unless they were kept (`Score.chunks_kept`).
    """
    positions_per_chunk = score.positions_per_chunk(positions_per_chunk, len(tokens_NK))
    # torch leaves `apply` and its result untyped
    return _ChunkedScores.apply(hidden_NH, weight_VH, bias_V, tokens_NK, score, positions_per_chunk)  # type: ignore[no-any-return, no-untyped-call]


class _ChunkedScores(torch.autograd.Function):
    """Sums the weight gradients of all chunks in one buffer of float32 (float64 for a float64 model).

    Autograd's own graph would make a gradient as large as the head for each chunk, next to the sum so far; and for a bfloat16 weight it would
    round the sum to 8 bits after each of perhaps thousands of chunks.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, tokens_NK: Tensor, score: Score, size: int
    ) -> tuple[Tensor, ...]:
        # a score that nothing was computed from has None for its gradient, not zeros that cost as much as any other
        ctx.set_materialize_grads(False)
        ctx.score, ctx.size = score, size
        keeps = len(tokens_NK) <= score.chunks_kept * size
        logits, parts = [], []
        for start in range(0, len(tokens_NK), size):
            chosen = slice(start, start + size)
            raw_NV = nn.functional.linear(hidden_NH[chosen], weight_VH, bias_V)
            parts.append(score.at(chosen)(raw_NV, tokens_NK[chosen]))
            if keeps:
                logits.append(raw_NV)
            # the next chunk's logits are made when these are gone
            del raw_NV
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, tokens_NK, *logits)
        scores = tuple(torch.cat(values) for values in zip(*parts, strict=True))
        ctx.mark_non_differentiable(
            *(tensor for name, tensor in zip(score.names, scores, strict=True) if not score.differentiable(name))
        )
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, tokens_NK, *logits = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        sums = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
        hidden_gradient = torch.empty_like(hidden_NH) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight_VH, dtype=sums) if wants_weight else None
        bias_gradient = torch.zeros_like(bias_V, dtype=sums) if wants_bias else None
        for number, start in enumerate(range(0, len(tokens_NK), ctx.size)):
            chosen = slice(start, start + ctx.size)
            hidden = hidden_NH[chosen]
            raw_NV = logits[number] if logits else nn.functional.linear(hidden, weight_VH, bias_V)
            gradient_NV = ctx.score.at(chosen).gradient(
                raw_NV, tokens_NK[chosen], [None if gradient is None else gradient[chosen] for gradient in upstream]
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
