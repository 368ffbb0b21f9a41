"""The best checkpoint: it outlives the rotation, is exported, and a resume knows it; a run whose evaluations get no better ends."""

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve
from safetensors.numpy import load_file

from skyrl_engine import hookimpl
from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import EvaluationConfig
from skyrl_engine.contracts.kinds.observer import StepFinished
from skyrl_engine.errors import CheckpointError, ConfigError, PluginBrokenError
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.best import BestCheckpoint
from skyrl_engine.training.export import export_checkpoint
from skyrl_engine.training.sft.trainer import run_sft

Configure = Callable[..., ResolvedConfig]


def losses_of(directory: Path, kind: str) -> dict[int, float]:
    """The losses of steps or of evaluations, by step."""
    return {
        record["step"]: record["metrics"]["loss"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == kind
    }


class PulledPlug:
    """Ends a run in the middle, after the named step was recorded."""

    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        if event.step == self.step:
            raise RuntimeError("pulled the plug")


def test_the_best_is_any_improvement_and_patience_asks_for_min_delta() -> None:
    best = BestCheckpoint("loss", "lowest")
    seen = [(1, 3.0, True, 0), (2, 2.75, True, 1), (3, 2.75, False, 2), (4, 2.5, True, 0), (5, float("nan"), False, 1)]
    for step, loss, improves, stalled in seen:
        assert best.look(step, {"loss": loss}, min_delta=0.25) is improves
        assert best.stalled == stalled, f"after step {step}: 2.5 is more than 0.25 below 3.0, which 2.75 is not"
    assert (best.step, best.score, best.mark) == (4, 2.5, 2.5)
    reward = BestCheckpoint("evaluation/avg@4", "highest")
    assert [reward.look(step, {"evaluation/avg@4": value}, 0.0) for step, value in enumerate((0.5, 0.25, 0.75))] == [
        True,
        False,
        True,
    ]
    with pytest.raises(ConfigError, match=r"report no metric 'los'; they report loss, tokens") as caught:
        BestCheckpoint("los", "lowest").look(1, {"loss": 1.0, "tokens": 2.0}, 0.0)
    assert caught.value.problems[0].remedy == "Did you mean 'loss'?"
    seldom = BestCheckpoint("loss", "lowest")
    for metrics in ({"loss": float("nan")}, {"tokens": 2.0}):
        assert not seldom.look(1, metrics, 0.0), "it was reported once, so that its name is right"
    assert seldom.stalled == 2


@pytest.mark.parametrize(
    ("metric", "extreme"),
    [("loss", "lowest"), ("loss/sums", "lowest"), ("rewards/accuracies", "highest"), ("evaluation/sums/pass@4_low", "highest"),
     ("evaluation/tokens_mean", None)],
)  # fmt: skip
def test_metrics_whose_best_value_is_known(metric: str, extreme: str | None) -> None:
    assert EvaluationConfig(best=metric).find_extreme() == extreme
    assert EvaluationConfig(best=metric, best_is="lowest").find_extreme() == "lowest"


OVERFITS = {
    "training": {"steps": 40},
    "optimizer": {"learning_rate": 3e-2, "warmup_steps": 0, "schedule": "constant"},
    "evaluation": {"every": 2, "at_start": True, "best": "loss", "patience": 3},
    "checkpoint": {"every": 2, "keep": 1},
}
"""A run whose held-out loss rises after a few steps, so that the best checkpoint is none of the newest."""


def test_a_run_ends_out_of_patience_and_exports_its_best(configure: Configure, tmp_path: Path) -> None:
    result = run_sft(configure("reference", **OVERFITS))
    losses = losses_of(result.directory, "evaluation")
    trained = {step: loss for step, loss in losses.items() if step > 0}
    assert result.best_step == min(trained, key=trained.__getitem__)
    assert result.step == result.best_step + 3 * 2 < 40, "three evaluations without an improvement"
    store = CheckpointStore(result.directory / "checkpoints")
    assert [kept.step for kept in store.all()] == [result.best_step, result.step], "keep = 1, and the best one"
    export_checkpoint(result.directory, tmp_path / "best", "best")
    export_checkpoint(result.directory, tmp_path / "last")
    model, best, last = (
        load_file(place / "model.safetensors") for place in (result.directory / "model", tmp_path / "best", tmp_path / "last")
    )
    assert all((model[name] == best[name]).all() for name in model)
    assert any((model[name] != last[name]).any() for name in model)

    # interrupted between the best evaluation and the end, at a step without an evaluation
    with pytest.raises(PluginBrokenError, match="pulled the plug"):
        run_sft(configure("resumed", **OVERFITS), observers=[PulledPlug(result.best_step + 3)])
    resumed = run_sft(configure("resumed", **OVERFITS), resume=True)
    assert evolve(resumed, directory=result.directory) == evolve(result, metrics=resumed.metrics)
    for kind in ("step", "evaluation"):
        assert losses_of(resumed.directory, kind) == losses_of(result.directory, kind)
    again = load_file(resumed.directory / "model" / "model.safetensors")
    assert all((model[name] == again[name]).all() for name in model)

    ended = run_sft(configure("resumed", **OVERFITS), resume=True)
    assert ended.step == result.step, "a run out of patience does no step more"
    store.at(result.best_step).path.rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=f"the best checkpoint, of step {result.best_step}, is no longer"):
        run_sft(configure("reference", **OVERFITS), resume=True)


def test_a_metric_that_evaluations_do_not_report_is_refused_at_the_first(configure: Configure) -> None:
    evaluation = {"every": 1, "best": "rewards/accuracies"}
    with pytest.raises(ConfigError, match=r"evaluation.best: evaluations report no metric 'rewards/accuracies'; they report loss,"):
        run_sft(configure(evaluation=evaluation))
    corrected = run_sft(configure(evaluation={"every": 1, "best": "loss"}), resume=True)
    steps = [record["step"] for record in read_metrics(corrected.directory / "metrics.jsonl") if record["kind"] == "step"]
    assert steps == list(range(1, corrected.step + 1)), "no step before the mistake showed is lost"
    with pytest.raises(ConfigError, match="no held-out dataset has 'loss/sums'"):
        run_sft(configure("sources", evaluation={"every": 1, "best": "loss/sums"}))
    with pytest.raises(CheckpointError, match="names no best checkpoint"):
        export_checkpoint(run_sft(configure("without", training={"steps": 2})).directory, Path("output"), "best")
