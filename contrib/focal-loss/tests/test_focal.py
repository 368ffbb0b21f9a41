"""Focal cross-entropy against plain cross-entropy and against numbers worked out by hand."""

from types import SimpleNamespace

import pytest
import torch

from acme_focal_loss.plugin import FocalConfig, focal


def tokens_of(probabilities):
    return SimpleNamespace(logprobs=torch.tensor(probabilities, dtype=torch.float64).log().requires_grad_())


def test_without_focusing_it_is_cross_entropy():
    tokens = tokens_of([0.9, 0.5, 0.1])
    torch.testing.assert_close(focal(tokens, FocalConfig(gamma=0.0)), -tokens.logprobs)


@pytest.mark.parametrize("gamma", [1.0, 2.0, 5.0])
def test_equation_4(gamma):
    """-(1 - p)^gamma log p at p = 1/2 is 2^-gamma log 2."""
    loss = focal(tokens_of([0.5]), FocalConfig(gamma=gamma))
    torch.testing.assert_close(loss, torch.tensor([0.5**gamma], dtype=torch.float64) * torch.tensor(2.0, dtype=torch.float64).log())


def test_the_gradient_is_that_of_the_formula():
    tokens = tokens_of([0.9, 0.5, 0.1])
    assert torch.autograd.gradcheck(lambda logprobs: focal(SimpleNamespace(logprobs=logprobs), FocalConfig()), tokens.logprobs)
