"""Divergences between a teacher's p and a student's q over a vocabulary, and their gradients, in few tensors of the vocabulary's size.

`contracts.kinds.needs.Divergence` defines them. Here d = log p - log q and r = log(m / q), where m is the mixture. A student that equals its
teacher has d = 0, and so r, every divergence and every gradient are exactly 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_engine.contracts.kinds.needs import Divergence


def divergence(requested: Divergence, student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Return the divergence [n] in nats, of log-probabilities log q and log p [n, v], both of which it overwrites."""
    match requested.kind:
        case "forward":
            difference_NV = torch.sub(teacher_NV, student_NV, out=student_NV)
            return teacher_NV.exp_().mul_(difference_NV).sum(-1)
        case "reverse":
            difference_NV = torch.sub(student_NV, teacher_NV, out=teacher_NV)
            return student_NV.exp_().mul_(difference_NV).sum(-1)
        case "jensen_shannon":
            share = requested.beta
            mixture_NV = _log_mixture(share, teacher_NV - student_NV)
            # log(q / m) = -r, log(p / m) = log p - (log q + r)
            from_teacher_NV = (teacher_NV - student_NV).sub_(mixture_NV).mul_(teacher_NV.exp_())
            from_student_NV = mixture_NV.mul_(student_NV.exp_())
            return share * from_teacher_NV.sum(-1) - (1 - share) * from_student_NV.sum(-1)


def divergence_gradient(
    requested: Divergence, student_NV: Tensor, teacher_NV: Tensor, add_parts: Callable[[Tensor], Tensor] = lambda part_N: part_N
) -> Tensor:
    """Return the gradient [n, v] of the divergence with respect to the logits that q is the softmax of; overwrites log q and log p.

    Where v are the tokens of a part of the vocabulary, `add_parts` adds up [n] of all parts.

    It is q - p of `forward`, and with E_q the mean under q: q (-d - E_q[-d]) of `reverse`, (1 - beta) q (-r - E_q[-r]) of `jensen_shannon`.
    """
    match requested.kind:
        case "forward":
            return student_NV.exp_().sub_(teacher_NV.exp_())
        case "reverse":
            values_NV, factor = torch.sub(student_NV, teacher_NV, out=teacher_NV), 1.0
        case "jensen_shannon":
            difference_NV = torch.sub(teacher_NV, student_NV, out=teacher_NV)
            values_NV, factor = _log_mixture(requested.beta, difference_NV).neg_(), 1 - requested.beta
    probabilities_NV = student_NV.exp_()
    mean_N = add_parts(torch.linalg.vecdot(probabilities_NV, values_NV))
    return values_NV.sub_(mean_N[:, None]).mul_(probabilities_NV).mul_(factor)


def _log_mixture(share: float, difference_NV: Tensor) -> Tensor:
    """Return r = log(share p + (1 - share) q) - log q of d, which it overwrites.

    It is log1p(share expm1(d)); where d > 0, which may overflow, the same is d + log1p((1 - share) expm1(-d)).
    """
    above_NV = difference_NV > 0
    result_NV = difference_NV.abs().neg_().expm1_()
    # tensors, because numbers would be rounded to float32
    other, own = difference_NV.new_tensor(1 - share), difference_NV.new_tensor(share)
    result_NV.mul_(torch.where(above_NV, other, own)).log1p_()
    return result_NV.add_(difference_NV.clamp_(min=0))
