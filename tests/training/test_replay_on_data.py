"""Recorded steps of runs over a dataset under several losses."""

from pathlib import Path
from typing import Any

import pytest
from pair_runs import runs_over, write_pairs

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.find_trainer import get_trainer
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.replay.objectives import ComparedObjective, compare_objectives
from skyrl_engine.training.replay.step import Past


def recorded_steps(directory: Path) -> dict[int, dict[str, float]]:
    return {record["step"]: record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"}


def hold_against_record(
    resolved: ResolvedConfig, objectives: list[ComparedObjective], scratch: Path, *, step: int, begins: int
) -> list[Any]:
    """Train, bring a step back, and compare the first objective, the run's own, with the record."""
    trainer = get_trainer(resolved.config.trainer)
    directory = trainer.load_run()(resolved).directory
    scratch.mkdir()
    replay = trainer.load_replay()
    assert replay is not None
    with replay(resolved, Past.of(directory, step), scratch, progress=None) as recorded:
        assert (recorded.from_step, recorded.differences) == (begins, ())
        measured = compare_objectives(recorded, objectives, scratch)
    then = recorded_steps(directory)[step]
    assert measured[0].loss == then["loss"]
    assert measured[0].grad_norm == pytest.approx(then["grad_norm"], rel=1e-6)
    return measured


def test_a_step_of_fine_tuning_with_dropout(configure, tmp_path: Path) -> None:
    """Masks of dropout are drawn again as they were, for every objective."""
    objectives = [
        ComparedObjective("own"),
        ComparedObjective("again", {"use": "cross_entropy"}),
        ComparedObjective("focal", {"use": "focal"}),
        ComparedObjective("sum", {"use": "cross_entropy"}, {"use": "sum"}),
    ]
    own, again, focal, summed = hold_against_record(
        configure(checkpoint={"keep": 9}), objectives, tmp_path / "scratch", step=6, begins=3
    )
    assert (own.loss, own.grad_norm, own.kl, own.after) == (again.loss, again.grad_norm, again.kl, again.after)
    assert 0 < focal.cosine < 1 - 1e-6
    assert summed.grad_norm > 2 * own.grad_norm
    assert summed.cosine == pytest.approx(1)
    assert focal.pushes


def test_a_run_without_checkpoints_begins_at_its_start(configure, tmp_path: Path) -> None:
    resolved = configure("bare", checkpoint={"every": "none", "at_end": False}, training={"steps": 3})
    hold_against_record(resolved, [ComparedObjective("own")], tmp_path / "scratch", step=3, begins=0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("trainer", "tables", "other"),
    [
        (
            "preference",
            {"checkpoint": {"every": 2, "keep": 9}, "reference": {"refresh_every": 2, "mixup": 0.5}},
            {"use": "dpo", "form": "ipo"},
        ),
        ("preference", {"checkpoint": {"every": 2, "keep": 9}}, {"use": "simpo"}),
        ("reward_model", {"checkpoint": {"every": 2, "keep": 9}}, {"use": "bradley_terry", "center_coefficient": 0.5}),
    ],
)
def test_a_step_on_pairs(tmp_path: Path, trainer: str, tables: dict[str, Any], other: dict[str, Any]) -> None:
    make = runs_over(write_pairs(tmp_path / "pairs"), trainer, tmp_path)
    _, changed = hold_against_record(
        make(**tables), [ComparedObjective("own"), ComparedObjective("other", other)], tmp_path / "s", step=4, begins=2
    )
    assert changed.cosine is not None
    assert changed.cosine < 1


def test_steps_on_sampled_answers_are_refused(configure, tmp_path: Path) -> None:
    directory = get_trainer("sft").load_run()(configure(training={"steps": 2})).directory
    resolved = configure(training={"steps": 2}, sampling={"share": 0.5}, generator={"use": "hf"})
    replay = get_trainer("sft").load_replay()
    assert replay is not None
    with pytest.raises(UnsupportedError, match="no run keeps the answers"), replay(resolved, Past.of(directory, 1), tmp_path):
        pass
