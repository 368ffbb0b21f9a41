"""Plugins of local files: named by path, hash and line, kept byte for byte in a lock, and rebuilt from it where there is no file."""

import json
from pathlib import Path

import attrs
import pytest
from focal_of_the_docs import FOCAL, is_focal, resolve

from skyrl_engine.errors import (
    PluginBrokenError,
    PluginNotFoundError,
)
from skyrl_engine.registry.loader import load
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.registry.resolve import Registry


def test_the_printed_loss_works_from_a_local_file(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(FOCAL)
    is_focal(load(resolve("./my_loss.py:focal", base=tmp_path)))


def test_a_lock_rebuilds_a_local_file_where_there_is_none(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(FOCAL)
    lock = json.loads(json.dumps(resolve("./my_loss.py:focal", base=tmp_path).to_lock_entry()))
    (tmp_path / "my_loss.py").write_text("raise SystemExit('the recorded text counts, not the file')")
    is_focal(load(PluginRecord.from_lock(lock)))


def test_a_local_file_that_lacks_the_name_suggests_one(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(FOCAL)
    with pytest.raises(PluginNotFoundError) as caught:
        load(resolve("./my_loss.py:focl", base=tmp_path))
    assert caught.value.remedy == f"Did you mean {tmp_path}/my_loss.py:focal?"


def test_a_local_file_that_fails_is_named_by_path_hash_and_line(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text("x = 1\nx.y\n")
    record = resolve("./my_loss.py:focal", base=tmp_path)
    for _ in range(2):  # a failed import leaves nothing behind that a second would take for the module
        with pytest.raises(PluginBrokenError) as caught:
            load(record)
    assert f"{tmp_path}/my_loss.py (sha256 {record.sha256[:12]})" in caught.value.cause
    assert caught.value.details == (f"{tmp_path}/my_loss.py, line 2, in <module>",)
    assert caught.value.remedy == f"Correct {tmp_path}/my_loss.py, or choose another loss"


def test_an_edited_file_is_another_plugin_and_both_stay_what_they_were(site, tmp_path: Path) -> None:
    file = tmp_path / "my_loss.py"
    records = []
    for gamma in ("2.0", "5.0"):
        file.write_text(FOCAL.replace("2.0", gamma))
        records.append(resolve("./my_loss.py:focal", base=tmp_path))
    assert [load(record).schema().gamma for record in records] == [2.0, 5.0]
    assert load(records[0]).plugin is load(records[0]).plugin
    assert records[0].sha256 != records[1].sha256


def test_a_local_file_may_postpone_its_annotations(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text("from __future__ import annotations\n" + FOCAL)
    loaded = load(resolve("./my_loss.py:focal", base=tmp_path))
    assert attrs.fields(attrs.resolve_types(loaded.schema)).gamma.type is float


def test_the_recorded_text_keeps_every_byte(site, tmp_path: Path) -> None:
    content = "\ufeff# é\r\n".encode() + FOCAL.replace("\n", "\r\n").encode()
    (tmp_path / "my_loss.py").write_bytes(content)
    record = resolve("./my_loss.py:focal", base=tmp_path)
    assert record.source_text.encode() == content
    is_focal(load(PluginRecord.from_lock(json.loads(json.dumps(record.to_lock_entry())))))


def test_a_lock_whose_text_was_changed_is_refused(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(FOCAL)
    lock = resolve("./my_loss.py:focal", base=tmp_path).to_lock_entry()
    with pytest.raises(PluginBrokenError, match="another hash"):
        PluginRecord.from_lock({**lock, "source_text": FOCAL + "#"})


@pytest.mark.parametrize("lock", [{}, {"kind": "loss", "name": "x"}, {"kind": "loss", "name": "x", "target": "y", "novel": 1}])
def test_a_lock_that_cannot_be_read_is_refused(lock: dict[str, object]) -> None:
    with pytest.raises(PluginBrokenError, match="cannot be read"):
        PluginRecord.from_lock(lock)


@pytest.mark.parametrize("record", Registry.discover().records(), ids=lambda record: record.reference)
def test_every_installed_plugin_survives_its_lock(record: PluginRecord) -> None:
    assert PluginRecord.from_lock(json.loads(json.dumps(record.to_lock_entry()))) == record
