"""`cross_entropy` against torch's own, and as the plugin that the engine makes of it."""

import torch

from skyrl_engine.contracts import LossTokens, Sequences, as_loss_output
from skyrl_engine_losses.plugin import cross_entropy


def tokens_of(logprobs: torch.Tensor) -> LossTokens:
    count = len(logprobs)
    sequences = Sequences(torch.zeros(count, dtype=torch.int64), torch.tensor([count]), torch.zeros(1), torch.zeros(1))
    return LossTokens({"logprobs": logprobs}, sequences, torch.Generator)


def test_it_is_torchs_cross_entropy_without_reduction() -> None:
    """Bit for bit: both negate the same log-softmax entry."""
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(7) % 11
    logprobs = logits.log_softmax(-1)[torch.arange(7), labels]
    loss = cross_entropy.skyrl_engine_make_loss(None)(tokens_of(logprobs))
    assert loss.dtype == torch.float32
    assert torch.equal(loss, torch.nn.functional.cross_entropy(logits, labels, reduction="none"))


def test_the_gradient_is_minus_one_per_token() -> None:
    logprobs = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    cross_entropy(tokens_of(logprobs), None).sum().backward()
    assert torch.equal(logprobs.grad, -torch.ones(5, dtype=torch.float64))


def test_no_token_gives_no_value() -> None:
    loss = cross_entropy.skyrl_engine_make_loss(None)
    assert as_loss_output("cross_entropy", loss(tokens_of(torch.zeros(0))), 0).token_loss.shape == (0,)


def test_what_it_declares() -> None:
    loss = cross_entropy.skyrl_engine_make_loss(None)
    assert (loss.needs, loss.reducers, loss.batch_local) == (("logprobs",), None, False)
    assert cross_entropy.skyrl_engine_config_schema() is None
