"""A model over another's weights: what stands in for parameters takes no memory, and what cannot be shared is refused."""

import pytest
import torch
from torch import nn

from skyrl_engine import UnsupportedError
from skyrl_engine.modeling.random_states import OwnRandomStates
from skyrl_engine.modeling.shared_weights import on_the_cpu_without_memory, share_weights


def make_tied(device: str) -> nn.Module:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def test_parameters_seem_to_lie_on_the_cpu_and_go_back_as_they_are() -> None:
    model = make_tied("meta")
    before = dict(model.named_parameters())
    with on_the_cpu_without_memory(model):
        within = dict(model.named_parameters())
        assert {str(parameter.device) for parameter in within.values()} == {"cpu"}
        assert {parameter.untyped_storage().nbytes() for parameter in within.values()} == {4}
        assert model[0].weight is model[2].weight
        model.requires_grad_(requires_grad=False)
        model.add_module("added", nn.Linear(2, 2, device=model[0].weight.device))
    after = dict(model.named_parameters())
    assert all(after[name] is parameter and not parameter.requires_grad for name, parameter in before.items())
    assert after["added.weight"].requires_grad
    assert not after["added.weight"].is_meta


def test_parameters_are_shared_and_buffers_copied() -> None:
    model, base = make_tied("meta"), make_tied("cpu")
    share_weights(model, base, "m")
    assert model[0].weight is model[2].weight
    assert model[0].weight.data_ptr() == base[0].weight.data_ptr()
    assert not model[0].weight.requires_grad
    assert torch.equal(model[1].running_var, base[1].running_var)
    assert model[1].running_var.data_ptr() != base[1].running_var.data_ptr()


def test_tensors_beside_parameters_and_buffers_are_refused() -> None:
    model, base = make_tied("meta"), make_tied("cpu")
    model[0].table = torch.zeros(2, device="meta")
    with pytest.raises(UnsupportedError, match="neither parameters nor buffers"):
        share_weights(model, base, "m")


def test_own_random_states_go_on_whatever_else_draws() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(5)
    outside = torch.rand(4)
    torch.manual_seed(5)
    own = OwnRandomStates(3, torch.device("cpu"))
    found = []
    for place in range(4):
        with own.in_force():
            found.append(torch.rand(1))
        assert torch.rand(1) == outside[place]
    assert torch.equal(torch.cat(found), expected)
