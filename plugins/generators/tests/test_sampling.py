"""Draws follow the distribution to its last digit, whatever else is drawn with them; filters cut it off as the contract says."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts import Sampling
from skyrl_engine_generators.sampling import BLOCK, RowDistributions, cut_off, draw, logprobs_of

CPU = torch.device("cpu")
PLAIN = Sampling(max_tokens=1)


def draw_for(logits, uniforms, sampling=PLAIN):
    rows = logits.expand(len(uniforms), -1) if logits.ndim == 1 else logits
    return draw(
        rows.contiguous(), torch.tensor(uniforms, dtype=torch.float64), RowDistributions.of([sampling] * len(uniforms), CPU)
    )


def invert_cdf(logits, uniform):
    """The definition: the first token whose distribution function exceeds the uniform number, added up in float64."""
    weights = np.exp(logits.double().numpy() - logits.double().numpy().max())
    running = np.cumsum(weights)
    return min(int(np.searchsorted(running, uniform * running[-1], side="right")), int(np.flatnonzero(weights)[-1]))


@given(st.integers(1, 3 * BLOCK + 1), st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True))
def test_a_draw_inverts_the_distribution_function(vocabulary, seed, uniform):
    """Both round, so a draw within 1e-6 of a step may fall to either side of it."""
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, vocabulary)).float()
    token = int(draw_for(logits, [uniform]).tokens[0])
    assert token in {
        invert_cdf(logits, max(0.0, uniform - 1e-6)),
        invert_cdf(logits, min(uniform + 1e-6, 1 - 1e-16)),
        invert_cdf(logits, uniform),
    }


@pytest.mark.parametrize("vocabulary", [5, BLOCK, 2 * BLOCK + 3])
def test_the_ends_of_the_unit_interval_draw_tokens_that_can_be_drawn(vocabulary):
    logits = torch.zeros(vocabulary)
    logits[0] = logits[-1] = -torch.inf
    tokens = draw_for(logits, [0.0, np.nextafter(1.0, 0.0)]).tokens.tolist()
    assert tokens == [1, vocabulary - 2]


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should_be():
    """A running sum in float32 never gets to them: the half of the mass that comes first swallows each of them."""
    vocabulary = 150_000
    logits = torch.full((vocabulary,), -17.0)
    logits[0] = 0.0
    first = 1 / (1 + (vocabulary - 1) * np.exp(-17.0))
    uniforms = first + (1 - first) * (np.arange(400) + 0.5) / 400
    tokens = draw_for(logits, uniforms.tolist()).tokens.numpy()
    due = (np.arange(400) + 0.5) / 400 * (vocabulary - 1)
    assert np.abs(tokens - due).max() < 200
    float32 = np.cumsum(np.exp(logits.numpy(), dtype=np.float32), dtype=np.float32)
    assert len(np.unique(float32)) < vocabulary / 2


def test_frequencies_are_those_of_softmax():
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, 20)).float()
    uniforms = np.random.default_rng(1).random(20_000)
    for temperature in (0.5, 1.0, 2.0):
        tokens = draw_for(logits, uniforms.tolist(), Sampling(max_tokens=1, temperature=temperature)).tokens.numpy()
        due = torch.softmax(logits.double() / temperature, -1).numpy() * len(uniforms)
        squares = float((((np.bincount(tokens, minlength=20) - due) ** 2) / due).sum())
        # chi-square of 19 degrees of freedom: above 50.8 once in 10,000
        assert squares < 50.8


def test_a_row_is_drawn_alone_as_beside_others():
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (64, 1000))).float()
    uniforms = np.random.default_rng(1).random(64)
    together = draw_for(logits, uniforms.tolist())
    for row in range(64):
        alone = draw_for(logits[row], [uniforms[row]])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == together.logprobs[row]


def test_log_probabilities_are_of_what_was_drawn_from():
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (3, 300))).float()
    requests = [
        Sampling(max_tokens=1, temperature=0.5),
        Sampling(max_tokens=1, temperature=0),
        Sampling(max_tokens=1, temperature=2.0, top_k=4),
    ]
    drawn = draw(logits, torch.tensor([0.3, 0.9, 0.6], dtype=torch.float64), RowDistributions.of(requests, CPU))
    assert drawn.tokens[1] == logits[1].argmax()
    due = logprobs_of(logits[1:2], drawn.tokens[1:2, None], 1.0)
    np.testing.assert_allclose(drawn.logprobs[1], due[0, 0], atol=1e-6)
    np.testing.assert_allclose(drawn.logprobs[0], logprobs_of(logits[:1], drawn.tokens[:1, None], 0.5)[0, 0], atol=1e-6)
    four = (logits[2] / 2).topk(4)
    place = four.indices.tolist().index(int(drawn.tokens[2]))
    np.testing.assert_allclose(drawn.logprobs[2], four.values.double().log_softmax(-1)[place], atol=1e-6)
    assert (drawn.logprobs <= 0).all()


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(max_tokens=1, top_k=2), [0, 1]),
        (Sampling(max_tokens=1, top_p=0.5), [0]),
        (Sampling(max_tokens=1, top_p=0.51), [0, 1]),
        (Sampling(max_tokens=1, top_k=2, top_p=0.7), [0, 1]),
        (Sampling(max_tokens=1, min_p=0.4), [0, 1]),
        (Sampling(max_tokens=1, top_k=3, top_p=0.99, min_p=0.49), [0, 1]),
        (Sampling(max_tokens=1, top_p=1e-9), [0]),
    ],
)
def test_filters(sampling, kept):
    """Probabilities 1/2, 1/4, 1/8, 1/8 in another order; `kept` counts from the most likely."""
    order = torch.tensor([2, 0, 3, 1])
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()[order]
    left = cut_off(logits, sampling)
    assert sorted(order[left > -torch.inf].tolist()) == kept
    assert torch.equal(left[left > -torch.inf], logits[left > -torch.inf])
