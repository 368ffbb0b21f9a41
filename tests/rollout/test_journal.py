"""The journal gives back what was written, to the last bit, and after a crash everything before the torn record (proof P14)."""

import errno
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.errors import ContractError, RolloutError
from skyrl_engine.rollout.arrow_codec import LearnedAttempt, no_rows
from skyrl_engine.rollout.checking import check_journal
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.journal_index import read_groups, read_index
from skyrl_engine.rollout.ledger import JournaledGroup
from skyrl_engine.testing.rollout_cases import groups, plain_group, require_same


def open_here(folder, **settings_):
    return open_journal(folder, **{"run": "run-a", **settings_})


@settings(deadline=None)
@given(data=st.lists(groups(), max_size=3, unique_by=lambda group: group.ticket))
def test_a_group_comes_back_as_it_was(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("journal")
    with open_here(folder) as journal:
        for group in data:
            journal.append(group)
    back = list(read_groups(folder))
    assert [group.ticket for group in back] == sorted(group.ticket for group in data)
    for got, expected in zip(back, sorted(data, key=lambda group: group.ticket), strict=True):
        require_same(got, expected)


def test_what_a_step_learned_comes_back_until_a_session_goes_on_from_before_it(tmp_path):
    def make_learned(ticket, member, count):
        values = np.arange(count, dtype=np.float32)
        return LearnedAttempt(ticket, member, values / 3, -values)

    attempts = [make_learned(5, 0, 2), make_learned(5, 2, 0), make_learned(3, 1, 7)]
    with open_here(tmp_path) as journal:
        journal.record_step(1, [5, 4, 3], attempts)
        journal.record_step(2, [6], [make_learned(6, 0, 1)])
    index = read_index(tmp_path)
    assert sorted(index.learned) == [1, 2]
    for got, attempt in zip(index.learned[1].read_learned(), attempts, strict=True):
        assert (got.ticket, got.member) == (attempt.ticket, attempt.member)
        assert got.advantages.tobytes() == attempt.advantages.tobytes()
        assert got.trained_logprobs.tobytes() == attempt.trained_logprobs.tobytes()
    with open_here(tmp_path, resumed=1):
        pass
    assert sorted(read_index(tmp_path).learned) == [1]


def test_any_reader_of_arrow_opens_a_segment(tmp_path):
    with open_here(tmp_path) as journal:
        journal.append(plain_group(7))
        journal.record_step(1, [7])
    (segment,) = tmp_path.glob("*.arrow")
    with segment.open("rb") as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table.num_rows == 2
    assert table.column("token_ids").to_pylist()[0] == [0, 1, 2, 3, 4]


def test_torn_at_every_byte_of_the_last_record_everything_before_it_stays(tmp_path):
    """P14: the kernel may have any prefix of what was written."""
    first, second = plain_group(0), plain_group(1, rewards=(0.5, 0.25, 1.0))
    folder = tmp_path / "whole"
    with open_here(folder) as journal:
        journal.append(first)
        (segment,) = folder.glob("*.arrow")
        before = segment.stat().st_size
        journal.append(second)
    content = segment.read_bytes()
    assert len(content) > before
    torn = tmp_path / "torn"
    torn.mkdir()
    for length in range(before, len(content)):
        (torn / segment.name).write_bytes(content[:length])
        index = read_index(torn)
        assert sorted(index.groups) == [0], length
        assert len(index.damages) == (length > before)
        assert not index.damages or index.damages[0].offset == before
    require_same(index.groups[0].group(), first)


def test_a_session_cuts_what_is_torn_and_goes_on(tmp_path, caplog):
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0))
        journal.append(plain_group(1))
    (segment,) = tmp_path.glob("*.arrow")
    os.truncate(segment, segment.stat().st_size - 3)
    with open_here(tmp_path, resumed=0) as journal:
        assert sorted(journal.index.groups) == [0]
        journal.append(plain_group(1))
    assert "torn" in caplog.text
    index = read_index(tmp_path)
    assert (sorted(index.groups), index.damages) == ([0, 1], [])
    assert len(list(tmp_path.glob("*.arrow"))) == 2


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_segment_of_which_the_beginning_alone_is_there(tmp_path, size):
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0))
    (segment,) = tmp_path.glob("*.arrow")
    os.truncate(segment, size)
    with open_here(tmp_path, resumed=0) as journal:
        journal.append(plain_group(3))
    index = read_index(tmp_path)
    assert (sorted(index.groups), index.damages) == ([3], [])


def test_a_flipped_bit_is_seen(tmp_path):
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0))
        (segment,) = tmp_path.glob("*.arrow")
        before = segment.stat().st_size
        journal.append(plain_group(1, rewards=(0.123, 0.456)))
    content = bytearray(segment.read_bytes())
    place = content.index(np.float64(0.456).tobytes(), before)
    content[place] ^= 1
    segment.write_bytes(content)
    index = read_index(tmp_path)
    assert sorted(index.groups) == [0]
    assert "a checksum differs" in str(index.damages[0])


def test_what_was_damaged_since_it_was_listed_is_an_error(tmp_path):
    with open_here(tmp_path) as journal:
        journal.append(plain_group(4))
    index = read_index(tmp_path)
    index.groups[4].segment.unlink()
    with pytest.raises(RolloutError, match="group 4 cannot be read"):
        index.groups[4].group()


def test_a_group_outlives_the_process_that_wrote_it(tmp_path):
    """It is the kernel's before anything else happens: a kill may come at once."""
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0))
        require_same(read_index(tmp_path).groups[0].group(), plain_group(0))
        journal.record_step(1, [0])
        assert read_index(tmp_path).trained == {1: (0,)}


# --- what counts -------------------------------------------------------------------------------------------------------------------


def test_a_resume_leaves_behind_what_later_weights_sampled_and_trained(tmp_path):
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0))
        journal.append(plain_group(1, start_version=0, newest=2))
        journal.append(plain_group(2, start_version=1, dropped="zero variance"))
        journal.append(plain_group(3, start_version=1), failed=True)
        for step, ticket in ((1, 0), (2, 1)):
            journal.record_step(step, [ticket])
    with open_here(tmp_path, resumed=1) as journal:
        assert journal.index.list_journaled_groups() == {
            0: JournaledGroup(0, 0),
            2: JournaledGroup(1, 1, "zero variance"),
            3: JournaledGroup(1, 1, failed=True),
        }
        assert journal.index.trained == {1: (0,)}
        journal.append(plain_group(1, start_version=1))
        journal.record_step(2, [1])
    index = read_index(tmp_path)
    assert index.steps() == {0: 1, 1: 2}
    assert index.groups[1].header["newest_version"] == 1


def test_a_session_from_the_beginning_keeps_what_the_first_weights_sampled(tmp_path):
    """A run that crashed before its first checkpoint."""
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0))
        journal.record_step(1, [0])
        journal.append(plain_group(1, start_version=1))
    with open_here(tmp_path) as journal:
        assert (sorted(journal.index.groups), journal.index.trained) == ([0], {})


def test_a_group_that_was_trained_on_was_not_dropped(tmp_path):
    """A filter wanted to drop both, and too much was dropped."""
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0, dropped="zero variance"))
        journal.append(plain_group(1, dropped="zero variance"))
        journal.record_step(1, [1])
    assert [group.dropped for group in read_groups(tmp_path)] == ["zero variance", None]


def test_old_segments_are_deleted_whole(tmp_path):
    with open_here(tmp_path, keep=3) as journal:
        for step in range(1, 11):
            journal.append(plain_group(step, start_version=step - 1))
            journal.record_step(step, [step])
        tickets = sorted(read_index(tmp_path).trained)
    assert tickets == [8, 9, 10]
    with open_here(tmp_path, keep=3, resumed=10) as journal:
        for step in range(11, 15):
            journal.record_step(step, [step])
    assert sorted(read_index(tmp_path).trained) == [12, 13, 14]


def test_a_segment_goes_after_those_before_it(tmp_path):
    """The second says that what the first holds of version 3 does not count; it must not go first."""
    with open_here(tmp_path, keep=1) as journal:
        journal.append(plain_group(9, start_version=3))
        for step in (1, 2, 3, 4, 5):
            journal._write(no_rows(), 0, {"event": "trained", "step": step, "tickets": [step]})
    with open_here(tmp_path, keep=1, resumed=1) as journal:
        journal.record_step(2, [2])
        journal.record_step(3, [3])
        assert 9 not in read_index(tmp_path).groups
        journal.record_step(4, [4])
    assert 9 not in read_index(tmp_path).groups


@pytest.mark.parametrize("lost", ["whole", "beginning"])
def test_without_the_word_of_a_session_earlier_groups_do_not_count(tmp_path, lost):
    """They may have been sampled by weights that the session left behind."""
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0, start_version=1))
    for version in (0, 1):
        with open_here(tmp_path, resumed=version) as journal:
            journal.append(plain_group(1))
    second = sorted(tmp_path.glob("*.arrow"))[1]
    if lost == "whole":
        second.unlink()
    else:
        os.truncate(second, 20)
    assert sorted(read_index(tmp_path).groups) == [1]


def test_everything_is_kept_without_a_number(tmp_path):
    with open_here(tmp_path) as journal:
        for step in range(1, 30):
            journal.record_step(step, [step])
    assert len(list(tmp_path.glob("*.arrow"))) == 1
    assert len(read_index(tmp_path).trained) == 29


# --- the disk ------------------------------------------------------------------------------------------------------------------------


def test_groups_share_one_wait_for_the_disk(tmp_path, monkeypatch):
    now, waits = [0.0], []
    monkeypatch.setattr("skyrl_engine.rollout.journal.os.fsync", lambda _: waits.append(now[0]))
    with open_here(tmp_path, clock=lambda: now[0]) as journal:
        waits.clear()
        for _ in range(50):
            now[0] += 0.01
            journal.append(plain_group(int(now[0] * 100)))
        journal.poll()
    assert 4 <= len(waits) <= 6
    (segment,) = tmp_path.glob("*.arrow")
    assert segment.stat().st_size > 0


class Full:
    """A file on a disk on which `room` bytes are left."""

    def __init__(self, file, room):
        self.file, self.room = file, room
        self.name = file.name

    def write(self, data):
        taken = bytes(data[: self.room])
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(taken)
        return self.file.write(taken)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 100, 1000])
def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path, room):
    journal = open_here(tmp_path)
    journal.append(plain_group(0))
    journal._file = Full(journal._file, room)
    with pytest.raises(RolloutError, match="No space left on device") as caught:
        journal.append(plain_group(1))
    assert "checkpoint.resume = true" in caught.value.remedy
    journal.close()
    index = read_index(tmp_path)
    assert (sorted(index.groups), index.damages) == ([0], [])
    with open_here(tmp_path, resumed=0) as again:
        again.append(plain_group(1))
    assert sorted(read_index(tmp_path).groups) == [0, 1]


def test_a_disk_that_fails_while_it_is_waited_for(tmp_path, monkeypatch):
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0))

        def refuse(_):
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr("skyrl_engine.rollout.journal.os.fsync", refuse)
            journal._dirty = True
            with pytest.raises(RolloutError, match="cannot be written"):
                journal.commit()


def test_a_disk_that_fails_in_the_end_does_not_hide_why_a_run_ended(tmp_path, monkeypatch, caplog):
    def refuse(_):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(KeyError, match="the run's own failure"), open_here(tmp_path) as journal:  # noqa: PT012 - the journal's end raises
        journal.append(plain_group(0))
        monkeypatch.setattr("skyrl_engine.rollout.journal.os.fsync", refuse)
        raise KeyError("the run's own failure")
    assert "cannot be written" in caplog.text


def test_two_processes_do_not_write_one_journal(tmp_path):
    with open_here(tmp_path), pytest.raises(RolloutError, match="another process writes"):
        open_here(tmp_path)
    open_here(tmp_path).close()


def test_a_journal_of_another_run_is_refused(tmp_path):
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0))
    with pytest.raises(RolloutError, match=r"of another run \(run-a, and this is run-b\)"):
        open_here(tmp_path, run="run-b")
    with open_here(tmp_path) as journal:
        assert sorted(journal.index.groups) == [0], "and it was let go of"


def test_a_journal_of_another_format_is_refused(tmp_path):
    schema = pa.schema([("x", pa.int32())], metadata={"run": "run-a", "format": "0"})
    with pa.OSFile(str(tmp_path / "segment-00000001.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist([{"x": 1}], schema=schema))
    with pytest.raises(RolloutError, match="no journal of rollouts of format 2 to 4"):
        open_here(tmp_path)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RolloutError, match="cannot be used"):
        open_here(tmp_path / "file")


# --- what is refused ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprobs": np.array([0, np.nan, 0], dtype=np.float32)}, r"logprobs\[1\] is nan"),
        ({"rewards": np.array([0, 0, np.inf])}, r"rewards\[2\] is inf"),
        ({"rewards": np.array([0, 1e39, 0])}, r"rewards\[1\] is 1e\+39"),
        ({"unplaced_reward": float("nan")}, "its reward is nan"),
        ({"parts": {"length": float("nan")}}, "not JSON"),
        ({"info": {"answer": {1, 2}}}, "set is not JSON"),
    ],
)
def test_values_that_nobody_could_read_back_are_refused(tmp_path, fields, words):
    group = plain_group(3)
    first, *others = group.trajectories
    with open_here(tmp_path) as journal, pytest.raises(ContractError, match="attempt 0 at task 'task-3' of spell") as caught:
        journal.append(evolve(group, trajectories=(evolve(first, **fields), *others)))
    assert re.search(words, caught.value.cause)
    assert read_index(tmp_path).groups == {}


def test_numbers_of_numpy_are_plain_ones_afterwards(tmp_path):
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0, parts={"exact": np.float32(0.1)}, success=np.bool_(True)))
    (group,) = read_groups(tmp_path)
    assert group.trajectories[0].parts == {"exact": float(np.float32(0.1))}
    assert group.trajectories[0].success is True


# --- older formats -----------------------------------------------------------------------------------------------------------------


def test_a_journal_of_format_2_is_read_and_goes_on_in_the_present_format(tmp_path):
    """The file is what skyrl-engine 0.2 wrote: rewards in float32, which hold 0.1 as 0.10000000149."""
    old = Path(__file__).parent / "material" / "format-2.arrow"
    shutil.copy(old, tmp_path / "segment-00000001.arrow")
    index = read_index(tmp_path)
    assert (sorted(index.groups), index.trained, index.damages) == ([0, 1, 2], {1: (0,)}, [])
    first = index.groups[0].group()
    assert first.trajectories[0].rewards.dtype == np.float64
    assert [trajectory.reward for trajectory in first.trajectories] == [float(np.float32(0.1)) + 0.2, float(np.float32(10.3)) + 0.2]
    assert first.trajectories[0].parts == {"right": 0.1}
    (learned, _) = index.learned[1].read_learned()
    assert learned.advantages.tolist() == [0.0, *np.float32([1 / 3, 2 / 3]).tolist()]
    with open_here(tmp_path, resumed=1) as journal:
        assert sorted(journal.index.groups) == [0, 1, 2]
        journal.append(plain_group(3, start_version=1, rewards=(0.1, 0.2)))
    assert [group.ticket for group in read_groups(tmp_path)] == [0, 1, 2, 3]
    assert [trajectory.reward for trajectory in list(read_groups(tmp_path))[3].trajectories] == [0.1, 0.2]
    assert check_journal(tmp_path).wrong == ()
