"""Scores of logits that tensor-parallel ranks hold by parts of the vocabulary."""

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from skyrl_engine.modeling.chunked_head import Score, Sums


@frozen(eq=False)
class VocabularyParallelScore(Score):
    """The scores over the ranks of `group`; `first` is the first token id of this rank's part, `vocabulary` the number of tokens of all parts.

    With `Score`'s y, and r a rank, the ranks gather some numbers per position: s_r = logsumexp of y over the rank's part, y of each token on
    the rank that holds it (0 on others), and where they are asked for e_r = the mean of y under the softmax of the part, its sum t_r, and
    q_r = logsumexp of 2 y. Then log Z = logsumexp_r s_r, E = sum_r exp(s_r - log Z) e_r, M = sum_r t_r / V and log sum exp(2 y) =
    logsumexp_r q_r.
    """

    group: dist.ProcessGroup
    first: int
    vocabulary: int

    def _vocabulary(self, logits_NV: Tensor) -> int:  # noqa: ARG002 - the rank's own part says nothing of all parts
        return self.vocabulary

    def _softmax(self, logits_NV: Tensor, *, expected: bool, squares: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's part of p, and E and S over all ranks."""
        nothing_N0 = torch.empty(len(logits_NV), 0, dtype=torch.int64, device=logits_NV.device)
        sums = self._sums(logits_NV, nothing_N0, expected=expected, mean=False, squares=squares)
        return torch.exp(logits_NV - sums.total[:, None]), sums.expected, torch.exp(sums.squares - 2 * sums.total)

    def _add_at_tokens(self, gradient_NV: Tensor, tokens_NK: Tensor, weight_NK: Tensor) -> None:
        own_NK, place_NK = self._places(tokens_NK, gradient_NV.shape[1])
        gradient_NV.scatter_add_(-1, place_NK, weight_NK * own_NK)

    def _places(self, tokens_NK: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return which tokens this rank holds, bool [n, k], and their places here, 0 for other tokens."""
        place_NK = tokens_NK - self.first
        own_NK = (place_NK >= 0) & (place_NK < width)
        return own_NK, torch.where(own_NK, place_NK, 0)

    @torch.no_grad()
    def _sums(self, logits_NV: Tensor, tokens_NK: Tensor, *, expected: bool, mean: bool, squares: bool) -> Sums:
        """Return the sums over all parts, equal on all ranks of the group."""
        own_NK, place_NK = self._places(tokens_NK, logits_NV.shape[1])
        sum_N = logits_NV.logsumexp(-1)
        parts = [sum_N[:, None], torch.where(own_NK, logits_NV.gather(-1, place_NK), 0.0)]
        if expected:
            parts.append((torch.exp(logits_NV - sum_N[:, None]) * logits_NV).sum(-1, keepdim=True))
        if squares:
            parts.append((2 * logits_NV).logsumexp(-1, keepdim=True))
        if mean:
            parts.append(logits_NV.sum(-1, keepdim=True))
        mine_NC = torch.cat(parts, 1)
        ranks_RNC = [torch.empty_like(mine_NC) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(ranks_RNC, mine_NC, group=self.group)
        all_RNC = torch.stack(ranks_RNC)
        sums_RN, picked_RNK = all_RNC[..., 0], all_RNC[..., 1 : 1 + tokens_NK.shape[1]]
        total_N = sums_RN.logsumexp(0)
        zeros_N = torch.zeros_like(total_N)
        return Sums(
            total_N,
            picked_RNK.sum(0),
            (torch.exp(sums_RN - total_N) * all_RNC[..., 1 + tokens_NK.shape[1]]).sum(0) if expected else zeros_N,
            all_RNC[..., -1].sum(0) / self.vocabulary if mean else zeros_N,
            all_RNC[..., -2 if mean else -1].logsumexp(0) if squares else zeros_N,
        )
