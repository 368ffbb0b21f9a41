"""Every loss against its published formula, value and gradient, in float64."""

import pytest
import torch

from skyrl_engine import LossTokens
from skyrl_engine.contracts import Sequences
from skyrl_engine_tinker import losses

LOW, HIGH, BETA = 0.8, 1.2, 0.05
LENGTHS = (4, 3)


def batch() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Two sequences of four and three tokens, whose ratios are below, inside and above the bounds, with advantages of both signs."""
    p = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5, -0.7, -2.2], dtype=torch.float64, requires_grad=True)
    drift = torch.tensor([0.5, -0.5, 0.1, -0.05, 0.6, -0.4, 0.0], dtype=torch.float64)
    values = {
        "weights": torch.tensor([1.0, 0.0, -2.0, 0.5, 1.0, 1.0, 3.0], dtype=torch.float64),
        "sampler_logprobs": p.detach() - drift,
        "advantages": torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0, 0.3, 0.0], dtype=torch.float64),
        "clip_low_threshold": torch.full((7,), LOW, dtype=torch.float64),
        "clip_high_threshold": torch.full((7,), HIGH, dtype=torch.float64),
        "beta": torch.full((7,), BETA, dtype=torch.float64),
        "sequence_ratio_mask": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64),
    }
    return p, values


def sequences() -> Sequences:
    index = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return Sequences(index, torch.tensor(LENGTHS), torch.arange(2), torch.arange(2))


def formula(name: str, p: torch.Tensor, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and dL/dp of the table in the API's documentation, token by token, written without autograd."""
    q, advantages = inputs["sampler_logprobs"], inputs["advantages"]
    ratio = (p - q).exp()
    if name == "gspo":
        mask = inputs["sequence_ratio_mask"]
        ratio = torch.cat(
            [((p - q) * mask)[part].sum().div(mask[part].sum()).exp().expand(len(p[part])) for part in (slice(4), slice(4, 7))]
        )
    clipped = ratio.clamp(LOW, HIGH)
    inside = (ratio * advantages <= clipped * advantages).double()
    match name:
        case "cross_entropy":
            return -inputs["weights"] * p, -inputs["weights"]
        case "importance_sampling":
            return -ratio * advantages, -ratio * advantages
        case "ppo" | "gspo":
            return -torch.minimum(ratio * advantages, clipped * advantages), -ratio * advantages * inside
        case "cispo":
            return -clipped * p * advantages, -clipped * advantages
        case _:
            return -(p * advantages - BETA / 2 * (p - q) ** 2), -(advantages - BETA * (p - q))


@pytest.mark.parametrize("name", losses.INPUTS)
def test_value_and_gradient_are_those_of_the_formula(name):
    p, inputs = batch()
    values = getattr(losses, name)(LossTokens({"logprobs": p, **inputs}, sequences(), torch.Generator), None)
    values.sum().backward()
    value, gradient = formula(name, p.detach(), inputs)
    assert torch.allclose(values.detach(), value, rtol=0, atol=1e-12)
    assert torch.allclose(p.grad, gradient, rtol=0, atol=1e-12)


def test_a_loss_reads_its_inputs_and_nothing_else():
    for name, inputs in losses.INPUTS.items():
        columns = {losses.COLUMNS.get(input_name, input_name) for input_name in inputs}
        assert set(getattr(losses, name).needs) == {"logprobs", *columns}, name


def test_several_targets_are_summed():
    """L = -sum over k of w_k p_k, so dL/dp_k = -w_k: of one target it is cross_entropy."""
    p = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[0.25, -1.0], [2.0, 0.0]], dtype=torch.float64)
    inputs = {"logprobs_at:target_tokens": p, "weights": weights}
    values = losses.cross_entropy_of_several(LossTokens(inputs, sequences(), torch.Generator), None)
    values.sum().backward()
    assert values.tolist() == [0.25 - 2.0, 1.0]
    assert torch.equal(p.grad, -weights)
