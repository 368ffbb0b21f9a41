"""Pruning: rules say what goes; the checkpoint to resume from and the best one stay, whatever happens meanwhile."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from skyrl_engine.contracts.kinds.observer import EvaluationFinished, SessionFinished, SessionStarted
from skyrl_engine.errors import CheckpointError, ConfigError, EngineError
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.metrics import MetricsJsonl
from skyrl_engine.run.prune import PruneRules, hold_to_prune, plan_prune, prune
from skyrl_engine.workers.listing import count_bytes

LOSSES = {1: 0.9, 2: 0.4, 3: 0.6, 4: 0.7, 5: 0.8}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Five checkpoints, of which the second is the best; the steps 2 and 4 have a reference of their own."""
    directory = RunDirectory(tmp_path)
    store, observer = CheckpointStore(directory.checkpoints), MetricsJsonl()
    observer.skyrl_engine_session_started(SessionStarted(tmp_path, {}, total_steps=5))
    for step, loss in LOSSES.items():
        observer.skyrl_engine_evaluation_finished(EvaluationFinished(step, {"loss": loss}, 0.1))
        reference = {"reference": f"step-{step - step % 2}" if step > 1 else None}
        store.save(step, lambda path: (path / "weights").write_bytes(bytes(1000)) and None, {"trainer.json": reference})
    observer.skyrl_engine_session_finished(SessionFinished(5))
    for name in ("start", "step-2", "step-4"):
        (directory.reference / name).mkdir(parents=True)
        (directory.reference / name / "weights").write_bytes(bytes(100))
    directory.manifest.write_text(json.dumps({"format": 1, "sessions": [{"finished": "2026", "error": None}]}))
    return directory


def steps(directory: RunDirectory) -> list[int]:
    store = CheckpointStore(directory.checkpoints)
    for checkpoint in store.all():
        checkpoint.verify()
    return [checkpoint.step for checkpoint in store.all()]


@pytest.mark.parametrize(
    ("rules", "stay"),
    [
        (PruneRules(keep_last=1), [2, 5]),
        (PruneRules(keep_last=2), [2, 4, 5]),
        (PruneRules(keep_best=2), [2, 3, 5]),
        (PruneRules(keep_last=2, keep_best=3), [2, 3, 4, 5]),
        (PruneRules(keep_best=1, metric="loss", higher=True), [1, 5]),
        (PruneRules(older_than=3600), [1, 2, 3, 4, 5]),
    ],
)
def test_rules_say_what_stays(run: RunDirectory, rules: PruneRules, stay: list[int]) -> None:
    before = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    plan = plan_prune(run, rules)
    assert sorted(plan.stay) == stay
    assert steps(run) == [1, 2, 3, 4, 5]
    freed = prune(plan)
    assert steps(run) == stay
    assert before - freed == sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())


def test_age_is_that_of_the_checkpoint(run: RunDirectory) -> None:
    long_ago = time.time() - 7200
    for name in ("step-00000001", "step-00000002", "step-00000003", "step-00000005"):
        for path in (run.checkpoints / name, *(run.checkpoints / name).glob("*.json")):
            os.utime(path, (long_ago, long_ago))
    prune(plan_prune(run, PruneRules(older_than=3600)))
    assert steps(run) == [2, 4, 5]


def test_references_that_no_checkpoint_names_go_with_them(run: RunDirectory) -> None:
    prune(plan_prune(run, PruneRules(keep_best=1, metric="loss", higher=True)))  # 1, whose reference is the first, and 5
    assert sorted(path.name for path in run.reference.iterdir()) == ["start", "step-4"]


def test_the_checkpoint_that_is_resumed_from_need_not_be_the_newest(run: RunDirectory) -> None:
    (run.checkpoints / "latest").write_text("step-00000003\n")
    plan = plan_prune(run, PruneRules(keep_last=2))
    assert {3, 2} == set(plan.stay)
    prune(plan)
    latest = CheckpointStore(run.checkpoints).latest()
    assert latest is not None
    assert latest.step == 3


def test_the_best_checkpoint_is_the_one_that_the_run_looks_for_and_that_its_checkpoints_name(run: RunDirectory) -> None:
    manifest = json.loads(run.manifest.read_text())
    run.manifest.write_text(json.dumps({**manifest, "config": {"evaluation": {"best": "loss", "best_is": "highest"}}}))
    assert sorted(plan_prune(run, PruneRules(keep_last=1)).stay) == [1, 5]
    assert sorted(plan_prune(run, PruneRules(keep_last=1, metric="loss")).stay) == [2, 5]
    for step, best in ((5, 3), (4, 1)):
        (run.checkpoints / f"step-{step:08d}" / "best.json").write_text(json.dumps({"metric": "loss", "step": best}))
    stay = plan_prune(run, PruneRules(keep_last=1)).stay
    assert {step: stay[step] for step in sorted(stay)} == {
        1: "the best",
        3: "the best for step 5",
        5: "the one to resume from",
    }
    young = plan_prune(run, PruneRules(older_than=3600))
    assert young.go == ()
    long_ago = time.time() - 7200
    for path in (run.checkpoints / "step-00000003", *(run.checkpoints / "step-00000003").iterdir()):
        os.utime(path, (long_ago, long_ago))
    assert plan_prune(run, PruneRules(older_than=3600)).stay[3] == "the best for step 5"


def test_without_an_evaluation_no_rule_can_ask_for_the_best(run: RunDirectory) -> None:
    manifest = json.loads(run.manifest.read_text())
    run.manifest.write_text(json.dumps({**manifest, "config": {"evaluation": {"best": "accuracy", "best_is": "auto"}}}))
    assert sorted(plan_prune(run, PruneRules(keep_last=1)).stay) == [5]
    run.metrics.unlink()
    run.manifest.write_text(json.dumps(manifest))
    assert sorted(plan_prune(run, PruneRules(keep_last=1)).stay) == [5]
    with pytest.raises(ConfigError, match="no checkpoint of the run was evaluated"):
        plan_prune(run, PruneRules(keep_best=1))


def test_nothing_goes_where_the_one_to_resume_from_is_damaged(run: RunDirectory) -> None:
    (run.checkpoints / "step-00000005" / "state" / "weights").write_bytes(bytes(999))
    with pytest.raises(CheckpointError, match="is damaged"):
        prune(plan_prune(run, PruneRules(keep_last=1)))
    assert len(list(run.checkpoints.glob("step-*"))) == 5


def test_a_crash_in_the_middle_leaves_whole_checkpoints_and_the_rest_to_the_next_time(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, seen = shutil.rmtree, 0

    def die_in_the_second(path: Path, **keywords: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            (path / "files.json").unlink()
            raise OSError(5, "power cut")
        remove(path, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die_in_the_second)
        with pytest.raises(CheckpointError, match="power cut"):
            prune(plan_prune(run, PruneRules(keep_last=1)))
    assert steps(run) == [2, 4, 5]
    assert [path.name for path in plan_prune(run, PruneRules(keep_last=3)).left_overs] == [".step-00000003.replaced"]
    prune(plan_prune(run, PruneRules(keep_last=1)))
    assert steps(run) == [2, 5]
    assert not list(run.checkpoints.glob(".*"))


def test_of_a_checkpoint_that_is_a_link_the_link_goes(run: RunDirectory, tmp_path: Path) -> None:
    link = next(path for path in sorted(run.checkpoints.iterdir()) if path.name.startswith("step-"))
    link.rename(tmp_path / "of another disk")
    link.symlink_to(tmp_path / "of another disk")
    plan = plan_prune(run, PruneRules(keep_last=1))
    expected = sum(count_bytes(path) for path in plan.list_paths() if path != link) + link.lstat().st_size
    assert prune(plan) == expected
    assert not any(link.name in path.name for path in run.checkpoints.iterdir())
    assert (tmp_path / "of another disk" / "files.json").exists()


def test_a_run_on_which_a_process_works_or_may_work_is_refused(run: RunDirectory) -> None:
    with hold_to_prune(run), pytest.raises(EngineError, match="a process works on it"), hold_to_prune(run):
        pass
    holder = {"host": "gpu-7", "pid": 12, "since": "2026-01-01T00:00:00+00:00", "work": "run"}
    run.lock_file.write_text(json.dumps(holder))
    with pytest.raises(EngineError, match=r"nobody here can say.*process 12 on gpu-7") as caught, hold_to_prune(run):
        pass
    assert str(run.lock_file) in caught.value.remedy
