"""Common prefixes: found by token ids, in neighbours of an order, and those of some of the samples."""

from itertools import chain, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.collator import DenseBatch, GatherIndex, as_dense_batch
from skyrl_engine.contracts.values.plan import SampleLengths
from skyrl_engine.contracts.values.prefixes import CommonPrefixes, PrefixTree, find_common_prefixes, range_minima
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.errors import ResultError

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=9)


def count_common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def find(rows: list[list[int]], dtype: type, least: int) -> CommonPrefixes:
    return find_common_prefixes(
        np.asarray(list(chain.from_iterable(rows)), dtype=dtype), offsets_of([len(row) for row in rows]), least=least
    )


@given(ROWS, st.sampled_from((np.int32, np.int64)), st.integers(1, 4))
def test_any_two_samples_of_a_tree_share_the_least_of_what_lies_between_them(
    rows: list[list[int]], dtype: type, least: int
) -> None:
    prefixes = find(rows, dtype, least)
    assert sorted(prefixes.order.tolist()) == list(range(len(rows)))
    for later in range(len(rows)):
        for earlier in range(later):
            common = count_common(rows[prefixes.order[earlier]], rows[prefixes.order[later]])
            told = int(prefixes.shared[earlier + 1 : later + 1].min())
            assert told == (common if common >= least else 0)


@given(ROWS, st.data())
def test_some_samples_share_what_they_share_among_themselves(rows: list[list[int]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True))
    own = [rows[sample] for sample in chosen]
    taken = find(rows, np.int32, 1).take(np.asarray(chosen, dtype=np.int64))
    for place in range(1, len(own)):
        assert taken.shared[place] == count_common(own[taken.order[place - 1]], own[taken.order[place]])
    ids = np.arange(len(rows), dtype=np.int64)
    lengths = SampleLengths(*([ids] * 5), prefixes=find(rows, np.int32, 1)).take(np.asarray(chosen, dtype=np.int64))
    assert lengths.prefixes is not None
    assert lengths.prefixes.order.tolist() == taken.order.tolist()


def test_long_prefixes_are_counted_to_the_token() -> None:
    numbers = np.random.default_rng(0)
    for length in (16, 17, 100, 1000, 4097):
        prefix = numbers.integers(0, 2**31, length)
        rows = [[*prefix, 1, 5], [*prefix, 2], [*prefix, 1, 6], [*prefix]]
        prefixes = find([[int(token) for token in row] for row in rows], np.int64, 16)
        assert prefixes.order.tolist() == [3, 0, 2, 1]
        assert prefixes.shared.tolist() == [0, length, length + 1, length]


def test_nothing_shares_nothing() -> None:
    assert len(find([], np.int32, 1)) == 0
    assert range_minima(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)).tolist() == []


TORCH_ROW = {"lengths": [[3, 2]], "parents": [[-1, 0]], "last_segments": [[1, 0]]}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lengths": [[3, 0]]}, "a tree with lengths"),
        ({"parents": [[-1, 1]]}, "parents"),
        ({"parents": [[0, 0]]}, "parents"),
        ({"parents": [[-1]]}, "parents"),
        ({"last_segments": [[2]]}, "last_segments"),
        ({"last_segments": [[-1]]}, "last_segments"),
    ],
)
def test_a_tree_that_is_none_is_refused_by_names(wrong: dict[str, list[list[int]]], said: str) -> None:
    torch = pytest.importorskip("torch")
    nothing = np.zeros(0, dtype=np.int64)

    def batch(values: dict[str, list[list[int]]]) -> DenseBatch:
        tree = PrefixTree(**{name: Ragged.from_list(rows, np.int64) for name, rows in values.items()})
        ids = {"input_ids": torch.zeros(1, 5, dtype=torch.int64)}
        return DenseBatch(ids, GatherIndex(nothing, nothing, nothing), Ragged.from_list([[5, 3]], np.int64), tree=tree)

    as_dense_batch("mine", batch(TORCH_ROW))
    with pytest.raises(ResultError, match=said):
        as_dense_batch("mine", batch({**TORCH_ROW, **wrong}))
