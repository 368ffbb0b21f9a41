"""A micro-batch of four sequences, one of them without a loss-carrying token."""

from collections.abc import Callable

import pytest
import torch

from skyrl_engine.contracts.kinds.loss import LossTokens, Sequences

COUNTS = (3, 0, 5, 1)


@pytest.fixture
def make_tokens() -> Callable[..., LossTokens]:
    def make(counts: tuple[int, ...] = COUNTS, dtype: torch.dtype = torch.float64, ratio: float = 0.4) -> LossTokens:
        generator = torch.Generator().manual_seed(7)
        total = sum(counts)

        def normal() -> torch.Tensor:
            return torch.randn(total, generator=generator, dtype=dtype)

        old = -normal().abs() - 0.1
        needs = {
            "logprobs": (old + ratio * normal()).requires_grad_(),
            "old_logprobs": old,
            "rollout_logprobs": old + 0.1 * normal(),
            "ref_logprobs": old + 0.2 * normal(),
            "advantages": normal(),
            "entropy": normal().abs(),
        }
        lengths = torch.tensor(counts, dtype=torch.int64)
        index = torch.repeat_interleave(torch.arange(len(counts)), lengths)
        ids = torch.arange(len(counts))
        return LossTokens(needs, Sequences(index, lengths, ids, ids), lambda: torch.Generator().manual_seed(11))

    return make
