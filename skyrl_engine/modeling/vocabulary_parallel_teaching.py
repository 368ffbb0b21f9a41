"""Comparisons with a teacher whose head, like the student's, tensor-parallel ranks hold by parts of the vocabulary.

A divergence is a sum over tokens, so ranks add up [n] numbers: of each part, the sum of exp(y) of both models, the part of the divergence and,
for its gradient, the part of a mean. A distance of sorted probabilities is no such sum: it takes the logits of a chunk from all ranks.
"""

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine.modeling.chunked_head import Score
from skyrl_engine.modeling.teaching import TaughtScore, TeacherStates
from skyrl_engine.modeling.vocabulary_parallel import VocabularyParallelScore


@frozen(eq=False)
class DividedTeacherStates(TeacherStates):
    """Hidden states [n, h] of a teacher, equal on the ranks of `group`, and this rank's part of its head, which begins at the token `first`.

    Parts are of ceil(vocabulary / ranks) tokens; the last ones may have fewer.
    """

    group: dist.ProcessGroup
    first: int
    vocabulary: int

    def score(self, rule: LogitRule, temperature: float, names: tuple[str, ...], vocabulary: int) -> "DividedTaughtScore":
        self.refuse_another_vocabulary(self.vocabulary, vocabulary)
        return DividedTaughtScore(
            rule=rule,
            temperature=temperature,
            names=names,
            group=self.group,
            first=self.first,
            vocabulary=self.vocabulary,
            teacher=self,
        )

    def gather(self) -> TeacherStates:
        weight_HV = gather_parts(self.weight.T, self.group, self.vocabulary)
        bias_V = None if self.bias is None else gather_parts(self.bias[None], self.group, self.vocabulary)[0]
        return TeacherStates(self.hidden, weight_HV.T.contiguous(), bias_V, self.rule)


@frozen(eq=False)
class DividedTaughtScore(TaughtScore, VocabularyParallelScore):
    """The scores of `TaughtScore` over parts of the vocabulary, equal on all ranks."""

    def _log_softmax(self, logits_NV: Tensor) -> Tensor:
        totals = gather_equal(logits_NV.logsumexp(-1), self.group)
        return logits_NV - torch.stack(totals).logsumexp(0)[:, None]

    def _add_parts(self, part_N: Tensor) -> Tensor:
        total_N = part_N.contiguous().clone()
        dist.all_reduce(total_N, group=self.group)
        return total_N

    def _find_likeliest(self, logits_NV: Tensor) -> Tensor:
        largest = logits_NV.max(-1)
        values_RN = torch.stack(gather_equal(largest.values, self.group))
        places_RN = torch.stack(gather_equal(largest.indices + self.first, self.group))
        return places_RN.gather(0, values_RN.argmax(0, keepdim=True))[0]


@frozen(eq=False)
class GatheredScore(Score):
    """The scores that `inner` makes of whole logits, of a head whose part begins at the token `first` on this rank."""

    inner: Score
    group: dist.ProcessGroup
    first: int
    vocabulary: int

    @classmethod
    def of(cls, inner: Score, group: dist.ProcessGroup, first: int, vocabulary: int) -> "GatheredScore":
        return cls(inner.rule, inner.temperature, inner.names, inner, group, first, vocabulary)

    def __call__(self, raw_NV: Tensor, tokens_NK: Tensor) -> tuple[Tensor, ...]:
        return self.inner(gather_parts(raw_NV, self.group, self.vocabulary), tokens_NK)

    def positions_per_chunk(self, limit: int, count: int) -> int:
        # a chunk has the logits of all ranks
        return self.inner.positions_per_chunk(max(1, limit // dist.get_world_size(self.group)), count)

    @property
    def chunks_kept(self) -> int:
        return self.inner.chunks_kept

    def at(self, chosen: slice) -> "GatheredScore":
        return GatheredScore.of(self.inner.at(chosen), self.group, self.first, self.vocabulary)

    def differentiable(self, name: str) -> bool:
        return self.inner.differentiable(name)

    def gradient(self, raw_NV: Tensor, tokens_NK: Tensor, upstream: "list[Tensor | None]") -> Tensor:  # type: ignore[override] # a list is one
        whole_NV = self.inner.gradient(gather_parts(raw_NV, self.group, self.vocabulary), tokens_NK, upstream)
        return whole_NV[:, self.first : self.first + raw_NV.shape[1]]


def gather_equal(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks, which have one shape."""
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own.contiguous(), group=group)
    return gathered


@torch.no_grad()
def gather_parts(part_NV: Tensor, group: dist.ProcessGroup, vocabulary: int) -> Tensor:
    """Return [n, vocabulary] of the parts [n, ceil(vocabulary / ranks)] of all ranks, of which the last ones may be shorter."""
    share = -(-vocabulary // dist.get_world_size(group))
    filled_NV = nn.functional.pad(part_NV, (0, share - part_NV.shape[1]))
    return torch.cat(gather_equal(filled_NV, group), 1)[:, :vocabulary]
