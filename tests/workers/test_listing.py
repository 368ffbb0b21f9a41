"""Ranks share the work of summing a checkpoint's files: each file is summed once, and all have about as many bytes to read."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.workers.listing import find_files, list_files, share_files, sum_files

SIZES = st.dictionaries(st.text("abc/", min_size=1), st.integers(0, 1000), max_size=12)


@given(SIZES, st.integers(1, 5))
def test_each_file_is_in_one_share(sizes: dict[str, int], ranks: int) -> None:
    shares = share_files(sizes, ranks)
    assert len(shares) == ranks
    assert sorted(name for names in shares for name in names) == sorted(sizes)


@given(SIZES, st.integers(1, 5))
def test_shares_differ_by_one_file_at_most(sizes: dict[str, int], ranks: int) -> None:
    totals = [sum(sizes[name] for name in names) for names in share_files(sizes, ranks)]
    assert max(totals) - min(totals) <= max(sizes.values(), default=0)


def test_shares_together_are_the_listing(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b", "inner/c"):
        (tmp_path / name).write_bytes(name.encode() * len(name))
    parts = [sum_files(tmp_path, names) for names in share_files(find_files(tmp_path), 2)]
    assert {name: facts for part in parts for name, facts in part.items()} == list_files(tmp_path)
    assert list_files(tmp_path)["inner/c"]["bytes"] == 49
