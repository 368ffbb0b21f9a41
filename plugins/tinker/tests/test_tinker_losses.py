"""Every loss against its published formula, value and gradient, in float64."""

import pytest
import torch

from skyrl_engine import LossTokens
from skyrl_engine.contracts.kinds.loss import Sequences
from skyrl_engine_tinker.losses import KINDS, tinker

LOW, HIGH, BETA = 0.8, 1.2, 0.05


def batch(kind: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], Sequences]:
    """Two sequences of four and three tokens, whose ratios lie below, inside and above the bounds, with advantages of both signs."""
    p = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5, -0.7, -2.2], dtype=torch.float64, requires_grad=True)
    drift = torch.tensor([0.5, -0.5, 0.1, -0.05, 0.6, -0.4, 0.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0, 0.3, 0.0], dtype=torch.float64)
    values = {
        "loss_kind": torch.full((7,), float(KINDS.index(kind)), dtype=torch.float64),
        "weights": torch.tensor([1.0, 0.0, -2.0, 0.5, 1.0, 1.0, 3.0], dtype=torch.float64),
        "sampler_logprobs": p.detach() - drift,
        "advantages": advantages,
        "ratio_low": torch.full((7,), LOW, dtype=torch.float64),
        "ratio_high": torch.full((7,), HIGH, dtype=torch.float64),
        "beta": torch.full((7,), BETA, dtype=torch.float64),
        "ratio_mask": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64),
    }
    index = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    return p, values, Sequences(index, torch.tensor([4, 3]), torch.arange(2), torch.arange(2))


def formula(kind: str, p: torch.Tensor, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and dL/dp of the table in the API's documentation, token by token, written without autograd."""
    q, advantages = given["sampler_logprobs"], given["advantages"]
    ratio = (p - q).exp()
    if kind == "gspo":
        mask = given["ratio_mask"]
        ratio = torch.cat(
            [((p - q) * mask)[part].sum().div(mask[part].sum()).exp().expand(len(p[part])) for part in (slice(4), slice(4, 7))]
        )
    clipped = ratio.clamp(LOW, HIGH)
    inside = (ratio * advantages <= clipped * advantages).double()
    match kind:
        case "cross_entropy":
            return -given["weights"] * p, -given["weights"]
        case "importance_sampling":
            return -ratio * advantages, -ratio * advantages
        case "ppo" | "gspo":
            return -torch.minimum(ratio * advantages, clipped * advantages), -ratio * advantages * inside
        case "cispo":
            return -clipped * p * advantages, -clipped * advantages
        case _:
            return -(p * advantages - BETA / 2 * (p - q) ** 2), -(advantages - BETA * (p - q))


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_the_formula(kind):
    p, given, sequences = batch(kind)
    values = tinker(LossTokens({"logprobs": p, **given}, sequences, torch.Generator), None)
    values.sum().backward()
    value, gradient = formula(kind, p.detach(), given)
    assert torch.allclose(values.detach(), value, rtol=0, atol=1e-12)
    assert torch.allclose(p.grad, gradient, rtol=0, atol=1e-12)


def test_losses_of_one_step_do_not_touch_each_other():
    """Sequence 0 asks for gspo and sequence 1 for dro: each has the value that it has alone."""
    p, given, sequences = batch("gspo")
    given["loss_kind"][4:] = KINDS.index("dro")
    values = tinker(LossTokens({"logprobs": p, **given}, sequences, torch.Generator), None)
    assert torch.allclose(values[:4], formula("gspo", p.detach(), given)[0][:4], rtol=0, atol=1e-12)
    assert torch.allclose(values[4:], formula("dro", p.detach(), given)[0][4:], rtol=0, atol=1e-12)
