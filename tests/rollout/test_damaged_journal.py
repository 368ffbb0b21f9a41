"""A journal of which a part is damaged, cut off or gone gives all that is whole, never anything else, and says what it lacks."""

import gc
import logging
import os
import re
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.arrow_codec import LearnedAttempt, schema
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.journal_index import read_index
from skyrl_engine.rollout.messages import reason_at
from skyrl_engine.rollout.offline_source import RecordingLimits, read_recording
from skyrl_engine.rollout.segments import read_segment
from skyrl_engine.testing.rollout_cases import plain_group, require_same

RUN = "run-a"
GROUPS = {number: plain_group(number, rewards=(0.1 * number, 0.7)) for number in range(4)}
FIRST = "segment-00000001.arrow"
SECOND = "segment-00000002.arrow"
THIRD = "segment-00000003.arrow"


def open_here(folder, **settings_):
    return open_journal(folder, **{"run": RUN, **settings_})


def write_session(folder, tickets=(0, 1, 2, 3), *, resumed=0, trained=1):
    """A session: a mark, half of the groups, a step, the others."""
    with open_here(folder, resumed=resumed) as journal:
        half = len(tickets) // 2
        for ticket in tickets[:half]:
            journal.append(GROUPS[ticket])
        values = np.arange(3, dtype=np.float32)
        journal.record_step(trained, tickets[:1], [LearnedAttempt(tickets[0], 0, values, values)])
        for ticket in tickets[half:]:
            journal.append(GROUPS[ticket])
        return journal.listing()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A journal of one segment: its bytes, and its records."""
    folder = tmp_path_factory.mktemp("whole")
    write_session(folder)
    segment = read_segment(folder / FIRST)
    return (folder / FIRST).read_bytes(), segment.entries


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


def read(folder, content, listed=None):
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / FIRST).write_bytes(content)
    return read_index(folder, listed)


def require_right(index):
    """All that is read is what was written."""
    for ticket, entry in index.groups.items():
        require_same(entry.group(), GROUPS[ticket])


def places(entries, content):
    """Bytes of every class, of the head and of each record: marker, length, metadata, the end of the body, and those in between."""
    begins = [(0, entries[0].offset), *((entry.offset, entry.end) for entry in entries)]
    chosen = []
    for begin, end in begins:
        behind = begin + 8 + int.from_bytes(content[begin + 4 : begin + 8], "little")
        chosen += [begin, begin + 3, begin + 4, begin + 5, begin + 6, begin + 8, (begin + behind) // 2, behind - 9, behind, end - 1]
        chosen += [(behind + end) // 2, behind + (end - behind) // 4]
    return sorted({min(place, len(content) - 1) for place in chosen})


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_costs_its_record_at_most(whole, folder, mask):
    content, entries = whole
    for place in places(entries, content):
        damaged = bytearray(content)
        damaged[place] ^= mask
        index = read(folder, damaged)
        require_right(index)
        spoilt = next((number for number, entry in enumerate(entries) if entry.offset <= place < entry.end), None)
        records = {entry.header["record"] for entry in index.segments[0].entries}
        missing = {*range(len(entries))} - records
        assert missing <= {spoilt}, (place, spoilt, missing)
        assert index.losses or index.torn is not None or not missing
        if missing and spoilt != len(entries) - 1:
            assert "1 record lost" in " ".join(index.losses)


@given(data=st.data())
def test_any_bytes_in_any_place_give_nothing_that_was_not_written(whole, folder, data):
    content, entries = whole
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        place, count = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 40))
        kind = data.draw(st.sampled_from(("overwritten", "removed", "inserted", "zeroed", "ones")))
        replacement = {"zeroed": bytes(count), "ones": b"\xff" * count, "removed": b""}.get(kind)
        replacement = data.draw(st.binary(min_size=count, max_size=count)) if replacement is None else replacement
        damaged[place : place + (0 if kind == "inserted" else count)] = replacement
    index = read(folder, bytes(damaged))
    require_right(index)
    if len(index.segments[0].entries) < len(entries):
        assert index.losses or index.torn is not None
    tickets = sorted(index.groups)
    with open_here(folder, resumed=0) as journal:
        assert sorted(journal.index.groups) == tickets
    again = read_index(folder)
    assert sorted(again.groups) == tickets
    assert again.damages == []


@given(data=st.data())
def test_cut_off_anywhere_all_before_it_is_read(whole, folder, data):
    """As by a kill, at the end; a checkpoint that counts on more says what is lost."""
    content, entries = whole
    length = data.draw(
        st.integers(0, len(content)) | st.sampled_from([bound for entry in entries for bound in (entry.offset, entry.end)])
    )
    index = read(folder, content[:length])
    require_right(index)
    assert [entry.header["record"] for entry in index.segments[0].entries] == [
        number for number, entry in enumerate(entries) if entry.end <= length
    ]
    assert index.losses == []
    assert (index.torn is None) == (length in {entries[0].offset, *(entry.end for entry in entries)})
    listed = read_index(folder, {FIRST: len(content)})
    assert bool(listed.losses) == (length < len(content))
    assert listed.torn is None


def test_bytes_of_a_damaged_segment_are_let_go_of(whole, folder):
    """An error about a message holds the frames that found it, and these its bytes: none keeps the error."""
    content, entries = whole
    damaged = bytearray(content)
    damaged[entries[1].end - 30] ^= 1
    copy = bytes(damaged)
    gc.collect()
    gc.disable()
    try:
        held = sys.getrefcount(copy)
        assert reason_at(copy, entries[1].offset) == "a checksum differs"
        assert sys.getrefcount(copy) == held
    finally:
        gc.enable()


def test_several_damaged_places_leave_what_lies_between_them(whole, folder):
    content, entries = whole
    damaged = bytearray(content)
    for number in (1, 4):
        damaged[(entries[number].offset + entries[number].end) // 2 + 300] ^= 0x10
    index = read(folder, damaged)
    assert sorted(index.groups) == [1, 3]
    assert index.trained == {1: (0,)}
    assert [damage.lost for damage in index.damages] == [1, 1]
    require_right(index)


def test_a_length_that_leads_to_another_record_hides_none(whole, folder):
    """A body's length that says that of two records: the next one is found inside of it."""
    content, entries = whole
    first, second = entries[1], entries[2]
    damaged = bytearray(content)
    length = int.from_bytes(content[first.offset + 4 : first.offset + 8], "little")
    body = first.end - first.offset - 8 - length
    metadata = content[first.offset + 8 : first.offset + 8 + length]
    at = first.offset + 8 + metadata.index(body.to_bytes(8, "little"))
    damaged[at : at + 8] = (body + second.end - second.offset).to_bytes(8, "little")
    index = read(folder, damaged)
    assert sorted(index.groups) == [0, 1, 2, 3]
    assert "a length is damaged" in " ".join(index.losses)


# --- what a session does about it ----------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_kept_aside_and_its_whole_records_take_its_place(tmp_path, caplog):
    listed = write_session(tmp_path)
    content = bytearray((tmp_path / FIRST).read_bytes())
    spoilt = read_segment(tmp_path / FIRST).entries[2]
    content[spoilt.end - 20] ^= 1
    (tmp_path / FIRST).write_bytes(content)
    with caplog.at_level(logging.WARNING), open_here(tmp_path, resumed=0, listed=listed) as journal:
        assert sorted(journal.index.groups) == [0, 2, 3]
    assert (tmp_path / "damaged" / FIRST).read_bytes() == content
    assert re.search(
        rf"lacks what was recorded: {FIRST} .*bytes .* a checksum differs, 1 record lost.*damaged/{FIRST}", caplog.text
    )
    assert "is sampled again" in caplog.text
    index = read_index(tmp_path, listed)
    assert index.damages == []
    assert len(index.losses) == 1
    require_right(index)
    # a second session finds it as the first one left it
    caplog.clear()
    with open_here(tmp_path, resumed=0, listed=listed):
        pass
    assert len(list((tmp_path / "damaged").iterdir())) == 1


def test_a_file_that_is_damaged_again_is_kept_beside_the_first(tmp_path):
    write_session(tmp_path)
    for place in (1, 3):
        content = bytearray((tmp_path / FIRST).read_bytes())
        entry = read_segment(tmp_path / FIRST).entries[place]
        content[entry.end - 20] ^= 1
        (tmp_path / FIRST).write_bytes(content)
        open_here(tmp_path, resumed=0).close()
    assert sorted(file.name for file in (tmp_path / "damaged").iterdir()) == ["segment-00000001-2.arrow", FIRST]
    (lack,) = read_index(tmp_path).losses
    assert lack.count("1 record lost") == 2


def test_a_torn_end_is_cut_without_a_copy(tmp_path):
    write_session(tmp_path)
    os.truncate(tmp_path / FIRST, (tmp_path / FIRST).stat().st_size - 5)
    with open_here(tmp_path, resumed=0) as journal:
        assert sorted(journal.index.groups) == [0, 1, 2]
        assert journal.index.losses == []
    assert not (tmp_path / "damaged").exists()


def test_a_torn_end_that_a_checkpoint_counts_on_is_a_loss(tmp_path):
    """Its bytes were on the disk when the checkpoint was written: no crash tears them."""
    listed = write_session(tmp_path)
    os.truncate(tmp_path / FIRST, (tmp_path / FIRST).stat().st_size - 5)
    with open_here(tmp_path, resumed=0, listed=listed) as journal:
        assert any("bytes that the last checkpoint counts on" in loss for loss in read_index(tmp_path, listed).losses) is False
        assert "stands in the place of a damaged file" in journal.index.losses[0]
    assert (tmp_path / "damaged" / FIRST).exists()


def sessions(folder):
    """Three segments; the second says that a session went on from version 1. Group 1 is of version 2, and counts no more from there on."""
    with open_here(folder) as journal:
        journal.append(GROUPS[0])
        journal.append(plain_group(1, start_version=2))
    with open_here(folder, resumed=1) as journal:
        journal.append(GROUPS[2])
    with open_here(folder, resumed=1) as journal:
        journal.append(GROUPS[3])
        return journal.listing()


@pytest.mark.parametrize("how", ["deleted", "emptied", "cut", "overwritten"])
@pytest.mark.parametrize(
    ("name", "left"), [(FIRST, [2, 3]), (SECOND, [3]), (THIRD, [])], ids=["the first", "the middle", "the last one"]
)
def test_a_segment_that_is_lost_is_told_and_earlier_groups_do_not_count(tmp_path, caplog, name, left, how):
    listed = sessions(tmp_path)
    size = (tmp_path / name).stat().st_size
    if how == "deleted":
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(
            {"emptied": b"", "cut": (tmp_path / name).read_bytes()[:40], "overwritten": b"\xff" * size}[how]
        )
    with open_here(tmp_path, resumed=1, listed=listed) as journal:
        assert sorted(journal.index.groups) == left
        journal.append(GROUPS[1])
    assert str(int(name[8:16])) in caplog.text
    assert "lacks what was recorded" in caplog.text
    assert sorted(read_index(tmp_path, listed).groups) == sorted({*left, 1} if how != "deleted" or name != THIRD else {1})
    assert read_index(tmp_path, listed).losses


def test_without_a_mark_that_may_be_lost_earlier_groups_do_not_count_in_the_last_segment_either(tmp_path):
    """The head says which session it is of; where that is damaged too, the first record may have been its mark."""
    sessions(tmp_path)
    content = bytearray((tmp_path / THIRD).read_bytes())
    entries = read_segment(tmp_path / THIRD).entries
    content[entries[0].end - 30] ^= 0xFF
    content[entries[0].offset + 40] ^= 0xFF
    (tmp_path / THIRD).write_bytes(content)
    assert sorted(read_index(tmp_path).groups) == [0, 2, 3], "the head says it"
    content[60] ^= 0xFF
    content[200] ^= 0xFF
    (tmp_path / THIRD).write_bytes(content)
    assert sorted(read_index(tmp_path).groups) == [3]


def test_the_whole_folder_gone_is_told(tmp_path, caplog):
    listed = sessions(tmp_path / "rollouts")
    shutil.rmtree(tmp_path / "rollouts")
    with open_here(tmp_path / "rollouts", resumed=1, listed=listed) as journal:
        assert journal.index.groups == {}
        journal.append(GROUPS[0])
    assert "all segments are gone (3 by the last checkpoint)" in caplog.text
    assert sorted(read_index(tmp_path / "rollouts").groups) == [0]


def test_segments_that_changed_their_names_are_read_in_their_order(tmp_path):
    listed = sessions(tmp_path)
    tickets = sorted(read_index(tmp_path, listed).groups)
    (tmp_path / FIRST).rename(tmp_path / "aside")
    (tmp_path / SECOND).rename(tmp_path / FIRST)
    (tmp_path / "aside").rename(tmp_path / SECOND)
    index = read_index(tmp_path, listed)
    assert sorted(index.groups) == tickets
    assert [loss for loss in index.losses if "it was renamed" in loss] == [
        f"{SECOND} is segment 1 by what it says: it was renamed",
        f"{FIRST} is segment 2 by what it says: it was renamed",
    ]


def test_a_copy_in_the_place_of_a_segment_is_kept_aside(tmp_path, caplog):
    listed = sessions(tmp_path)
    shutil.copy(tmp_path / FIRST, tmp_path / SECOND)
    with open_here(tmp_path, resumed=1, listed=listed) as journal:
        assert sorted(journal.index.groups) == [3]
    assert f"{SECOND} is a copy of another segment" in caplog.text or f"{SECOND} is kept as" in caplog.text
    assert (tmp_path / "damaged" / SECOND).exists()


def test_what_has_expired_is_not_lost(tmp_path, caplog):
    with open_here(tmp_path, keep=2) as journal:
        for step in range(1, 4):
            journal.record_step(step, [step])
        listed = journal.listing()
        for step in range(4, 9):
            journal.record_step(step, [step])
    assert not (tmp_path / min(listed)).exists()
    with open_here(tmp_path, keep=2, resumed=3, listed=listed) as journal:
        assert journal.index.losses == []
    assert "lacks" not in caplog.text
    segments = sorted(tmp_path.glob("*.arrow"))
    segments[0].unlink()
    assert read_index(tmp_path, listed).losses == [f"segment {int(segments[0].stem[8:])} is gone"]


def test_a_file_that_cannot_be_opened_is_refused_and_not_taken_for_damaged(tmp_path):
    sessions(tmp_path)
    (tmp_path / SECOND).unlink()
    (tmp_path / SECOND).mkdir()
    with pytest.raises(RolloutError, match=rf"{SECOND} of the journal of rollouts cannot be read") as caught:
        open_here(tmp_path, resumed=1)
    assert "is then sampled again" in caught.value.remedy


def test_a_recording_that_is_not_all_there_is_told(tmp_path, caplog):
    write_session(tmp_path)
    content = bytearray((tmp_path / FIRST).read_bytes())
    content[read_segment(tmp_path / FIRST).entries[1].end - 20] ^= 1
    (tmp_path / FIRST).write_bytes(content)
    recording = read_recording(tmp_path, RecordingLimits(None, None, lambda _size: 1))
    assert len(recording.groups) == 3
    assert f"the rollouts of {tmp_path} are not all there: {FIRST}: bytes" in caplog.text


def test_a_journal_of_format_2_is_read_around_its_damage_too(folder):
    content = (Path(__file__).parent / "material" / "format-2.arrow").read_bytes()
    index = read(folder, content)
    groups = {ticket: entry.group() for ticket, entry in index.groups.items()}
    bounds = [(entry_of_segment.offset, entry_of_segment.end) for entry_of_segment in index.segments[0].entries]
    assert len(bounds) == 4
    for place in range(0, len(content), 61):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        index = read(folder, damaged)
        for ticket, entry in index.groups.items():
            require_same(entry.group(), groups[ticket])
        hit = any(begin <= place < end for begin, end in bounds)
        assert len(index.segments[0].entries) >= len(bounds) - hit, place
        assert index.losses or index.torn is not None or len(index.segments[0].entries) == len(bounds)


def test_a_damaged_segment_of_format_2_is_written_in_the_present_format(tmp_path):
    content = bytearray((Path(__file__).parent / "material" / "format-2.arrow").read_bytes())
    (tmp_path / FIRST).write_bytes(content)
    spoilt = read_segment(tmp_path / FIRST).entries[1]
    content[spoilt.end - 20] ^= 1
    (tmp_path / FIRST).write_bytes(content)
    before = {ticket: entry.group() for ticket, entry in read_index(tmp_path).groups.items()}
    assert sorted(before) == [0, 2]
    with open_here(tmp_path, resumed=1) as journal:
        assert sorted(journal.index.groups) == [0, 2]
    for ticket, entry in read_index(tmp_path).groups.items():
        require_same(entry.group(), before[ticket])
    assert read_segment(tmp_path / FIRST).head.number == 1
    assert (tmp_path / "damaged" / FIRST).read_bytes() == content


def test_an_empty_segment_of_format_2_lost_nothing(tmp_path):
    """There a segment had no byte before its first record."""
    shutil.copy(Path(__file__).parent / "material" / "format-2.arrow", tmp_path / FIRST)
    (tmp_path / SECOND).write_bytes(b"")
    open_here(tmp_path, resumed=1).close()
    index = read_index(tmp_path)
    assert (sorted(index.groups), index.losses) == ([0, 1, 2], [])


def test_another_format_is_refused_though_its_records_could_be_read(tmp_path):
    """Its head is as it was written: it is no damage."""
    write_session(tmp_path)
    content = (tmp_path / FIRST).read_bytes()
    head = read_segment(tmp_path / FIRST).head
    metadata = {**dict(head.metadata()), "format": "5"}
    metadata["crc32"] = f"{zlib.crc32(metadata['segment'].encode(), zlib.crc32(b'5')):08x}"
    begin = schema(tuple(metadata.items())).serialize().to_pybytes()
    (tmp_path / FIRST).write_bytes(begin + content[read_segment(tmp_path / FIRST).entries[0].offset :])
    with pytest.raises(RolloutError, match=r"no journal of rollouts of format 2 to 4 \(5\)"):
        open_here(tmp_path, resumed=0)
