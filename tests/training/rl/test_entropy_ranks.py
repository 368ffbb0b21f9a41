"""Ranks of entropies select the tokens that a quantile over the whole batch selects, as TRL's `top_entropy_quantile` takes it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.training.rl.entropy_ranks import rank_among_scored

ENTROPIES = st.lists(st.tuples(st.integers(0, 6).map(lambda number: number / 4), st.booleans()), min_size=1, max_size=30)


@given(tokens=ENTROPIES, share=st.integers(0, 20).map(lambda number: number / 20))
def test_a_quantile_is_reached_exactly_where_the_entropy_reaches_that_of_all(
    tokens: list[tuple[float, bool]], share: float
) -> None:
    """The bound is interpolated in float64, as numbers of few binary digits allow exactly but for the share itself: 1e-9 of room."""
    entropies, scored = (np.array(column) for column in zip(*tokens, strict=True))
    quantiles = rank_among_scored(entropies.astype(np.float32), scored)
    assert quantiles.dtype == np.float32
    assert (quantiles[~scored] == 0).all()
    if scored.any():
        bound = float(torch.quantile(torch.from_numpy(entropies[scored]), 1 - share))
        kept = quantiles[scored] >= np.float32(1 - share)
        assert (kept == (entropies[scored] >= bound - 1e-9)).all()


def test_golden_ranks() -> None:
    assert rank_among_scored(
        np.array([3.0, 1.0, 9.0, 2.0, 2.0, 5.0], np.float32), np.array([1, 1, 0, 1, 1, 1], bool)
    ) == pytest.approx([0.75, 0.0, 0.0, 0.5, 0.5, 1.0])
    assert rank_among_scored(np.array([0.5, 7.0], np.float32), np.array([True, False])).tolist() == [1.0, 0.0]
    assert rank_among_scored(np.zeros(0, np.float32), np.zeros(0, bool)).tolist() == []
