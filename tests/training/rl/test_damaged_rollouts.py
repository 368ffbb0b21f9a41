"""A run that is killed and loses rollouts says what it lacks, samples that again, and ends with the bytes of one that lost nothing."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_runs import Rl, kill_run, numbers_of, weights_of

from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.checking import check_journal
from skyrl_engine.rollout.segments import read_segment, segments_of
from skyrl_engine.training.rl.run import run_rl

STEPS = ("rl.steps=3", "checkpoint.every=1")


@pytest.fixture
def cut(rl: Rl, tables_of: Callable[..., dict[str, Any]]) -> Path:
    """A run that was killed in its second step and again in its third, with all groups of that one in its journal's second segment."""
    kill_run(tables_of("parts"), STEPS, "learning", 2)
    kill_run(tables_of("parts"), STEPS, "learning", 2)
    return Path(tables_of("parts")["run"]["directory"])


def flip_values(journal: Path) -> None:
    """Change a byte of the first group that was recorded after the checkpoint."""
    _, segment = segments_of(journal)
    entry = [candidate for candidate in read_segment(segment).entries if candidate.event == "group"][-3]
    content = bytearray(segment.read_bytes())
    content[entry.end - 40] ^= 0x20
    segment.write_bytes(content)


def flip_length(journal: Path) -> None:
    """Change the length of the same record."""
    _, segment = segments_of(journal)
    entry = [candidate for candidate in read_segment(segment).entries if candidate.event == "group"][-3]
    content = bytearray(segment.read_bytes())
    content[entry.offset + 4] ^= 0x40
    segment.write_bytes(content)


def empty_the_last(journal: Path) -> None:
    segments_of(journal)[1].write_bytes(b"")


def delete_the_last(journal: Path) -> None:
    segments_of(journal)[1].unlink()


def delete_the_first(journal: Path) -> None:
    segments_of(journal)[0].unlink()


def swap(journal: Path) -> None:
    first, second = segments_of(journal)
    first.rename(journal / "aside")
    second.rename(first)
    (journal / "aside").rename(second)


def delete_all(journal: Path) -> None:
    shutil.rmtree(journal)


LOSSES = {
    flip_values: "a checksum differs, 1 record lost",
    flip_length: "1 record lost",
    empty_the_last: "segment-00000002.arrow stands in the place of a damaged file: it is empty",
    delete_the_last: "segment 2 is gone",
    delete_the_first: "segment 1 is gone",
    swap: "segment-00000002.arrow is segment 1 by what it says: it was renamed",
    delete_all: "all segments are gone (2 by the last checkpoint)",
}


@pytest.mark.proof
def test_the_bytes_are_those_of_a_run_that_lost_nothing(rl: Rl, cut: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = run_rl(rl("whole", *STEPS)).directory
    copy = cut.with_name("kept")
    shutil.copytree(cut, copy)
    for damage, words in LOSSES.items():
        shutil.rmtree(cut)
        shutil.copytree(copy, cut)
        damage(cut / "rollouts")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            run_rl(rl("parts", *STEPS), resume=True)
        assert weights_of(cut) == weights_of(whole), damage
        assert numbers_of(cut) == numbers_of(whole), damage
        assert words in caplog.text, damage
        assert words in (cut / "run.log").read_text(), damage
        assert "is sampled again, under the same seeds" in caplog.text
        if damage is not delete_all:
            assert any(words in problem for problem in check_journal(cut / "rollouts").wrong), damage


def test_a_resume_warns_of_what_a_checkpoint_counts_on_and_is_gone(rl: Rl, caplog: pytest.LogCaptureFixture) -> None:
    directory = run_rl(rl("run", "rl.steps=1", "checkpoint.every=1")).directory
    delete_all(directory / "rollouts")
    run_rl(rl("run", "rl.steps=2", "checkpoint.every=1"), resume=True)
    assert "all segments are gone (1 by the last checkpoint)" in caplog.text
    assert check_journal(directory / "rollouts").groups == 3


def test_rollouts_of_another_run_are_refused_and_a_lost_name_is_found_again(rl: Rl) -> None:
    directory = run_rl(rl("run", "rl.steps=1", "checkpoint.every=1")).directory
    name = directory / "rollouts" / "run"
    known = name.read_text()
    name.write_text("")
    run_rl(rl("run", "rl.steps=2", "checkpoint.every=1"), resume=True)
    assert name.read_text() == known
    name.write_text("0123456789abcdef")
    with pytest.raises(RolloutError, match="holds the rollouts of another run"):
        run_rl(rl("run", "rl.steps=3", "checkpoint.every=1"), resume=True)
