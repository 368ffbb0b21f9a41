"""Which parameters decay, and numbers that change from step to step."""

import torch

from skyrl_engine.contracts.kinds.backend import AdamWSettings
from skyrl_engine.modeling.optimizer import build_adamw, use_settings


def test_only_matrices_decay() -> None:
    """With a zero gradient an AdamW step multiplies what decays by 1 - rate * decay and leaves the rest as it is."""
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    optimizer = build_adamw(layer.parameters(), AdamWSettings(weight_decay=0.5))
    use_settings(optimizer, AdamWSettings(learning_rate=0.1, weight_decay=0.5))
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in layer.named_parameters():
        factor = 0.95 if name == "0.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_frozen_parameters_stay_out() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    (group,) = build_adamw(layer.parameters(), AdamWSettings()).param_groups
    assert group["params"] == [layer.bias]
