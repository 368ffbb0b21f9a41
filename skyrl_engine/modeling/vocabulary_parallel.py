"""Log-probabilities and entropies of logits that tensor-parallel ranks hold by parts of the vocabulary."""

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from skyrl_engine.modeling.chunked_head import Score


@frozen(eq=False)
class VocabularyParallelScore(Score):
    """The scores over the ranks of `group`; `first` is the first token id of this rank's part.

    With `Score`'s y, and r a rank, the ranks gather three numbers per position: s_r = logsumexp of y over the rank's part, e_r = the mean of y
    under the softmax of the part, and the label's y on the rank that holds it (0 on others). Then log Z = logsumexp_r s_r and
    E = sum_r exp(s_r - log Z) e_r.
    """

    group: dist.ProcessGroup
    first: int

    def _softmax(self, logits_NV: Tensor, labels_N: Tensor, wants_mean: bool) -> tuple[Tensor, Tensor]:
        """Return this rank's part of p, and E over all ranks."""
        total_N, mean_N, _ = self._sums(logits_NV, labels_N, wants_mean)
        return torch.exp(logits_NV - total_N[:, None]), mean_N

    def _add_at_labels(self, gradient_NV: Tensor, labels_N: Tensor, weight_N: Tensor) -> None:
        own_N, place_N = self._places(labels_N, gradient_NV.shape[1])
        gradient_NV.scatter_add_(-1, place_N[:, None], (weight_N * own_N)[:, None])

    def _places(self, labels_N: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return which labels this rank holds, bool [n], and their places here, 0 for other labels."""
        place_N = labels_N - self.first
        own_N = (place_N >= 0) & (place_N < width)
        return own_N, torch.where(own_N, place_N, 0)

    @torch.no_grad()
    def _sums(self, logits_NV: Tensor, labels_N: Tensor, wants_mean: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return log Z, E (0 unless it is wanted) and the label's y, each [n], equal on all ranks of the group."""
        own_N, place_N = self._places(labels_N, logits_NV.shape[1])
        sum_N = logits_NV.logsumexp(-1)
        label_N = torch.where(own_N, logits_NV.gather(-1, place_N[:, None])[:, 0], 0.0)
        parts = [sum_N, label_N]
        if wants_mean:
            parts.append((torch.exp(logits_NV - sum_N[:, None]) * logits_NV).sum(-1))
        mine_KN = torch.stack(parts)
        ranks_RKN = [torch.empty_like(mine_KN) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(ranks_RKN, mine_KN, group=self.group)
        all_RKN = torch.stack(ranks_RKN)
        sums_RN = all_RKN[:, 0]
        total_N = sums_RN.logsumexp(0)
        mean_N = (torch.exp(sums_RN - total_N) * all_RKN[:, 2]).sum(0) if wants_mean else torch.zeros_like(total_N)
        return total_N, mean_N, all_RKN[:, 1].sum(0)
