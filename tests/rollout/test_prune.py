"""Old rollouts go whole segment by whole segment, as a run lets them expire, and nothing takes them for lost."""

import json
import shutil
from pathlib import Path

import pytest

from skyrl_engine.errors import CheckpointError, RolloutError
from skyrl_engine.rollout.checking import check_journal, read_listing
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.journal_index import read_index
from skyrl_engine.rollout.prune import plan_to_prune_rollouts, prune_rollouts
from skyrl_engine.rollout.segments import segments_of
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.testing.rollout_cases import plain_group

STEPS = 6


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Six steps in six sessions, a segment each, a group sampled ahead of the last checkpoint, which is of step 6."""
    directory = RunDirectory(tmp_path)
    for step in range(1, STEPS + 1):
        with open_journal(directory.rollouts, run="one", resumed=step - 1 if step > 1 else None) as journal:
            journal.append(plain_group(step, start_version=step - 1))
            journal.record_step(step, [step])
            if step == STEPS:
                journal.append(plain_group(99, start_version=step))
            document = {"trainer.json": {"journal": "one", "segments": journal.listing()}}
            CheckpointStore(directory.checkpoints).save(step, lambda path: (path / "weights").touch(), document)
    return directory


def test_only_the_last_steps_stay_and_the_next_session_misses_nothing(run: RunDirectory) -> None:
    plan = plan_to_prune_rollouts(run, 2)
    assert plan is not None
    before = sum(path.stat().st_size for path in plan.segments)
    assert sorted(read_index(run.rollouts).trained) == [1, 2, 3, 4, 5, 6]
    assert prune_rollouts(plan) == before > 0
    index = read_index(run.rollouts, read_listing(run))
    assert sorted(index.trained) == [5, 6]
    assert sorted(index.groups) == [5, 6, 99]
    assert index.losses == []
    assert check_journal(run.rollouts, read_listing(run)).wrong == ()
    assert plan_to_prune_rollouts(run, 2) is None
    with open_journal(run.rollouts, run="one", resumed=6, listed=read_listing(run)) as journal:
        assert sorted(journal.index.groups) == [5, 6, 99]


def test_what_is_kept_is_kept(run: RunDirectory) -> None:
    assert plan_to_prune_rollouts(run, STEPS) is None


def test_a_crash_before_the_files_are_gone_leaves_a_journal_that_lacks_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_to_prune_rollouts(run, 2)
    assert plan is not None
    with monkeypatch.context() as patch:
        patch.setattr("skyrl_engine.rollout.journal.Journal.delete_expired", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prune_rollouts(plan)
    plan.segments[0].unlink()
    assert read_index(run.rollouts, read_listing(run)).losses == []
    again = plan_to_prune_rollouts(run, 2)
    assert again is not None
    prune_rollouts(again)
    assert sorted(read_index(run.rollouts, read_listing(run)).trained) == [5, 6]


def test_steps_after_the_checkpoint_and_damage_are_refused(run: RunDirectory) -> None:
    with open_journal(run.rollouts, run="one", resumed=6) as journal:
        journal.append(plain_group(7, start_version=6))
        journal.record_step(7, [7])
    with pytest.raises(RolloutError, match="last checkpoint is of step 6, and step 7 was trained"):
        plan_to_prune_rollouts(run, 2)
    segments_of(run.rollouts)[3].unlink()
    with pytest.raises(RolloutError, match="damaged: segment 4 is gone"):
        plan_to_prune_rollouts(run, 2)


def test_nothing_goes_where_the_checkpoint_is_damaged(run: RunDirectory) -> None:
    plan = plan_to_prune_rollouts(run, 2)
    assert plan is not None
    trainer = run.checkpoints / "step-00000006" / "trainer.json"
    trainer.write_text(json.dumps({**json.loads(trainer.read_text()), "more": 1}))
    copy = shutil.copytree(run.rollouts, run.path / "copy")
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        prune_rollouts(plan)
    assert [path.name for path in segments_of(copy)] == [path.name for path in segments_of(run.rollouts)]
