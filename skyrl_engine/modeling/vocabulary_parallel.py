"""Log-probabilities and entropies of logits that tensor-parallel ranks hold by parts of the vocabulary."""

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from skyrl_engine.modeling.causal_lm import LogitRule


@frozen(eq=False)
class VocabularyParallelScore:
    """A `chunked_head.ChunkScore` over the ranks of `group`; `first` is the first token id of this rank's part.

    Let y be the logits that softmax is taken of, and r a rank. Ranks gather three numbers per position: s_r = logsumexp of y over the rank's
    part, e_r = the mean of y under the softmax of the part, and the label's y on the rank that holds it (0 on others). Then
    log Z = logsumexp_r s_r, log p(label) = y(label) - log Z and, with E = sum_r exp(s_r - log Z) e_r, the entropy is log Z - E. `asked` names
    the scores, as `chunked_head.asked_of_head` does.
    """

    group: dist.ProcessGroup
    first: int
    rule: LogitRule
    temperature: float
    asked: tuple[str, ...]

    def __call__(self, raw_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, ...]:
        total_N, mean_N, label_N = self._exchange(self._logits(raw_NV), labels_N)
        scores = {"logprobs": label_N - total_N, "entropy": total_N - mean_N, "logits": label_N}
        return tuple(scores[name] for name in self.asked)

    def gradient(self, raw_NV: Tensor, labels_N: Tensor, upstream: list[Tensor]) -> Tensor:
        """Return the gradient of the scores, weighted by `upstream`, with respect to this rank's raw logits, in their dtype.

        With respect to y, and for upstream u, it is u (one_hot(label) - p) of a log-probability, -u p (y - E) of an entropy, and
        u one_hot(label) of the label's logit.
        """
        if self.rule.softcap is not None:
            raw_NV = raw_NV.requires_grad_()
        with torch.set_grad_enabled(self.rule.softcap is not None):
            logits_NV = self._logits(raw_NV)
        values_NV = logits_NV.detach()
        total_N, mean_N, _ = self._exchange(values_NV, labels_N)
        of = dict(zip(self.asked, upstream, strict=True))
        gradient_NV = torch.exp(values_NV - total_N[:, None])
        if "entropy" in of:
            gradient_NV *= -(of["logprobs"][:, None] + of["entropy"][:, None] * (values_NV - mean_N[:, None]))
        else:
            gradient_NV *= -of["logprobs"][:, None]
        at_label_N = of["logprobs"] + of["logits"] if "logits" in of else of["logprobs"]
        own_N, place_N = self._places(labels_N, values_NV.shape[1])
        gradient_NV.scatter_add_(-1, place_N[:, None], (at_label_N * own_N)[:, None])
        if self.rule.softcap is not None:
            return torch.autograd.grad(logits_NV, raw_NV, gradient_NV)[0]
        return gradient_NV.mul_(self.rule.scale / self.temperature).to(raw_NV.dtype)

    def _logits(self, raw_NV: Tensor) -> Tensor:
        """Return the logits that softmax is taken of: by the rule and the temperature, in float32 or float64."""
        logits_NV = self.rule(raw_NV if raw_NV.dtype == torch.float64 else raw_NV.float())
        return logits_NV if self.temperature == 1.0 else logits_NV / self.temperature

    def _places(self, labels_N: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return which labels this rank holds, bool [n], and their places here, 0 for other labels."""
        place_N = labels_N - self.first
        own_N = (place_N >= 0) & (place_N < width)
        return own_N, torch.where(own_N, place_N, 0)

    @torch.no_grad()
    def _exchange(self, logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log Z, E (0 unless entropy is asked for) and the label's y, each [n], equal on all ranks of the group."""
        own_N, place_N = self._places(labels_N, logits_NV.shape[1])
        sum_N = logits_NV.logsumexp(-1)
        label_N = torch.where(own_N, logits_NV.gather(-1, place_N[:, None])[:, 0], 0.0)
        parts = [sum_N, label_N]
        if "entropy" in self.asked:
            parts.append((torch.exp(logits_NV - sum_N[:, None]) * logits_NV).sum(-1))
        mine_KN = torch.stack(parts)
        ranks_RKN = [torch.empty_like(mine_KN) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(ranks_RKN, mine_KN, group=self.group)
        all_RKN = torch.stack(ranks_RKN)
        sums_RN = all_RKN[:, 0]
        total_N = sums_RN.logsumexp(0)
        mean_N = (torch.exp(sums_RN - total_N) * all_RKN[:, 2]).sum(0) if "entropy" in self.asked else torch.zeros_like(total_N)
        return total_N, mean_N, all_RKN[:, 1].sum(0)
