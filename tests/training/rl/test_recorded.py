"""Runs over recorded rollouts: the weights of the run that sampled them, exact resumes, and refusals before a rank starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_runs import Rl, numbers_of, steps_of, weights_of

from skyrl_engine.config import ResolvedConfig, load, resolve
from skyrl_engine.errors import CheckpointError, ConfigError, DataError, EngineError, RolloutError, UnsupportedError
from skyrl_engine.rollout.exported import read_rollouts, rows_of, write_rows
from skyrl_engine.training.rl.dry_run import plan_rl
from skyrl_engine.training.rl.run import run_rl

ONE_STEP = ("rl.steps=1", "rl.old=current")

Offline = Callable[..., ResolvedConfig]


@pytest.fixture(scope="module")
def sampled_run(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two steps, some of whose attempts fail."""
    directory = tmp_path_factory.mktemp("sampled") / "run"
    tables: dict[str, Any] = {
        "trainer": "rl",
        "model": {"path": str(world / "model")},
        "rl": {"steps": 2, "groups": 3, "group_size": 3, "max_tokens": 24, "max_prompt_tokens": 64, "old": "current"},
        "environments": [{"use": f"{world / 'world.py'}:world"}],
        "rollouts": {"workers": 1, "retries": 0},
        "evaluation": {"at_end": False},
        "checkpoint": {"every": 1},
        "optimizer": {"learning_rate": 1e-2},
        "run": {"directory": str(directory), "device": "cpu", "seed": 5},
    }
    return run_rl(resolve(load(tables, ()))).directory


@pytest.fixture
def offline(tables_of: Callable[..., dict[str, Any]], sampled_run: Path) -> Offline:
    """`offline("name", "key=value", ...)`: a run over the rollouts of `sampled_run`, or over `place`."""

    def make(name: str = "offline", *overrides: str, place: Path | None = None) -> ResolvedConfig:
        tables = tables_of(name)
        del tables["environments"]
        tables["rl"]["rollouts"] = str(place or sampled_run)
        return resolve(load(tables, overrides))

    return make


def export_rows(sampled: Path, to: Path, changed: Callable[[dict[str, Any]], dict[str, Any] | None] = dict) -> Path:
    """An export of the run, with some rows changed or left out."""
    rows = (changed(row) for group in read_rollouts(sampled) for row in rows_of(group))
    write_rows([row for row in rows if row is not None], to, "parquet" if to.suffix == ".parquet" else "jsonl")
    return to


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """The row as a program would write it that knows nothing of ours."""
    return {name: row[name] for name in ("task_key", "prompt_ids", "response_ids", "loss_mask", "reward", "logprobs")}


def test_a_step_on_recorded_rollouts_gives_the_weights_of_the_step_that_sampled_them(rl: Rl, offline: Offline) -> None:
    online = run_rl(rl("online", *ONE_STEP)).directory
    again = run_rl(offline("again", *ONE_STEP, place=online)).directory
    assert weights_of(again) == weights_of(online)
    assert "policy/gap_mean" in steps_of(again)[0]["metrics"]
    assert not (again / "rollouts").exists(), "nothing is recorded twice"


@pytest.mark.parametrize("name", ["rollouts.jsonl", "rollouts.parquet"])
def test_an_export_gives_the_same_weights_as_the_run_it_is_of(
    offline: Offline, sampled_run: Path, tmp_path: Path, name: str
) -> None:
    of_run = run_rl(offline("of_run")).directory
    of_file = run_rl(offline("of_file", place=export_rows(sampled_run, tmp_path / name))).directory
    assert weights_of(of_file) == weights_of(of_run)


def test_the_old_policy_is_the_one_that_was_recorded(offline: Offline) -> None:
    """The second step's rollouts are of the first step's weights; over the model as it was their ratios are not 1."""
    result = run_rl(offline("two", "rl.steps=2"))
    first, second = (record["metrics"] for record in steps_of(result.directory))
    assert first["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert second["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4), "the same weights were learned in the first step"
    shuffled = run_rl(offline("later", "rl.steps=4"))
    assert steps_of(shuffled.directory)[3]["metrics"]["policy/ratio_max"] > 1.01


def test_a_resumed_run_equals_an_uninterrupted_one(offline: Offline) -> None:
    whole = run_rl(offline("whole", "rl.steps=5")).directory
    run_rl(offline("parts", "rl.steps=5", "checkpoint.every=1"), observers=[_stop_after(3)])
    parts = run_rl(offline("parts", "rl.steps=5", "checkpoint.every=1"), resume=True).directory
    assert weights_of(parts) == weights_of(whole)
    assert numbers_of(parts) == numbers_of(whole)


def test_a_run_does_not_go_on_over_other_rollouts(offline: Offline, sampled_run: Path, tmp_path: Path) -> None:
    file = export_rows(sampled_run, tmp_path / "a.jsonl")
    run_rl(offline("run", "rl.steps=1", place=file))
    file.unlink()
    export_rows(sampled_run, file, lambda row: {**row, "rewards": [reward + 1 for reward in row["rewards"]]})
    with pytest.raises(CheckpointError, match=r"rl\.rollouts"):
        run_rl(offline("run", "rl.steps=2", place=file), resume=True)


def test_rollouts_of_another_program(offline: Offline, sampled_run: Path, tmp_path: Path) -> None:
    """Single turns, so that a reward at the end is where it was."""
    rows = [plain(row) for group in read_rollouts(sampled_run) for row in rows_of(group)]
    file = tmp_path / "plain.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = steps_of(run_rl(offline("plain", "rl.steps=1", place=file)).directory)[0]["metrics"]
    assert metrics["grad_norm"] > 0
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)

    file.write_text("".join(json.dumps({key: row[key] for key in row if key != "logprobs"}) + "\n" for row in rows))
    metrics = steps_of(run_rl(offline("without", "rl.steps=1", place=file)).directory)[0]["metrics"]
    assert metrics["grad_norm"] > 0
    assert metrics["policy/ratio_max"] == 1.0, "the model is its own old policy"
    assert "policy/gap_mean" not in metrics
    with pytest.raises(UnsupportedError, match="hold none"):
        plan_rl(offline("old", "rl.old=rollout", place=file))


def test_the_plan_says_what_is_read(offline: Offline, sampled_run: Path) -> None:
    plan = plan_rl(offline("plan", "rl.steps=4"))
    groups = list(read_rollouts(sampled_run))
    assert plan.rollouts is not None
    assert f"{len(groups)} groups of {sum(len(group.finished) for group in groups)} attempts" in plan.rollouts
    assert "4 steps of 3 groups are 2.0 passes over them" in plan.rollouts
    assert plan.passes[0] == "read"
    assert "generator" not in plan.plugins
    assert "user" in "".join(plan.prompt["world"])


def _lengthen(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "prompt_ids": row["prompt_ids"] * 20,
        "segment_lengths": [row["segment_lengths"][0] * 20, *row["segment_lengths"][1:]],
    }


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        (
            lambda row: {**row, "prompt_ids": [10**6, *row["prompt_ids"][1:]]},
            DataError,
            r"attempt 0 of group 0 holds token id 1000000",
        ),
        (_lengthen, DataError, "tokens, and the model has 128 positions"),
        (lambda row: {**row, "rewards": [float("1e39")] * len(row["rewards"])}, DataError, "a reward that is not finite"),
        (lambda row: row if row["member"] == 0 else None, UnsupportedError, "no task of .* has two"),
        (lambda row: {**row, "status": "failed"}, RolloutError, "no group to train on: 6 failed"),
        (lambda row: {**plain(row), "reward": "much"}, DataError, "column 'reward': a number is needed, not 'much'"),
        (lambda row: {**plain(row), "task_key": None}, DataError, "does not say which group it belongs to"),
        (
            lambda row: {**plain(row), "logprobs": [0.5] * sum(row["loss_mask"])},
            DataError,
            "the log-probability 0.5, and none is above 0",
        ),
        (lambda row: {**plain(row), "prompt_ids": []}, DataError, "has no prompt"),
        (lambda row: {**plain(row), "loss_mask": [0] * len(row["loss_mask"]), "logprobs": []}, DataError, "has no sampled token"),
        (lambda row: {**plain(row), "reward": 10**400}, DataError, "a reward that is not finite"),
        (lambda row: {**plain(row), "logprobs": [0.0]}, DataError, r"it has 1 entries for \d+ sampled tokens"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_a_rank_starts(
    offline: Offline, sampled_run: Path, tmp_path: Path, changed: Any, error: type[EngineError], words: str
) -> None:
    rows = [row for group in read_rollouts(sampled_run) for row in map(changed, rows_of(group)) if row is not None]
    file = tmp_path / "wrong.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(error, match=words):
        plan_rl(offline("wrong", place=file))


def test_places_and_keys_that_do_not_fit(offline: Offline, tmp_path: Path, world: Path) -> None:
    with pytest.raises(RolloutError, match="there is no file or run directory"):
        plan_rl(offline(place=tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RolloutError, match="holds no rollouts"):
        plan_rl(offline(place=tmp_path / "empty"))
    for key in ("evaluation.every=1", "evaluation.at_start=true", f'environments=[{{use="{world / "world.py"}:world"}}]'):
        with pytest.raises(ConfigError, match=r"rl\.rollouts is set") as caught:
            plan_rl(offline("run", key))
        assert caught.value.problems[0].where.endswith(key.partition("=")[0])
    with pytest.raises(DataError, match="6 groups to train on, and 9 steps of 3 take 27"):
        plan_rl(offline("run", "rl.repeat_tasks=false", "rl.steps=9"))


def _stop_after(step: int) -> object:
    import os
    import signal

    from skyrl_engine import hookimpl
    from skyrl_engine.contracts import StepFinished

    class Stopping:
        @hookimpl
        def skyrl_engine_step_finished(self, event: StepFinished) -> None:
            if event.step == step:
                os.kill(os.getpid(), signal.SIGTERM)

    return Stopping()
