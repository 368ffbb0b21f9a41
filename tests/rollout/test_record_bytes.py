"""A header that is proven from a message's bytes is that of the record's arrays, and no message is proven that the arrays would refuse."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout import messages
from skyrl_engine.rollout.arrow_codec import LearnedAttempt, batch_of, encode_learned, formats, present_format
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.messages import metadata_of, read_header, read_record
from skyrl_engine.rollout.record_bytes import layout_of, prove
from skyrl_engine.rollout.segments import read_segment
from skyrl_engine.testing.rollout_cases import groups, plain_group, require_same

LAYOUT = layout_of(present_format())


def message_of(batch, crc: int, header) -> bytes:
    """The bytes of a record, as a journal writes them."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata=metadata_of(header, crc))
    content = sink.getvalue().to_pybytes()
    begin = 8 + int.from_bytes(content[4:8], "little")
    # the last eight bytes say that the stream ends
    return content[begin:-8]


def header_of(group: Group) -> dict[str, object]:
    return {
        "event": "group",
        "ticket": group.ticket,
        "environment": group.environment,
        "task_key": group.task_key,
        "start_version": group.start_version,
        "dropped": group.dropped,
    }


@given(group=groups(least=1))
def test_every_group_is_proven_from_its_bytes(group):
    header = header_of(group)
    batch, crc = batch_of(group)
    message = message_of(batch, crc, header)
    text, checksum = prove(message, LAYOUT)
    assert json.loads(text) == header
    read, rows = read_record(message, 0)
    assert (read.header, read.checksum, read.end) == (header, checksum, len(message))
    assert rows.equals(batch)


def test_what_a_step_learned_is_proven_from_its_bytes():
    values = np.arange(5, dtype=np.float32)
    header = {"event": "trained", "step": 3, "tickets": [0], "attempts": [2]}
    message = message_of(*encode_learned([LearnedAttempt(0, member, values, -values) for member in range(2)]), header)
    text, _ = prove(message, LAYOUT)
    assert json.loads(text) == header


@pytest.fixture(scope="module")
def message() -> bytes:
    group = plain_group(3)
    return message_of(*batch_of(group), header_of(group))


@pytest.mark.parametrize("mask", [0x01, 0x08, 0x80, 0xFF])
def test_no_changed_byte_is_proven_that_arrow_would_refuse(message, mask, monkeypatch):
    """Every byte in turn: what is proven is also read by its arrays alone, as the same rows."""
    original, rows = read_record(message, 0)
    proven = 0
    for place in range(8, len(message)):
        damaged = bytearray(message)
        damaged[place] ^= mask
        found = prove(bytes(damaged), LAYOUT)
        if found is None:
            continue
        # padding, or what says of a table how long it is
        proven += 1
        assert json.loads(found[0]) == original.header
        with monkeypatch.context() as patch:
            patch.setattr(messages, "prove", lambda *_: None)
            read, same = read_record(bytes(damaged), 0)
        assert (read.header, read.checksum) == (original.header, original.checksum)
        assert same.equals(rows)
    assert 0 < proven < len(message) / 2


@given(data=st.data())
def test_what_is_proven_is_what_was_written(data, message):
    """Whatever happens to the bytes, reading by them says what reading by arrays says."""
    damaged = bytearray(message)
    for _ in range(data.draw(st.integers(1, 3))):
        place, count = data.draw(st.integers(0, len(message) - 1)), data.draw(st.integers(0, 16))
        damaged[place : place + count] = data.draw(st.binary(min_size=count, max_size=count))
    found = prove(bytes(damaged), LAYOUT)
    if found is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "prove", lambda *_: None)
        assert read_header(bytes(damaged), 0).header == json.loads(found[0])


def test_documents_that_begin_elsewhere_are_not_proven(message):
    """The checksum goes over their lengths, which stay."""
    _, rows = read_record(message, 0)
    bounds = np.frombuffer(rows.column("document").buffers()[1], np.int32)
    assert message.count(bounds.tobytes()) == 1
    assert prove(message, LAYOUT) is not None
    assert prove(message.replace(bounds.tobytes(), (bounds - 1).tobytes()), LAYOUT) is None
    assert prove(message.replace(bounds.tobytes(), (bounds + 1).tobytes()), LAYOUT) is None


def test_records_of_every_format_are_read_alike_by_their_arrays(message, monkeypatch):
    proven = read_header(message, 0)
    monkeypatch.setattr(messages, "prove", lambda *_: None)
    judged = read_header(message, 0)
    assert (judged.header, judged.checksum) == (proven.header, proven.checksum)
    assert layout_of("2") is None
    assert [number for number in formats() if layout_of(number) is not None] == list(formats())[:-1]


def test_a_whole_segment_is_read_without_arrays(tmp_path, monkeypatch):
    """None but the records without rows, of which there is one for each session."""
    with open_journal(tmp_path, run="x", resumed=0) as journal:
        for ticket in range(20):
            journal.append(plain_group(ticket))
        journal.record_step(1, list(range(20)))
    made = []
    make = messages._batch_of
    monkeypatch.setattr(messages, "_batch_of", lambda *given: (made.append(given), make(*given))[1])
    (path,) = tmp_path.glob("*.arrow")
    segment = read_segment(path)
    assert len(segment.entries) == 22
    without_rows = 2  # the session's mark, and the step of which nothing was learned
    assert len(made) == without_rows
    require_same(segment.entries[1].group(), plain_group(0))


def test_tokens_alone_are_read_of_a_group(tmp_path):
    with open_journal(tmp_path, run="x") as journal:
        journal.append(plain_group(0))
    (path,) = tmp_path.glob("*.arrow")
    (entry,) = read_segment(path).entries
    tokens = entry.read_tokens()
    assert [ids.tolist() for ids in tokens] == [attempt.token_ids.tolist() for attempt in plain_group(0).trajectories]
    _, batch = read_record(path.read_bytes(), entry.offset, ("token_ids",))
    assert batch.schema.names == ["token_ids"]


def test_a_record_that_is_another_by_now_is_refused(tmp_path):
    for name, reward in (("a", 1.0), ("b", 0.5)):
        with open_journal(tmp_path / name, run="x") as journal:
            journal.append(plain_group(0, rewards=(reward, 0.0)))
    (path,), (other,) = ((tmp_path / name).glob("*.arrow") for name in ("a", "b"))
    (entry,) = read_segment(path).entries
    path.write_bytes(other.read_bytes())
    for read in (entry.group, entry.read_tokens, entry.rows, lambda: entry.header):
        with pytest.raises(RolloutError, match="group 0 cannot be read"):
            read()
