"""A recorded step of a run by reinforcement under several objectives: the step's own bits, and what each objective would have done."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rl_runs import Rl

from skyrl_engine.cli.app import main
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.replay.objectives import ComparedObjective, compare_objectives, measure_pushes
from skyrl_engine.training.replay.step import Past
from skyrl_engine.training.rl.replay import replay_rl
from skyrl_engine.training.rl.run import run_rl

SETTINGS = (
    "rl.steps=4",
    "checkpoint.every=2",
    "loss.use=ppo",
    "reference.path=none",
    "rl.kl.coef=0.05",
    "rl.kl.target=0.1",
    "rollouts.keep=none",
)


@pytest.fixture
def trained(rl: Rl) -> Path:
    """A run of four steps with checkpoints of steps 2 and 4, and a penalty in the reward whose coefficient is steered."""
    return run_rl(rl("run", *SETTINGS)).directory


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def compare(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    code = main(["compare-objectives", str(run), *options, "--json"])
    output = capsys.readouterr()
    return code, json.loads(output.out) if code == 0 else {}, output.err


def test_the_first_objective_has_the_bits_that_the_step_recorded(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(trained)
    options = ("--loss", "ppo", "--loss", "reinforce", "--advantage", "grpo", "--advantage", "grpo,normalize='none'")
    code, told, problem = compare(trained, capsys, "--step", "4", *options)
    assert code == 0, problem
    assert files(trained) == before, "a replay writes nothing"
    assert (told["from_step"], told["differences"]) == (2, []), "step 3 was taken again with its bits"
    recorded = {record["step"]: record["metrics"] for record in read_metrics(trained / "metrics.jsonl") if record["kind"] == "step"}
    own, same, other, reinforce, plain = told["objectives"]
    assert (own["loss"], own["cosine"]) == (recorded[4]["loss"], pytest.approx(1))
    assert own["grad_norm"] == pytest.approx(recorded[4]["grad_norm"], rel=1e-6)
    assert own["kl"] > 0
    # the weights are the step's again for every objective
    assert {name: value for name, value in same.items() if name != "label"} == {
        name: value for name, value in own.items() if name != "label"
    }
    assert own["pushes"] == []
    # before the first update the ratio is 1, so that reinforce has ppo's gradient
    assert reinforce["cosine"] == pytest.approx(1, abs=1e-6)
    assert reinforce["grad_norm"] == pytest.approx(own["grad_norm"], rel=1e-5)
    assert other["grad_norm"] != own["grad_norm"]
    assert other["cosine"] == pytest.approx(plain["cosine"], abs=1e-6)
    assert -1 <= other["cosine"] < 1
    assert set(own["cosines"]) >= {"layers.0", "layers.1"}


@pytest.mark.nightly
def test_a_push_is_the_derivative_with_its_sign_turned(rl: Rl, trained: Path, tmp_path: Path) -> None:
    """With reinforce it is weight times advantage, in closed form."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with replay_rl(rl("run", *SETTINGS), Past.of(trained, 3), scratch, progress=None) as step:
        step.engine.use_loss({"use": "reinforce"})
        step.engine.use_reducer({"use": "sum"})
        result = step.engine.forward_backward(step.plan, bound=step.bound, temperature=step.temperature).result()
        pushes = measure_pushes(step, step.plan, result.output)
        step.engine.discard()
        columns = step.plan.columns
        assert pushes is not None
        np.testing.assert_allclose(pushes, columns.loss_weight * columns.columns["advantages"], rtol=1e-6)
        folder = tmp_path / "more"
        folder.mkdir()
        first, second = compare_objectives(
            step,
            [ComparedObjective("a", {"use": "reinforce"}), ComparedObjective("b", {"use": "reinforce"}, {"use": "token_mean"})],
            folder,
        )
    assert first.cosine == 1
    assert second.cosine == pytest.approx(1)
    assert second.grad_norm == pytest.approx(first.grad_norm / (columns.loss_weight != 0).sum(), rel=1e-5)
    assert second.pushes is not None
    assert all(abs(push.share - push.other) < 1e-9 for push in second.pushes), "one is a multiple of the other"


def test_what_cannot_be_compared_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*options: str) -> str:
        code, _, problem = compare(trained, capsys, *options)
        assert code != 0
        return problem

    assert "There is nothing to compare the run's objective with" in refusal("--step", "3")
    assert "has not recorded step 9" in refusal("--step", "9", "--loss", "ppo")
    assert "there is no loss 'none_such'" in refusal("--step", "3", "--loss", "none_such")
    assert "is not of the form NAME,key=value" in refusal("--step", "3", "--loss", "ppo,clip_low")
    assert "clip_lo" in refusal("--step", "3", "--loss", "ppo,clip_lo=1")
    assert "reads teacher_logprobs, which step 3 of the run did not compute" in refusal("--step", "3", "--loss", "teacher_kl")
    shutil.rmtree(trained / "rollouts")
    told = refusal("--step", "4", "--loss", "reinforce")
    assert "no longer holds the groups of step 3" in told
    assert "rollouts.keep" in told
