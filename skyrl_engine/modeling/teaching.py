"""Hidden states of a frozen teacher for a micro-batch, and scores that compare a student with it, chunk by chunk.

The teacher's hidden states are kept, [n, h], and its head runs where the student's does: on the positions of one chunk, in forward and again
in backward. Logits of all positions never exist, of neither model.
"""

from collections.abc import Mapping
from typing import Self

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from skyrl_engine.contracts.kinds.needs import DIVERGENCE, TOP_1_AGREEMENT, Divergence, model_score
from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine.modeling.chunked_head import ChunkedHead, Score
from skyrl_engine.modeling.divergence import divergence, divergence_gradient

COMPARED = (DIVERGENCE, TOP_1_AGREEMENT)
"""The scores that compare a model with a teacher, `divergence` without its kind."""

HIDDEN_STATES = "hidden_states"
"""The need by which a scorer is asked for the decoder's states [n, h] at the positions; no loss can need it."""


@frozen(eq=False)
class TeacherStates:
    """Hidden states [n, h] of a teacher at the positions of a micro-batch, and the head that makes logits of them: weight [v, h], bias [v].

    Nothing of it is differentiated. Head and states are of the teacher's precision; the head must stay whole until the backward pass is over.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rule: LogitRule

    @classmethod
    def of(cls, head: ChunkedHead, hidden_NH: Tensor) -> Self:
        """Take states, and the head as its weights are now."""
        weight_VH, bias_V = head.linear.weight.detach(), head.linear.bias
        return cls(hidden_NH.detach().to(weight_VH.dtype), weight_VH, None if bias_V is None else bias_V.detach(), head.rule)

    def at(self, chosen: slice) -> Self:
        """Return it for some of the positions."""
        return evolve(self, hidden=self.hidden[chosen])

    def with_one_position(self) -> Self:
        """Return it with one position where it has none, as a scorer scores one then."""
        return self if len(self.hidden) else evolve(self, hidden=self.hidden.new_zeros(1, self.hidden.shape[1]))

    def score(self, rule: LogitRule, temperature: float, names: tuple[str, ...], vocabulary: int) -> "TaughtScore":
        """Return the score of a student's head with this `rule` over so many tokens. Raises ModelError for another vocabulary."""
        self.refuse_another_vocabulary(len(self.weight), vocabulary)
        return TaughtScore(rule, temperature, names, self)

    def refuse_another_vocabulary(self, own: int, of_student: int) -> None:
        """Raise ModelError unless both models have as many logits."""
        if own != of_student:
            raise ModelError(
                f"the teacher has {own:,} logits at a position, and the trained model {of_student:,}",
                remedy="Choose a teacher with the trained model's vocabulary",
            )

    def gather(self) -> "TeacherStates":
        """Return it with the whole head on this rank, where ranks hold parts of it."""
        return self

    def logits(self, temperature: float) -> Tensor:
        """Return the teacher's logits [n, v] that softmax is taken of, in float32 or float64."""
        raw_NV = nn.functional.linear(self.hidden, self.weight, self.bias)
        logits_NV = self.rule(raw_NV if raw_NV.dtype == torch.float64 else raw_NV.float())
        return logits_NV if temperature == 1.0 else logits_NV / temperature


# without slots, because a class of slots cannot be joined with another one, as that of a divided vocabulary
@frozen(eq=False, slots=False)
class TaughtScore(Score):
    """The scores of `Score`, and those that compare with `teacher`, whose states are those of the chunk."""

    teacher: TeacherStates

    def positions_per_chunk(self, limit: int, count: int) -> int:
        """Return half of what one model's logits would be given, since those of two are held."""
        return max(1, min(limit, count) // 2)

    @property
    def chunks_kept(self) -> int:
        """Keep no logits for backward: there would be those of two models."""
        return 0

    def at(self, chosen: slice) -> Self:
        return evolve(self, teacher=self.teacher.at(chosen))

    def differentiable(self, name: str) -> bool:
        return name != TOP_1_AGREEMENT

    def _name_scores(self, logits_NV: Tensor, tokens_NK: Tensor) -> dict[str, Tensor]:
        named = super()._name_scores(logits_NV, tokens_NK)
        if TOP_1_AGREEMENT in self.names:
            # argmax before anything is overwritten, of logits that no temperature changes the order of
            agrees_N = self._find_likeliest(logits_NV) == self._find_likeliest(self.teacher.logits(1.0))
            named[TOP_1_AGREEMENT] = agrees_N.to(logits_NV.dtype)
        for need in self._divergences():
            requested = Divergence.of(need)
            named[need] = self._add_parts(divergence(requested, *self._logprobs(logits_NV, requested)))
        return named

    def _gradient(self, logits_NV: Tensor, tokens_NK: Tensor, upstream: Mapping[str, Tensor]) -> Tensor:
        of_divergences = {need: upstream[need] for need in self._divergences() if need in upstream}
        others = {name: gradient for name, gradient in upstream.items() if name not in of_divergences}
        total_NV = super()._gradient(logits_NV, tokens_NK, others) if others or not of_divergences else None
        for need, upstream_N in of_divergences.items():
            wanted = Divergence.of(need)
            part_NV = divergence_gradient(wanted, *self._logprobs(logits_NV, wanted), self._add_parts)
            part_NV.mul_(upstream_N[:, None] / wanted.temperature)
            total_NV = part_NV if total_NV is None else total_NV.add_(part_NV)
        assert total_NV is not None, "one of the two was computed"
        return total_NV

    def _divergences(self) -> list[str]:
        return [name for name in self.names if model_score(name) == DIVERGENCE]

    def _logprobs(self, logits_NV: Tensor, requested: Divergence) -> tuple[Tensor, Tensor]:
        """Return log q and log p, [n, v] each, tensors of their own."""
        teacher_NV = self.teacher.logits(self.temperature)
        return tuple(  # type: ignore[return-value] # two of them
            self._log_softmax(logits if requested.temperature == 1.0 else logits / requested.temperature)
            for logits in (logits_NV, teacher_NV)
        )

    def _log_softmax(self, logits_NV: Tensor) -> Tensor:
        """Return log-probabilities, a tensor of their own."""
        return torch.log_softmax(logits_NV, -1)

    def _add_parts(self, part_N: Tensor) -> Tensor:
        """Return the sum over the whole vocabulary of what was summed over the logits at hand."""
        return part_N

    def _find_likeliest(self, logits_NV: Tensor) -> Tensor:
        """Return the token ids int64[n] with the largest logits, the first of equal ones."""
        return logits_NV.argmax(-1)
