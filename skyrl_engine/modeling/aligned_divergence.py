"""Distances between a student and a teacher of another tokenizer, at the ends of groups of tokens that stand for the same text.

Within a group of k tokens x_1 ... x_k, the distribution that is compared is that of its last token, times the probability of the earlier ones:
q(x_1) ... q(x_(k-1)) q(. | x_1 ... x_(k-1)), of the student, and the same of the teacher's own tokens, by the chain rule of both. Of a group
with one token on either side these are the distributions of the next token.
"""

from collections.abc import Mapping
from typing import Final, Protocol, Self

import torch
from attrs import evolve, fields, frozen
from torch import Tensor, nn

from skyrl_engine.contracts.kinds.needs import AlignedDivergence, is_aligned
from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine.modeling.chunked_head import RequestedScores, Score, ScoringTeacher
from skyrl_engine.modeling.teaching import TeacherStates

_LEAST: Final = 1e-8
"""Probabilities below it count as this much in logarithms, as in TRL."""

_SLOPE: Final = "slope:"
"""Begins the name of the derivative of a distance by the logarithm of the earlier tokens' probability."""

_POSITIONS: Final = 64
"""Positions whose logits are made at a time where only log-probabilities are kept of them."""


class StudentHead(Protocol):
    """A student's head, as `ChunkedHead.forward` takes states and tokens."""

    def __call__(
        self,
        hidden_NH: Tensor,
        tokens_NK: Tensor,
        temperature: float,
        names: tuple[str, ...],
        teacher: ScoringTeacher | None = None,
        /,
    ) -> tuple[Tensor, ...]: ...


@frozen(eq=False)
class Vocabularies:
    """Equally written tokens: their ids int64[m] in the `student`'s and in the `teacher`'s vocabulary."""

    student: Tensor
    teacher: Tensor


def aligned_divergence(requested: AlignedDivergence, student_NV: Tensor, teacher_NV: Tensor, matched: Vocabularies) -> Tensor:
    """Return a distance [n] of probabilities q [n, v] and p [n, w], which may add up to less than 1.

    `uld` is the sum over ranks of |q - p|, each sorted, the shorter one with zeros after it (Boizard et al. 2024, arXiv:2402.12030). `gold`
    takes the divergence of GKD over tokens with the same name, sum of p log(p / q) for beta 0, of q log(q / p) for 1 and that of their mixture
    between, and `uld` over the others, each with its weight (Patino et al. 2025, "Unlocking On-Policy Distillation for Any Model Family").
    """
    if requested.kind == "uld":
        return _sorted_distance(student_NV, teacher_NV)
    own, others = torch.ones_like(student_NV[0], dtype=torch.bool), torch.ones_like(teacher_NV[0], dtype=torch.bool)
    own[matched.student], others[matched.teacher] = False, False
    logs = [values.clamp_min(_LEAST).log() for values in (student_NV[:, matched.student], teacher_NV[:, matched.teacher])]
    of_matched = _mixed_divergence(requested.beta, *logs)
    of_others = (
        _sorted_distance(student_NV[:, own], teacher_NV[:, others]) if own.any() and others.any() else torch.zeros_like(of_matched)
    )
    share = len(matched.teacher) / teacher_NV.shape[1]
    weight = share if requested.matched_weight is None else requested.matched_weight
    other_weight = 1 - share if requested.unmatched_weight is None else requested.unmatched_weight
    return weight * of_matched + other_weight * of_others


def _sorted_distance(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    student, teacher = (values.sort(-1, descending=True).values for values in (student_NV, teacher_NV))
    missing = teacher.shape[1] - student.shape[1]
    student, teacher = nn.functional.pad(student, (0, max(0, missing))), nn.functional.pad(teacher, (0, max(0, -missing)))
    return (student - teacher).abs().sum(-1)


def _mixed_divergence(beta: float, student_NM: Tensor, teacher_NM: Tensor) -> Tensor:
    """Return the divergence of GKD [n] of log q and log p [n, m]."""
    if beta == 0:
        return (teacher_NM.exp() * (teacher_NM - student_NM)).sum(-1)
    if beta == 1:
        return (student_NM.exp() * (student_NM - teacher_NM)).sum(-1)
    share = student_NM.new_tensor(beta)
    mixture = torch.logaddexp(student_NM + (1 - share).log(), teacher_NM + share.log())
    of_teacher = (teacher_NM.exp() * (teacher_NM - mixture)).sum(-1)
    of_student = (student_NM.exp() * (student_NM - mixture)).sum(-1)
    return share * of_teacher + (1 - share) * of_student


@frozen(eq=False)
class TokenPlaces:
    """The groups of a micro-batch of n scored tokens, g of them. The student's last tokens stand at `student` int64[g] among the n, and the
    teacher's at `teacher` int64[g] among the m positions that it was asked at.

    Of the earlier tokens of groups, `earlier_student` int64[e] and `earlier_teacher` int64[f] are the places, `groups_student` and
    `groups_teacher` the places among the n of the last token of their group, and `labels` int64[f] the teacher's tokens there.
    """

    student: Tensor
    teacher: Tensor
    earlier_student: Tensor
    groups_student: Tensor
    earlier_teacher: Tensor
    groups_teacher: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Self:
        """Return it on a device."""
        return type(self)(*(getattr(self, attribute.name).to(device) for attribute in fields(type(self))))


@frozen(eq=False)
class AlignedStates(TeacherStates):
    """Hidden states [m, h] of a teacher at the positions of its own tokens, for `count` positions of a student."""

    places: TokenPlaces
    matched: Vocabularies
    count: int

    def with_one_position(self) -> Self:
        return self if self.count else evolve(self, count=1)

    def sum_earlier(self, values_N: Tensor) -> Tensor:
        """Return [n], at the last token of each group, the sum of a student's values [n] of the earlier ones."""
        places = self.places
        return torch.zeros_like(values_N).index_add(0, places.groups_student, values_N[places.earlier_student])

    def sum_teacher(self, temperature: float, like: Tensor) -> Tensor:
        """Return [n], at the last token of each group, the teacher's log-probability of its own earlier tokens, together."""
        places, total_N = self.places, like.new_zeros(self.count)
        for start in range(0, len(places.labels), _POSITIONS):
            chosen = slice(start, start + _POSITIONS)
            logprobs_CV = evolve(self, hidden=self.hidden[places.earlier_teacher[chosen]]).logits(temperature).log_softmax(-1)
            picked_C = logprobs_CV.gather(-1, places.labels[chosen, None])[:, 0]
            total_N.index_add_(0, places.groups_teacher[chosen], picked_C.to(total_N.dtype))
        return total_N

    def compare(self, head: StudentHead, hidden_NH: Tensor, requested: RequestedScores, temperature: float) -> dict[str, Tensor]:
        """Return the scores that are asked of a student's `head` at its states [n, h], those of groups with their whole gradient.

        The probability of a group's earlier tokens is that of other positions, which a chunk does not have. It is computed first, without a
        gradient, and the derivative by it, which the head gives too, joins it to those positions afterwards.
        """
        with torch.no_grad():
            before_N = self.sum_earlier(head(hidden_NH, requested.tokens[:, :1], temperature, ("logprobs",))[0])
        needs = tuple(name for name in requested.scores if is_aligned(name))
        teacher = _AskedTeacher(self, before_N)
        names = (*requested.scores, *(f"{_SLOPE}{need}" for need in needs))
        values = head(hidden_NH, requested.tokens, temperature, names, teacher)
        scores = requested.name_values(values[: len(requested.scores)])
        after_N = self.sum_earlier(scores["logprobs"])
        for need, slope_N in zip(needs, values[len(requested.scores) :], strict=True):
            scores[need] = scores[need] + slope_N.detach() * (after_N - after_N.detach())
        return scores


@frozen(eq=False)
class _AskedTeacher:
    """The teacher's states, and the student's log-probability [n] of what comes before the last token of each group."""

    states: AlignedStates
    before: Tensor

    def score(self, rule: LogitRule, temperature: float, names: tuple[str, ...], vocabulary: int) -> "AlignedScore":
        """Return the score of a student's head over so many tokens."""
        states, places = self.states, self.states.places
        # tokenizers may know tokens that have no logit
        known = (states.matched.student < vocabulary) & (states.matched.teacher < len(states.weight))
        states = evolve(states, matched=Vocabularies(states.matched.student[known], states.matched.teacher[known]))
        hidden_NH = states.hidden.new_zeros(states.count, states.hidden.shape[1])
        hidden_NH[places.student] = states.hidden[places.teacher]
        ends_N = torch.zeros(states.count, dtype=torch.bool, device=self.before.device)
        ends_N[places.student] = True
        factors_N2 = torch.stack([self.before, states.sum_teacher(temperature, self.before)], 1)
        return AlignedScore(rule, temperature, names, evolve(states, hidden=hidden_NH), factors_N2, ends_N)


@frozen(eq=False)
class AlignedScore(Score):
    """The scores of `Score`, and distances from `teacher`, whose states are those of the chunk, at the positions where `ends` [n] holds; 0 at
    others. `factors` [n, 2] are the logarithms of the student's and the teacher's probability of what comes before in the group.
    """

    teacher: AlignedStates
    factors: Tensor
    ends: Tensor

    def positions_per_chunk(self, limit: int, count: int) -> int:
        """Return a quarter of what one model's logits would be given: those of two are held, and sorted."""
        return max(1, min(limit, count) // 4)

    @property
    def chunks_kept(self) -> int:
        return 0

    def at(self, chosen: slice) -> Self:
        return evolve(self, teacher=self.teacher.at(chosen), factors=self.factors[chosen], ends=self.ends[chosen])

    def differentiable(self, name: str) -> bool:
        return not name.startswith(_SLOPE)

    def _name_scores(self, logits_NV: Tensor, tokens_NK: Tensor) -> dict[str, Tensor]:
        named = super()._name_scores(logits_NV, tokens_NK)
        for need in (name for name in self.names if is_aligned(name)):
            with torch.enable_grad():
                before_N = self.factors[:, 0].detach().clone().requires_grad_()
                value_N = self._compare(need, logits_NV.detach(), before_N)
                named[f"{_SLOPE}{need}"] = torch.autograd.grad(value_N.sum(), before_N)[0]
            named[need] = value_N.detach()
        return named

    def _gradient(self, values_NV: Tensor, tokens_NK: Tensor, of: Mapping[str, Tensor]) -> Tensor:
        others = {name: upstream for name, upstream in of.items() if not is_aligned(name)}
        total_NV = super()._gradient(values_NV, tokens_NK, others)
        for need, upstream_N in of.items():
            if is_aligned(need):
                with torch.enable_grad():
                    logits_NV = values_NV.detach().requires_grad_()
                    value_N = self._compare(need, logits_NV, self.factors[:, 0])
                    total_NV = total_NV + torch.autograd.grad(value_N, logits_NV, upstream_N)[0]
        return total_NV

    def _compare(self, need: str, logits_NV: Tensor, before_N: Tensor) -> Tensor:
        """Return the distances [n] of a chunk."""
        with torch.no_grad():
            teacher_NV = (self.teacher.logits(self.temperature).log_softmax(-1).to(logits_NV.dtype) + self.factors[:, 1:]).exp()
        student_NV = (logits_NV.log_softmax(-1) + before_N[:, None]).exp()
        value_N = aligned_divergence(AlignedDivergence.of(need), student_NV, teacher_NV, self.teacher.matched)
        return torch.where(self.ends, value_N, 0.0)
