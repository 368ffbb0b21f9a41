"""A plan is of the mini-batches that may take most memory."""

import numpy as np
import pytest

from skyrl_engine.training.planned_batches import cut_batches, find_heavy_batches


def test_the_heaviest_batches_are_those_with_most_tokens_and_with_the_longest_sample() -> None:
    tokens = np.array([1, 2, 7, 7, 9, 1], dtype=np.int64)
    first, most, longest = (np.array(pair, dtype=np.int64) for pair in ([0, 1], [2, 3], [4, 5]))
    assert [batch.tolist() for batch in find_heavy_batches([first, most, longest], tokens)] == [[2, 3], [4, 5]]
    assert [batch.tolist() for batch in find_heavy_batches([first, most], tokens)] == [[2, 3]]


@pytest.mark.parametrize(("count", "size"), [(7, 3), (2, 5), (6, 3)])
def test_every_sample_is_cut_once_and_batches_are_full(count: int, size: int) -> None:
    batches = list(cut_batches(count, size, seed=3))
    assert {len(batch) for batch in batches} == {size}
    assert len(batches) == -(-count // size)
    drawn = np.concatenate(batches)
    assert sorted(drawn[:count].tolist()) == list(range(count))
    assert np.array_equal(drawn, np.concatenate(list(cut_batches(count, size, seed=3))))
