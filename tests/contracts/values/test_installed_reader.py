"""The reader of lists that an installed distribution offers: found without being passed, and never a reason to fail."""

import sys

import numpy as np
import pytest

from skyrl_engine.contracts import SampleColumns
from skyrl_engine.contracts.values import ingest

READER = """
asked = []

def read(rows, dtype):
    asked.append(len(rows))
"""


@pytest.fixture
def offer_reader(tmp_path, monkeypatch):
    """Lay out a distribution as pip does; path entries of other distributions that offer a reader are left out."""

    def lay_out(name, target, source):
        monkeypatch.delitem(sys.modules, name, raising=False)  # of an earlier session in this process, as mutation testing has
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ingest.READERS}]\nmine = {target}\n")

    monkeypatch.setattr(sys, "path", [str(tmp_path), *(place for place in sys.path if "site-packages" not in place)])
    ingest.find_reader.cache_clear()
    yield lay_out
    ingest.find_reader.cache_clear()


def read_something():
    return SampleColumns.from_lists(input_ids=[[1, 2], [3]])


def test_the_one_that_is_offered_is_asked(offer_reader):
    offer_reader("reading_lists", "reading_lists:read", READER)
    np.testing.assert_array_equal(read_something().input_ids, [1, 2, 3])
    import reading_lists

    assert reading_lists.asked == [2]
    SampleColumns.from_rollouts(prompts=[[1], [2]], responses=[[3], [4]])
    assert reading_lists.asked == [2, 4]


def test_python_reads_without_one(offer_reader, caplog):
    np.testing.assert_array_equal(read_something().input_ids, [1, 2, 3])
    assert not caplog.records


@pytest.mark.parametrize("target", ["broken_reader:read", "broken_reader_that_is_missing:read"])
def test_python_reads_where_it_cannot_be_imported(offer_reader, caplog, target):
    offer_reader("broken_reader", target, "raise RuntimeError('no such processor')")
    np.testing.assert_array_equal(read_something().input_ids, [1, 2, 3])
    (record,) = caplog.records
    assert (
        f"the reader in {ingest.READERS} cannot be used ({'no' if 'missing' not in target else 'No module'}" in record.getMessage()
    )


def test_of_several_none_is_chosen_and_all_are_named(offer_reader, caplog):
    offer_reader("reader_one", "reader_one:read", READER)
    offer_reader("reader_two", "reader_two:read", READER)
    np.testing.assert_array_equal(read_something().input_ids, [1, 2, 3])
    (record,) = caplog.records
    named = "reader_one (reader_one:read) and reader_two (reader_two:read) offer one each; keep one"
    assert record.getMessage().endswith(named)
