"""Borders of the journal: when segments end and go, what they say, and what is told of a disk that fails."""

import errno
import fcntl
import logging
import os
from pathlib import Path

import pytest
from attrs import evolve

from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.journal_index import _ranges_of, apply_decision, read_index
from skyrl_engine.rollout.segments import read_segment
from skyrl_engine.testing.rollout_cases import plain_group, require_same


def open_here(folder, **settings):
    return open_journal(folder, **{"run": "run-a", **settings})


def refuse(number):
    def fail(*_arguments, **_named):
        raise OSError(number, os.strerror(number))

    return fail


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def segments(folder):
    return sorted(folder.glob("*.arrow"))


def test_the_first_segment_of_a_session_says_what_it_goes_on_from(tmp_path):
    folder = tmp_path / "in" / "here"
    with open_here(folder) as journal:
        journal.record_step(1, [0])
    with open_here(folder, resumed=1):
        pass
    first, second = map(read_segment, segments(folder))
    assert (first.head.resumed, second.head.resumed) == (None, 1)
    assert (folder / ".lock").exists()


def steps_with_a_new_segment(folder, keep, last, first=1, **settings):
    """The steps after whose record a segment began."""
    found = []
    with open_here(folder, keep=keep, **settings) as journal:
        count = journal.index.newest
        for step in range(first, last + 1):
            journal.record_step(step, [step])
            if journal.index.newest > count:
                found.append(step)
                count = journal.index.newest
    return found


def test_segments_are_an_eighth_of_what_is_kept(tmp_path):
    assert steps_with_a_new_segment(tmp_path / "a", keep=8, last=3) == [1, 2, 3]
    assert steps_with_a_new_segment(tmp_path / "b", keep=84, last=25) == [10, 20]
    assert steps_with_a_new_segment(tmp_path / "c", keep=80, last=25) == [10, 20]
    assert steps_with_a_new_segment(tmp_path / "b", keep=84, first=26, last=40, resumed=25) == [35]


def test_a_large_segment_ends_and_stays_in_the_listing(tmp_path, monkeypatch):
    monkeypatch.setattr("skyrl_engine.rollout.journal._SEGMENT_BYTES", 1)
    with open_here(tmp_path) as journal:
        for step in (1, 2, 3):
            journal.record_step(step, [step])
        assert journal.listing() == {path.name: path.stat().st_size for path in segments(tmp_path)}
        assert len(journal.listing()) == 4


def test_what_has_expired_is_in_no_listing_whoever_deleted_it(tmp_path, caplog):
    with open_here(tmp_path, keep=3) as journal:
        journal.record_step(1, [1])
        segments(tmp_path)[0].unlink()
        for step in range(2, 9):
            journal.record_step(step, [step])
        assert journal.listing() == {path.name: path.stat().st_size for path in segments(tmp_path)}
    assert messages(caplog) == []


def test_a_segment_that_will_not_go_is_told_and_costs_no_run(tmp_path, monkeypatch, caplog):
    with open_here(tmp_path, keep=1) as journal:
        oldest = segments(tmp_path)[0]
        monkeypatch.setattr(Path, "unlink", refuse(errno.EPERM))
        journal.record_step(1, [1])
        journal.record_step(2, [2])
    assert messages(caplog) == [f"cannot delete {oldest}: [Errno 1] Operation not permitted"]


def test_a_journal_that_was_closed_is_closed_again_without_harm(tmp_path):
    journal = open_here(tmp_path)
    journal.close()
    journal.close()


def test_nothing_is_waited_for_twice_and_nothing_later_than_it_may(tmp_path, monkeypatch):
    now, waits = [1.0], []
    with open_here(tmp_path, clock=lambda: now[0]) as journal:
        monkeypatch.setattr("skyrl_engine.rollout.journal.os.fsync", waits.append)
        journal.commit()
        assert not waits, "there is nothing to wait for"
        journal.append(plain_group(0))
        assert not waits, "the last wait was just now"
        journal.commit()
        journal.commit()
        assert len(waits) == 1
        journal.append(plain_group(1))
        now[0] = journal._committed + 0.1
        journal.poll()
        assert len(waits) == 2


class Dripping:
    """A file that takes seven bytes at a time."""

    def __init__(self, file):
        self.file, self.name = file, file.name

    def write(self, data):
        return self.file.write(data[:7])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_file_may_take_a_part_of_what_is_written(tmp_path):
    group = plain_group(0)
    with open_here(tmp_path) as journal:
        journal._file = Dripping(journal._file)
        journal.append(group)
    require_same(read_index(tmp_path).groups[0].group(), group)


def test_a_torn_record_that_cannot_be_taken_back_is_told(tmp_path, monkeypatch, caplog):
    journal = open_here(tmp_path)
    monkeypatch.setattr("skyrl_engine.rollout.journal.os.ftruncate", refuse(errno.EIO))
    name = journal._file.name
    full = Dripping(journal._file)
    full.write = refuse(errno.ENOSPC)
    journal._file = full
    with pytest.raises(RolloutError) as caught:
        journal.append(plain_group(0))
    assert caught.value.cause == (
        f"the journal of rollouts {tmp_path} cannot be written (No space left on device); what was written before is whole"
    )
    assert caught.value.remedy == "Free space there or make it writable, then resume the run with checkpoint.resume = true"
    assert messages(caplog) == [f"{name} ends in a torn record: [Errno 5] Input/output error"]
    journal._file = full.file
    journal.close()


def test_an_error_without_words_is_told_as_it_is(tmp_path):
    journal = open_here(tmp_path)
    journal._file, file = Dripping(journal._file), journal._file

    def fail(_data):
        raise OSError("the cable is out")

    journal._file.write = fail
    with pytest.raises(RolloutError, match=r"cannot be written \(the cable is out\)"):
        journal.append(plain_group(0))
    journal._file = file
    journal.close()


@pytest.mark.parametrize("place", ["skyrl_engine.rollout.journal.sync", "skyrl_engine.rollout.journal.path_of"])
def test_a_segment_that_cannot_be_begun_is_an_error(tmp_path, monkeypatch, place):
    journal = open_here(tmp_path)
    if place.endswith("sync"):
        monkeypatch.setattr(place, refuse(errno.EIO))
        words = "Input/output error"
    else:
        monkeypatch.setattr(place, lambda folder, number: folder / "missing" / f"{number}.arrow")
        words = "No such file or directory"
    with pytest.raises(RolloutError, match=words):
        journal.begin()
    monkeypatch.undo()
    journal.close()


def test_who_holds_a_journal_is_told_with_its_folder(tmp_path, monkeypatch, caplog):
    with open_here(tmp_path), pytest.raises(RolloutError) as caught:
        open_here(tmp_path)
    assert caught.value.cause == f"another process writes the journal of rollouts {tmp_path}"
    assert caught.value.remedy == "Wait for it to end, or set another run.directory"
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    open_here(tmp_path, resumed=0).close()
    assert messages(caplog) == [f"{tmp_path} cannot be locked against a second process: [Errno 37] No locks available"]


def test_places_that_cannot_be_used_name_a_remedy(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RolloutError) as caught:
        open_here(tmp_path / "file")
    assert caught.value.remedy == "Make its directory readable and writable"
    open_here(tmp_path / "journal").close()
    with pytest.raises(RolloutError) as caught:
        open_here(tmp_path / "journal", run="run-b")
    assert caught.value.remedy == f"Move {tmp_path / 'journal'} away, or set another run.directory"


SAMPLED_AGAIN = "what is lost of the groups that this run goes on with is sampled again, under the same seeds"


@pytest.mark.parametrize(
    ("lost", "resumed", "listed", "told"),
    [(True, 1, False, True), (True, None, False, False), (True, None, True, True), (False, 1, True, False)],
)
def test_who_goes_on_is_told_that_what_is_lost_is_sampled_again(tmp_path, caplog, lost, resumed, listed, told):
    with open_here(tmp_path) as journal:
        journal.append(plain_group(0))
        journal.record_step(1, [0])
        listing = journal.listing()
    with open_here(tmp_path, resumed=1):
        pass
    if lost:
        segments(tmp_path)[0].unlink()
    with open_here(tmp_path, resumed=resumed, listed=listing if listed else None):
        pass
    said = messages(caplog)
    assert (SAMPLED_AGAIN in said) == told
    lacks = f"the journal of rollouts {tmp_path} lacks what was recorded: segment 1 is gone"
    assert (lacks in said) == lost


def test_ranges_of_numbers():
    assert list(_ranges_of([1, 2, 3, 5, 7, 8])) == [(1, 3), (5, 5), (7, 8)]
    assert list(_ranges_of([])) == []


def test_segments_that_are_gone_are_told_by_their_range(tmp_path):
    with open_here(tmp_path, keep=8) as journal:
        for step in range(1, 7):
            journal.record_step(step, [step])
        listing = journal.listing()
    whole = read_index(tmp_path, listing)
    assert whole.losses == []
    for path in segments(tmp_path)[1:4]:
        path.unlink()
    assert read_index(tmp_path, listing).losses == ["segments 2 to 4 are gone"]


def test_the_decision_of_a_ledger_leaves_the_rest_of_a_group():
    group = plain_group(3, start_version=2, dropped="equal")
    assert apply_decision(group, trained=False) is group
    require_same(apply_decision(group, trained=True), evolve(group, dropped=None))


def test_what_a_checkpoint_counts_on_is_missed_after_a_repair_too(tmp_path, caplog):
    """The first of three segments is damaged, and the last is gone."""
    with open_here(tmp_path, keep=8) as journal:
        journal.append(plain_group(0))
        for step in (1, 2):
            journal.record_step(step, [step])
        listing = journal.listing()
    first, _, last = segments(tmp_path)
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 255
    first.write_bytes(content)
    last.unlink()
    with open_here(tmp_path, resumed=2, listed=listing) as journal:
        assert "segment 3 is gone" in journal.index.losses
    assert f"the journal of rollouts {tmp_path} lacks what was recorded: segment 3 is gone" in messages(caplog)
