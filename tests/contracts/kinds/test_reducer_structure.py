"""Counts of a mini-batch, however long its sequences are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds import reducer as reducer_module
from skyrl_engine.contracts.kinds.reducer import BatchStructure
from skyrl_engine.contracts.values.ragged import BLOCK, offsets_of


def structure_of(weights, lengths):
    ids = np.arange(len(lengths))
    return BatchStructure(weights, offsets_of(lengths), ids, ids, ids)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("block", [1, 3, BLOCK])
@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 6), max_size=8), seed=st.integers(0, 99))
def test_mass_and_emptiness_are_those_of_a_loop(dtype, block, lengths, seed):
    weights = np.random.default_rng(seed).integers(0, 2, sum(lengths)).astype(dtype)
    structure = structure_of(weights, lengths)
    rows = np.split(weights, structure.action_offsets[1:-1]) if lengths else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer_module, "BLOCK", block)
        mass, empty = structure.mass, structure.empty
    np.testing.assert_array_equal(mass, np.array([row.sum(dtype=np.float64) for row in rows]), strict=True)
    np.testing.assert_array_equal(empty, np.array([not row.any() for row in rows], dtype=np.bool_), strict=True)


def test_long_sequences_are_counted_to_the_last_token():
    lengths = [0, 3 * BLOCK + 1, 1, 0, 70_000, BLOCK // 2, 0]
    structure = structure_of(np.ones(sum(lengths), dtype=np.uint8), lengths)
    assert structure.mass.tolist() == lengths
    assert structure.empty.tolist() == [length == 0 for length in lengths]
