"""A run that is killed and loses rollouts says what it lacks, samples that again, and ends with the bytes of one that lost nothing."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_runs import Rl, killed, numbers_of, weights_of

from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.checking import check_journal
from skyrl_engine.rollout.segments import read_segment, segments_of
from skyrl_engine.training.rl.trainer import run_rl

STEPS = ("rl.steps=3", "checkpoint.every=1")


@pytest.fixture
def cut(rl: Rl, tables_of: Callable[..., dict[str, Any]]) -> Path:
    """A run that was killed in its third step, with all of that step's groups in its journal."""
    killed(tables_of("parts"), STEPS, "learning", 3)
    return Path(tables_of("parts")["run"]["directory"])


def flipped(journal: Path) -> None:
    """A byte of the first group that was recorded after the checkpoint."""
    (segment,) = segments_of(journal)
    entry = [each for each in read_segment(segment).entries if each.event == "group"][6]
    content = bytearray(segment.read_bytes())
    content[entry.end - 40] ^= 0x20
    segment.write_bytes(content)


def lengthened(journal: Path) -> None:
    """The length of a record in the middle."""
    (segment,) = segments_of(journal)
    content = bytearray(segment.read_bytes())
    content[read_segment(segment).entries[3].offset + 4] ^= 0x40
    segment.write_bytes(content)


def emptied(journal: Path) -> None:
    segments_of(journal)[0].write_bytes(b"")


def deleted(journal: Path) -> None:
    segments_of(journal)[0].unlink()


def gone(journal: Path) -> None:
    shutil.rmtree(journal)


LOSSES = {
    flipped: "a checksum differs, 1 record lost",
    lengthened: "1 record lost",
    emptied: "segment-00000001.arrow stands in the place of a damaged file",
    deleted: "all segments are gone (1 by the last checkpoint)",
    gone: "all segments are gone (1 by the last checkpoint)",
}


def test_the_bytes_are_those_of_a_run_that_lost_nothing(rl: Rl, cut: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = run_rl(rl("whole", *STEPS)).directory
    kept = cut.with_name("kept")
    shutil.copytree(cut, kept)
    for damage, words in LOSSES.items():
        shutil.rmtree(cut)
        shutil.copytree(kept, cut)
        damage(cut / "rollouts")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            run_rl(rl("parts", *STEPS), resume=True)
        assert weights_of(cut) == weights_of(whole), damage
        assert numbers_of(cut) == numbers_of(whole), damage
        assert words in caplog.text, damage
        assert words in (cut / "run.log").read_text(), damage
        assert "is sampled again, under the same seeds" in caplog.text
        (lack, *_) = [each for each in check_journal(cut / "rollouts").wrong if "segment" in each]
        assert "segment" in lack


def test_rollouts_of_another_run_are_refused_and_a_lost_name_is_found_again(rl: Rl, cut: Path) -> None:
    (cut / "rollouts" / "run").write_text("")
    run_rl(rl("parts", *STEPS), resume=True)
    (cut / "rollouts" / "run").write_text("0123456789abcdef")
    with pytest.raises(RolloutError, match="holds the rollouts of another run"):
        run_rl(rl("parts", "rl.steps=4", *STEPS[1:]), resume=True)
