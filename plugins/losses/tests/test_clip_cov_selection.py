"""Which tokens `clip_cov` silences: how many, among whom, by which generator, and that each candidate is as likely as the next."""

import math
from collections import Counter

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from loss_oracles import Case, clip_cov, kl_cov, random_batch

from skyrl_engine_losses import plugin
from skyrl_engine_losses.clipping import ClipConfig
from skyrl_engine_losses.covariance import ClipCovConfig, KlCovConfig, covariance

BATCH = random_batch(8, (20, 20))


def silenced(config: ClipCovConfig, seed: int = 0) -> set[int]:
    """Tokens whose loss `clip_cov` took away; no token of BATCH has a loss of 0 otherwise but those of advantage 0."""
    case = Case("clip_cov", config, clip_cov)
    output, tokens = case.run(BATCH, seed=seed)
    plain = plugin.ppo.function(tokens, ClipConfig(config.clip_low, config.clip_high)).token_loss
    changed = (output.token_loss != plain).nonzero().flatten().tolist()
    assert all(output.token_loss[token] == 0 for token in changed)
    return set(changed)


def candidates(config: ClipCovConfig) -> set[int]:
    case = Case("ppo", ClipConfig(config.clip_low, config.clip_high), clip_cov)
    _, tokens = case.run(BATCH)
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    advantages = tokens.advantages
    clipped = ((advantages > 0) & (ratio > 1 + config.clip_high)) | ((advantages < 0) & (ratio < 1 - config.clip_low))
    cov = covariance(tokens)
    chosen = (cov > config.lower) & (cov < config.upper) & ~clipped & (advantages != 0)
    return set(chosen.nonzero().flatten().tolist())


@given(
    fraction=st.floats(0.0, 1.0),
    lower=st.floats(-1.0, 0.5),
    width=st.floats(0.01, 2.0),
    seed=st.integers(0, 2**31),
)
def test_as_many_as_said_and_only_candidates(fraction: float, lower: float, width: float, seed: int) -> None:
    """max(int(fraction n), 1), or all candidates where there are fewer. Tokens of advantage 0 may be drawn; they have no loss to lose."""
    config = ClipCovConfig(fraction=fraction, lower=lower, upper=lower + width)
    drawn = silenced(config, seed)
    allowed = candidates(config)
    wanted = max(int(fraction * len(BATCH)), 1)
    without_loss = sum(advantage == 0 for advantage in BATCH.advantages)
    assert drawn <= allowed
    assert min(wanted, len(allowed)) - without_loss <= len(drawn) <= wanted


def test_the_generator_decides() -> None:
    config = ClipCovConfig(fraction=0.1, lower=-5.0)
    assert silenced(config, seed=3) == silenced(config, seed=3)
    assert len({frozenset(silenced(config, seed)) for seed in range(20)}) > 10


def test_every_candidate_is_as_likely_as_the_next() -> None:
    """One of k candidates is drawn 2,000 times: each about 2000 / k times; five standard deviations, and the seeds are fixed."""
    config = ClipCovConfig(lower=0.1, upper=0.6)
    allowed = candidates(config)
    draws = 2000
    counts = Counter(token for seed in range(draws) for token in silenced(config, seed))
    share = 1 / len(allowed)
    tolerance = 5 * math.sqrt(draws * share * (1 - share))
    assert len(allowed) >= 4
    assert set(counts) == allowed
    assert all(abs(count - draws * share) < tolerance for count in counts.values())


def test_what_clipping_has_silenced_already_is_not_drawn_for() -> None:
    """The draw is for tokens that would still move: a token past the clipping range has no gradient to take away."""
    wide = ClipCovConfig(clip_low=0.0, clip_high=0.0, fraction=1.0, lower=-9.0, upper=9.0)
    case = Case("clip_cov", wide, clip_cov)
    output, tokens = case.run(BATCH)
    difference, advantages = tokens.logprobs - tokens.old_logprobs, tokens.advantages
    past = (difference * advantages) > 0
    assert past.any()
    assert torch.equal(output.token_loss[past], -advantages[past])
    assert not output.token_loss[~past].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_does_not_choose_between_tokens_of_equal_covariance(dtype: torch.dtype) -> None:
    """Tokens 0 and 1 share the largest covariance, 2/9, and float32 computes more for the second; the penalty is the first one's."""
    numbers = {"logprobs": [-1.0, -1.5, -1.0], "old_logprobs": [-1.0625, -1.5625, -1.0625], "advantages": [1.0, -1.0, -1.0]}
    batch = evolve(random_batch(0, (1, 1, 1)), **numbers)
    output, tokens = Case("kl_cov", KlCovConfig(), kl_cov).run(batch, dtype=dtype)
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    assert (output.token_loss + tokens.advantages * ratio).tolist() == pytest.approx([0.0625, 0.0, 0.0], abs=1e-6)
    assert output.token_loss.dtype == dtype
