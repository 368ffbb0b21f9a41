"""Steps that teach nothing: the first is logged with its reason, too many end the run after a checkpoint, and a resume counts on."""

import logging
from pathlib import Path

import numpy as np
import pytest
from by_day import rarely
from rl_runs import Rl, steps_of

from skyrl_engine.cli.app import main
from skyrl_engine.errors import RolloutError
from skyrl_engine.training.idle import IdleSteps, Reason
from skyrl_engine.training.rl.run import run_rl

EQUAL = ("environments.0.constant=1.5", "environments.0.turns=1", "rl.max_tokens=60")
CUT = ("rl.max_tokens=1",)


def ends_idle(rl: Rl, *overrides: str) -> str:
    with pytest.raises(RolloutError) as caught:
        run_rl(rl("run", "rl.steps=4", "rl.max_idle_steps=2", *overrides))
    return str(caught.value)


def test_equal_rewards_end_the_run_after_a_checkpoint_and_a_resume_counts_on(rl: Rl, tmp_path: Path) -> None:
    error = ends_idle(rl, *EQUAL)
    assert "the gradient was exactly 0 in 2 steps in a row, up to step 2" in error
    assert "the attempts of each of its 3 groups have the same reward, 1.5 in all of them" in error
    assert "rl.max_idle_steps" in error
    run = tmp_path / "run"
    assert [record["step"] for record in steps_of(run)] == [1, 2]
    assert (run / "checkpoints" / "latest").read_text() == "step-00000002\n"
    log = (run / "run.log").read_text()
    assert log.count("WARNING skyrl_engine.training.idle: the gradient of step 1 is exactly 0") == 1
    assert "the gradient of step 2" not in log
    with pytest.raises(RolloutError, match="in 3 steps in a row, up to step 3"):
        run_rl(rl("run", "rl.steps=9", "rl.max_idle_steps=3", *EQUAL), resume=True)
    assert [record["step"] for record in steps_of(run)] == [1, 2, 3]


@pytest.mark.nightly
def test_a_run_without_a_bound_goes_to_its_end(rl: Rl, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="skyrl_engine"):
        assert run_rl(rl("run", "rl.steps=3", "rl.max_idle_steps=none", *EQUAL)).step == 3
    assert caplog.text.count("is exactly 0") == 1


@pytest.mark.nightly
def test_the_last_step_may_be_one_too_many(rl: Rl, tmp_path: Path) -> None:
    """A run whose every step taught nothing does not end well."""
    with pytest.raises(RolloutError, match="in 2 steps in a row"):
        run_rl(rl("run", "rl.steps=2", "rl.max_idle_steps=2", *EQUAL))
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(("truncated", "lost"), [("mask", "no loss"), rarely("zero_reward", "no reward")])
def test_attempts_that_are_all_cut_off_are_the_reason(rl: Rl, caplog: pytest.LogCaptureFixture, truncated: str, lost: str) -> None:
    with caplog.at_level(logging.WARNING, logger="skyrl_engine"):
        error = ends_idle(rl, *CUT, f"rl.truncated={truncated}")
    assert f'all 9 attempts ended at rl.max_tokens = 1, and rl.truncated = "{truncated}" gives them {lost}' in error
    assert "raise rl.max_tokens" in error
    assert "rl.max_tokens = 1 (--max-tokens) cut 9 of the 9 attempts of step 1" in caplog.text
    assert "all turns and of all observations" in caplog.text


def test_a_run_that_learns_and_is_not_cut_is_told_nothing(rl: Rl, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="skyrl_engine"):
        run_rl(rl("run", "rl.max_idle_steps=1", "rl.max_tokens=60"))
    assert "exactly 0" not in caplog.text
    assert "--max-tokens" not in caplog.text


@pytest.mark.nightly
def test_filters_that_keep_what_they_would_drop_are_named(rl: Rl) -> None:
    error = ends_idle(rl, *EQUAL, "rl.groups=1", 'group_filters=[{use="zero_variance"}]', "rollouts.max_drop_share=0.5")
    assert "group filters kept them" in error
    assert "rollouts.max_drop_share" in error


PARTS = """
from skyrl_engine import advantage, loss

@advantage()
def nothing(batch, config):
    return batch.rewards * 0

@loss(needs=("logprobs", "advantages"))
def flat(tokens, config):
    return tokens.logprobs * 0
"""


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("advantage.use", "estimates advantages of 0 from rewards that differ"),
        rarely("loss.use", "loss 'flat'"),
    ],
)
def test_parts_without_a_gradient_are_named(rl: Rl, tmp_path: Path, part: str, cause: str) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    name = "nothing" if part.startswith("advantage") else "flat"
    error = ends_idle(rl, f"{part}={tmp_path / 'parts.py'}:{name}")
    assert cause in error


def test_steps_are_counted_in_a_row() -> None:
    guard = IdleSteps(most=2)
    norms = [0.0, 1.0, 0.0, np.nan, 0.0, 0.0]
    reasons = [guard.look(step, {"grad_norm": norm}, lambda: Reason("why", "what")) for step, norm in enumerate(norms, start=1)]
    assert [reason is not None for reason in reasons] == [False, False, False, False, False, True]
    assert str(reasons[-1]).startswith("the gradient was exactly 0 in 2 steps in a row, up to step 6: why")


def test_the_command_ends_with_the_code_of_rollouts(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--model {world / 'model'} --env {world / 'world.py'}:world --steps 3 --groups 2 --group-size 2 --max-tokens 44"
    overrides = "rl.max_idle_steps=1 environments.0.constant=1 environments.0.turns=1 rl.max_prompt_tokens=64 rollouts.workers=1 run.device=cpu"
    code = main(["rl", *arguments.split(), *overrides.split(), f"run.directory={tmp_path / 'run'}"])
    assert code == RolloutError.exit_code
    assert "the gradient was exactly 0 in 1 step" in capsys.readouterr().err
