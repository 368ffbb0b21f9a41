"""Corrections against loops over tokens, at their bounds, and one after the other as the engine applies them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_oracles import sequences_of

from skyrl_engine.contracts import FunctionCorrection, LossTokens, Ragged
from skyrl_engine.objective.behind import Later
from skyrl_engine.objective.corrections import correct
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine.objective.tokens import MicroBatchTokens
from skyrl_engine.testing.subject import part_of
from skyrl_engine_losses import plugin
from skyrl_engine_losses.corrections import (
    OffPolicySequenceMaskConfig,
    OutlierSequenceConfig,
    SequenceMaskConfig,
    TisConfig,
    TokenMaskConfig,
    TopEntropyConfig,
)

Sample = Sequence[float]
"""log old - log rollout of each token."""


def made(config: Any) -> FunctionCorrection:
    names = {
        OutlierSequenceConfig: "outlier_sequence",
        TokenMaskConfig: "token_mask",
        TisConfig: "tis",
        SequenceMaskConfig: "sequence_mask",
    }
    correction: FunctionCorrection = getattr(plugin, names[type(config)]).skyrl_engine_make_correction(config)
    return correction


def factors(config: Any, *samples: Sample, dtype: torch.dtype = torch.float64) -> list[float]:
    """Factors of one correction by token; the rollout policy's log-probabilities are 0, so the old one's are the log-ratios."""
    old = torch.tensor([value for sample in samples for value in sample], dtype=dtype)
    tokens = LossTokens(
        {"old_logprobs": old, "rollout_logprobs": torch.zeros_like(old)},
        sequences_of([len(sample) for sample in samples]),
        torch.Generator,
    )
    result = made(config)(tokens)
    assert result.dtype == dtype
    assert result.shape == old.shape
    factors: list[float] = result.tolist()
    return factors


def rho(difference: float) -> float:
    return math.exp(min(max(difference, -20.0), 20.0))


def expected(config: Any, *samples: Sample) -> list[float]:
    """The definitions once more, sequence by sequence."""
    result: list[float] = []
    for sample in samples:
        ratios = [rho(value) for value in sample]
        log_product = sum(min(max(value, -20.0), 20.0) for value in sample)
        match config:
            case OutlierSequenceConfig():
                result += [float(all(config.low <= ratio <= config.high for ratio in ratios))] * len(sample)
            case TokenMaskConfig():
                result += [float(config.low <= ratio <= config.high) for ratio in ratios]
            case TisConfig(ratio="token"):
                result += [min(ratio, 2.0 if config.high is None else config.high) for ratio in ratios]
            case TisConfig():
                product = math.exp(log_product) if log_product < 700 else math.inf
                result += [min(product, 5.0 if config.high is None else config.high)] * len(sample)
            case SequenceMaskConfig(mean="geometric"):
                kept = (config.low or 0.99) <= math.exp(log_product / max(len(sample), 1)) <= (config.high or 1.01)
                result += [float(kept)] * len(sample)
            case SequenceMaskConfig():
                kept = log_product < 700 and (config.low or 0.5) <= math.exp(log_product) <= (config.high or 2.0)
                result += [float(kept)] * len(sample)
    return result


CONFIGS = [
    OutlierSequenceConfig(),
    OutlierSequenceConfig(low=0.2, high=3.0),
    TokenMaskConfig(),
    TokenMaskConfig(low=0.9, high=1.1),
    TisConfig(),
    TisConfig(high=1.3),
    TisConfig(ratio="sequence"),
    TisConfig(ratio="sequence", high=1.5),
    SequenceMaskConfig(),
    SequenceMaskConfig(low=0.7, high=1.5),
    SequenceMaskConfig(mean="product"),
    SequenceMaskConfig(mean="product", low=0.1),
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=repr)

NUMBERS = st.one_of(st.floats(-0.02, 0.02), st.floats(-1.5, 1.5), st.floats(-1000.0, 1000.0))


@every_config
@given(samples=st.lists(st.lists(NUMBERS, max_size=5), max_size=4))
def test_factors_are_the_definitions(config: Any, samples: list[list[float]]) -> None:
    assert factors(config, *samples) == pytest.approx(expected(config, *samples), rel=1e-11, abs=1e-300)


@every_config
def test_what_the_policies_agree_on_is_left_alone(config: Any) -> None:
    assert factors(config, [0.0, 0.0, 0.0], [0.0]) == [1.0] * 4


@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nothing_comes_of_no_tokens_and_extremes_stay_finite(config: Any, dtype: torch.dtype) -> None:
    assert factors(config, dtype=dtype) == []
    assert factors(config, [], [], dtype=dtype) == []
    assert all(0 <= value < 1e9 for value in factors(config, [1000.0, -1000.0], [1000.0] * 40, [-1000.0] * 40, [0.5], dtype=dtype))


@every_config
def test_needs_are_both_policies_that_generated(config: Any) -> None:
    assert made(config).needs == ("old_logprobs", "rollout_logprobs")


def test_golden_numbers() -> None:
    """Ratios 4, 1.5 and .5, their product 3; bounds themselves are kept."""
    logs = [math.log(4.0), math.log(1.5), math.log(0.5)]
    assert factors(TisConfig(), logs) == pytest.approx([2.0, 1.5, 0.5])
    assert factors(TisConfig(ratio="sequence"), logs, [1.0, 1.0]) == pytest.approx([3.0] * 3 + [5.0] * 2)
    assert factors(TokenMaskConfig(low=1.0, high=1.0), [0.0, 1e-9]) == [1.0, 0.0]
    assert factors(OutlierSequenceConfig(), [0.0, math.log(101)], [math.log(99)], [-10.0, 0.0]) == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert factors(SequenceMaskConfig(), [0.02, -0.02, 0.0], [0.018, 0.0], [0.022, 0.0]) == [1.0] * 5 + [0.0] * 2
    assert factors(SequenceMaskConfig(), [0.011, 0.011], [-0.011]) == [0.0] * 3
    assert factors(SequenceMaskConfig(mean="product"), [0.4, 0.4], [0.3, 0.3]) == [0.0] * 2 + [1.0] * 2


def in_order(configs: Sequence[Any], *samples: Sample) -> list[float]:
    """The engine's own path: float32, corrections in the order given, each on what the former left."""
    lengths = np.array([len(sample) for sample in samples])
    old = np.array([value for sample in samples for value in sample], dtype=np.float32)
    ids = np.arange(len(samples))
    scored = ScoredSamples(
        ids,
        ids,
        ids,
        lengths,
        Ragged.from_list([list(range(length)) for length in lengths], np.int32),
        {"old_logprobs": old, "rollout_logprobs": np.zeros_like(old)},
        np.ones(len(old)),
    )
    tokens = MicroBatchTokens({"logprobs": torch.zeros(len(old))}, scored, seed=0, step=0)
    steps = [part_of(made(config), str(place), "correction") for place, config in enumerate(configs)]
    later = Later(tokens.like.device)
    result, _ = correct(steps, tokens, later, first_index=1)
    later.raise_now()
    factors: list[float] = result.tolist()
    return factors


OUTLIER, MASK, TRUNCATED, GEOMETRIC = (
    OutlierSequenceConfig(),
    TokenMaskConfig(),
    TisConfig("sequence"),
    SequenceMaskConfig("product"),
)


def test_each_correction_sees_what_the_former_left() -> None:
    """A token with ratio 10 is masked first; then the product of its sequence is that of the two others, 1.5, and not 15."""
    sample = [math.log(10.0), math.log(1.5), 0.0]
    assert in_order([MASK, TRUNCATED], sample) == pytest.approx([0.0, 1.5, 1.5], rel=1e-6)
    assert in_order([TRUNCATED, MASK], sample) == pytest.approx([0.0, 5.0, 5.0], rel=1e-6)


def test_a_sequence_is_dropped_for_a_token_only_while_the_token_is_there() -> None:
    sample = [math.log(1000.0), 0.0]
    assert in_order([OUTLIER, MASK], sample, [0.0]) == [0.0, 0.0, 1.0]
    assert in_order([MASK, OUTLIER], sample, [0.0]) == [0.0, 1.0, 1.0]


def test_a_sequence_mask_after_a_token_mask_judges_the_rest() -> None:
    sample = [math.log(8.0), math.log(1.2)]
    assert in_order([MASK, GEOMETRIC], sample) == [0.0, 1.0]
    assert in_order([GEOMETRIC, MASK], sample) == [0.0, 0.0]


def test_all_four_in_the_order_they_are_meant() -> None:
    """The first sequence goes as an outlier, a token of the second by its mask, the third by its product of 2.25; factors multiply."""
    samples = [[5.0, 0.0], [math.log(8.0), math.log(1.5)], [math.log(1.5), math.log(1.5)], [0.0]]
    assert in_order([OUTLIER, MASK, TRUNCATED, GEOMETRIC], *samples) == pytest.approx([0.0, 0.0, 0.0, 1.5, 0.0, 0.0, 1.0], rel=1e-6)


def select(name: str, config: Any, lengths: Sequence[int], **needs: Sequence[float]) -> list[float]:
    correction: FunctionCorrection = getattr(plugin, name).skyrl_engine_make_correction(config)
    assert set(correction.needs) == set(needs)
    tensors = {need: torch.tensor(values, dtype=torch.float64) for need, values in needs.items()}
    factors: list[float] = correction(LossTokens(tensors, sequences_of(lengths), torch.Generator)).tolist()
    return factors


GAPS = st.lists(st.lists(st.tuples(st.floats(-3, 3), st.sampled_from((-1.0, -0.5, 0.0, 2.0))), max_size=4), max_size=4)


@given(samples=GAPS, threshold=st.floats(0, 2))
def test_off_policy_sequences_of_negative_advantage_are_dropped(samples: list[list[tuple[float, float]]], threshold: float) -> None:
    """Equation 9 of DeepSeek-V3.2, one token after the other."""
    wanted = []
    for sample in samples:
        distance = sum(gap for gap, _ in sample) / max(len(sample), 1)
        wanted += [0.0 if advantage < 0 and distance > threshold else 1.0 for _, advantage in sample]
    flat = [token for sample in samples for token in sample]
    got = select(
        "off_policy_sequence_mask",
        OffPolicySequenceMaskConfig(threshold=threshold),
        [len(sample) for sample in samples],
        logprobs=[-gap for gap, _ in flat],
        rollout_logprobs=[0.0] * len(flat),
        advantages=[advantage for _, advantage in flat],
    )
    assert got == wanted


def test_a_token_that_became_likelier_is_no_reason_to_drop_a_sequence() -> None:
    """The mean has a sign: the trained policy finds the second sequence likelier than its sampler did."""
    far = {"logprobs": [-3.0, -3.0, -1.0, -1.0], "advantages": [-1.0, 1.0, -1.0, -1.0]}
    config = OffPolicySequenceMaskConfig(threshold=1.5, anchor="old")
    assert select("off_policy_sequence_mask", config, [2, 2], old_logprobs=[-1.0, -1.0, -3.0, -3.0], **far) == [0.0, 1.0, 1.0, 1.0]
    at_the_bound = OffPolicySequenceMaskConfig(threshold=2.0, anchor="old")
    assert select("off_policy_sequence_mask", at_the_bound, [2, 2], old_logprobs=[-1.0, -1.0, -3.0, -3.0], **far) == [1.0] * 4


@pytest.mark.parametrize(("share", "kept"), [(0.0, 1), (0.3, 4), (0.7, 8), (0.71, 8), (1.0, 11)])
def test_the_share_of_largest_entropy_is_kept_with_the_token_on_the_bound(share: float, kept: int) -> None:
    """Quantiles of 11 tokens are tenths, rounded to float32: 0.7 is not below 1 - 0.3."""
    quantiles = [float(np.float32(place / 10)) for place in range(11)]
    factors = select("top_entropy", TopEntropyConfig(share=share), [11], entropy_quantile=quantiles)
    assert factors == [0.0] * (11 - kept) + [1.0] * kept
