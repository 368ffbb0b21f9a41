"""length_debiased_reinforce keeps the engine's promises about losses, and weighs sequences as it says."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from acme_length_debiased_reinforce.plugin import LengthDebiasedConfig, length_debiased_reinforce
from skyrl_engine import LossTokens
from skyrl_engine.contracts import Sequences
from skyrl_engine.testing import LossConformance


class TestLengthDebiasedReinforce(LossConformance):
    plugin = "acme-length-debiased-reinforce:length_debiased_reinforce"
    options = {"power": 0.5, "reference_length": 4.0}  # noqa: RUF012 the suite reads it, nothing changes it
    examples = 25

    def oracle(self, tokens: LossTokens) -> npt.NDArray[np.float64]:
        """One token at a time."""
        sequence = tokens.sequences.index.tolist()
        logprobs, advantages = tokens.logprobs.tolist(), tokens.advantages.tolist()
        losses = [
            -np.sqrt(4.0 / sequence.count(sequence[place])) * advantages[place] * logprobs[place] for place in range(len(sequence))
        ]
        return np.array(losses, dtype=np.float64)


def tokens_of(lengths: list[int]) -> LossTokens:
    """Sequences of these lengths, every token with log-probability -1 and advantage 1."""
    counts = torch.tensor(lengths)
    index = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    ones = torch.ones(len(index), dtype=torch.float64)
    return LossTokens(
        {"logprobs": (-ones).requires_grad_(), "advantages": ones}, Sequences(index, counts, counts, counts), torch.Generator
    )


@pytest.mark.parametrize(("power", "due"), [(0.0, [2, 8]), (0.5, [2 * 2**0.5, 8 / 2**0.5]), (1.0, [4, 4])])
def test_the_power_goes_from_tokens_that_count_alike_to_sequences_that_do(power: float, due: list[float]) -> None:
    """Sums over two sequences of 2 and 8 tokens whose loss is 1, at a reference of 4."""
    tokens = tokens_of([2, 8])
    output = length_debiased_reinforce(tokens, LengthDebiasedConfig(power=power, reference_length=4.0))
    torch.testing.assert_close(tokens.sequences.sum(output.token_loss), torch.tensor(due, dtype=torch.float64))


def test_a_sequence_without_tokens_is_not_in_the_metric() -> None:
    output = length_debiased_reinforce(tokens_of([0, 4]), LengthDebiasedConfig(power=1.0, reference_length=4.0))
    assert output.metrics["length_weight"].result == 1.0
