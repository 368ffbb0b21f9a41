"""Which parameters decay, and numbers that change from step to step."""

import pytest
import torch

from skyrl_engine.contracts.kinds.backend import OPTIMIZERS, AdamWSettings, OptimizerSettings, SgdSettings
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling.optimizer import build_optimizer, require_adamw, use_settings


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_only_matrices_decay(kind: type[OptimizerSettings]) -> None:
    """With a zero gradient a step multiplies what decays by 1 - rate * decay and leaves the rest as it is."""
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    optimizer = build_optimizer(layer.parameters(), kind(weight_decay=0.5))
    use_settings(optimizer, kind(learning_rate=0.1, weight_decay=0.5))
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in layer.named_parameters():
        factor = 0.95 if name == "0.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_frozen_parameters_stay_out() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    (group,) = build_optimizer(layer.parameters(), AdamWSettings()).param_groups
    assert group["params"] == [layer.bias]


def test_backends_of_adamw_alone_refuse_others_by_name() -> None:
    settings = AdamWSettings()
    assert require_adamw(settings, "other") is settings
    assert require_adamw(None, "other") is None
    with pytest.raises(UnsupportedError, match="backend other steps by adamw alone, and the settings are of sgd"):
        require_adamw(SgdSettings(), "other")
