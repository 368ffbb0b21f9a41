"""`skyrl-engine evaluate`: the numbers of an evaluation during the run, of checkpoints and other models too, and refusals in words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rl_runs import Rl

from skyrl_engine.cli.app import main
from skyrl_engine.rollout.exported import read_rollouts
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.rl.run import run_rl

EVALUATED = ("evaluation.at_end=true", "evaluation.samples=3", "evaluation.temperature=1.0", "rl.steps=1")


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert main(["evaluate", *map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def last_of(run: Path) -> dict[str, float]:
    return [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "evaluation"][-1]["metrics"]


def test_a_run_evaluated_anew_has_the_numbers_of_its_own_evaluation(
    rl: Rl, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = run_rl(rl("run", *EVALUATED)).directory
    file = tmp_path / "attempts.jsonl"
    report = evaluate(capsys, run, "-k", 3, "--output", file)
    assert report == {"tasks": 2, "metrics": last_of(run)}
    groups = list(read_rollouts(file))
    assert [len(group.trajectories) for group in groups] == [3, 3]
    assert report["metrics"]["evaluation/avg@3"] == pytest.approx(
        sum(trajectory.reward for group in groups for trajectory in group.trajectories) / 6
    )
    # without its trained model a run has its checkpoint
    (run / "model").rename(run / "aside")
    assert evaluate(capsys, run, "-k", 3) == report
    (run / "aside").rename(run / "model")

    elsewhere = evaluate(capsys, "--model", run / "model", "--env", _find_world(run), "-k", 3, "--seed", 5, *_lengths())
    assert elsewhere == report
    other = evaluate(capsys, run, "-k", 3, "--seed", 6)
    assert other["metrics"] != report["metrics"]
    assert evaluate(capsys, run, "--split", "train", "--tasks", 5)["tasks"] == 5


@pytest.mark.nightly
def test_adapters_are_merged(rl: Rl, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_rl(rl("run", *EVALUATED, "model.lora.rank=2")).directory
    ours, its = (report["evaluation/avg@3"] for report in (evaluate(capsys, run, "-k", 3)["metrics"], last_of(run)))
    assert ours == pytest.approx(its, rel=0.2)


def test_what_is_shown(rl: Rl, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_rl(rl("run", "rl.steps=1")).directory
    capsys.readouterr()
    assert main(["evaluate", str(run), "-k", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "2 tasks of world"
    assert [line.split()[0] for line in shown[2:]] == ["avg@2", "tokens_mean", "pass@1", "pass@2", "maj@2"]
    assert " to " in shown[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "There is nothing to evaluate. Give RUN"),
        (["--model", "{world}/model", "--step", "1"], "--step chooses a checkpoint of RUN"),
        (["{world}/nowhere"], "there is no run directory"),
        (["--model", "{world}/model"], "there is no environment"),
        (
            ["--model", "{world}/model", "--env", "{world}/world.py:world", "--output", "x.txt"],
            "ends neither in .jsonl nor in .parquet",
        ),
        (["--model", "{world}/model", "--env", "{world}/world.py:world", "-k", "0"], "-k"),
        (["--model", "{world}/model", "--data", "x.jsonl"], "--data is for tasks with a reward function"),
        (["--model", "{world}/nomodel", "--env", "{world}/world.py:world"], "nomodel"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], world: Path, arguments: list[str], words: str) -> None:
    assert main(["evaluate", *(argument.format(world=world) for argument in arguments)]) != 0
    assert words in capsys.readouterr().err


@pytest.mark.nightly
def test_tasks_of_a_file_are_all_attempted(capsys: pytest.CaptureFixture[str], world: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"go {number}"}) + "\n" for number in range(70)))
    (tmp_path / "r.py").write_text("def score(text, task):\n    return float(len(text) % 2)\n")
    reward = ("--reward", f"{tmp_path / 'r.py'}:score", "--data", tmp_path / "tasks.jsonl")
    assert evaluate(capsys, "--model", world / "model", *reward, *_lengths())["tasks"] == 70
    assert evaluate(capsys, "--model", world / "model", *reward, *_lengths(), "--tasks", 3)["tasks"] == 3


def test_a_decorated_reward_takes_the_tasks_of_a_file(capsys: pytest.CaptureFixture[str], world: Path, tmp_path: Path) -> None:
    """It is an environment that reads tasks; one that has tasks of its own says that it has no such option."""
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"go {number}"}) + "\n" for number in range(3)))
    (tmp_path / "r.py").write_text("from skyrl_engine import reward\n@reward()\ndef score(text, task):\n    return 0.5\n")
    tasks = ("--data", tmp_path / "tasks.jsonl")
    report = evaluate(capsys, "--model", world / "model", "--env", f"{tmp_path / 'r.py'}:score", *tasks, *_lengths())
    assert (report["tasks"], report["metrics"]["evaluation/avg@1"]) == (3, 0.5)
    assert main(["evaluate", "--model", f"{world}/model", "--env", f"{world}/world.py:world", *map(str, tasks)]) == 2
    assert "data" in capsys.readouterr().err


def test_attempts_that_fail_are_told_and_measure_nothing_where_all_do(
    capsys: pytest.CaptureFixture[str], world: Path, tmp_path: Path
) -> None:
    """A reward that is broken is no model that is always wrong; a line says where it raises, not in a traceback."""
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"prompt": f"go {number}", "at": number}) + "\n" for number in range(4))
    )
    (tmp_path / "r.py").write_text(
        "def never(text, task):\n    return float('nan')\n\n"
        "def seldom(text, task):\n    return 1.0 / (task.data['at'] % 2)\n\n"
        "async def raises(text, task):\n    raise ValueError(task.data['nothing'])\n"
    )

    def arguments(name: str) -> list[str]:
        tasks = ("--reward", f"{tmp_path / 'r.py'}:{name}", "--data", tmp_path / "tasks.jsonl", "--set", "rollouts.retries=0")
        return [*map(str, ("--model", world / "model", *tasks, *_lengths()))]

    metrics = evaluate(capsys, *arguments("seldom"))["metrics"]
    assert (metrics["evaluation/failed"], metrics["evaluation/avg@1"]) == (0.5, 0.5)
    for name, words in (("never", "the reward never returned nan"), ("raises", f"{tmp_path / 'r.py'}, line 8, in raises")):
        assert main(["evaluate", *arguments(name)]) == 4
        output = capsys.readouterr()
        assert "all 4 attempts failed, so nothing was measured" in output.err
        assert words in output.err
        assert "Traceback" not in output.err
        assert "timeout_s" not in output.err
        last = output.err.splitlines()[-1]
        assert last.endswith(f"Correct {words}." if name == "raises" else "Correct the environment.")
        assert output.out == ""


@pytest.mark.nightly
def test_where_the_first_attempts_all_fail_the_others_are_not_waited_for(
    capsys: pytest.CaptureFixture[str], world: Path, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"go {number}"}) + "\n" for number in range(40)))
    (tmp_path / "r.py").write_text(
        f"import time\ndef hangs(text, task):\n    print(1, file=open({str(tmp_path / 'asked')!r}, 'a'))\n    time.sleep(99)\n"
    )
    reward = ("--reward", f"{tmp_path / 'r.py'}:hangs", "--data", f"{tmp_path / 'tasks.jsonl'}")
    bounds = ("--set", "rollouts.retries=0", "--set", "rollouts.timeout_s=0.3", "--set", "rollouts.workers=2")
    assert main(["evaluate", "--model", f"{world}/model", *reward, *bounds, *_lengths()]) == 4
    err = capsys.readouterr().err
    told = re.search(
        r"all of the first (\d+) attempts failed. Raise rollouts.timeout_s, or raise rollouts.max_failure_share to 1.", err
    )
    assert told is not None, err
    assert 8 <= int(told[1]) < 16, "some may fail in one moment, and most are never asked"
    assert len((tmp_path / "asked").read_text().splitlines()) < 20


@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_environment_is_attempted_by_the_split_that_it_has(
    capsys: pytest.CaptureFixture[str], world: Path, tmp_path: Path, split: str
) -> None:
    """Held-out tasks alone can be evaluated; one without any is refused for that, and no message speaks of training."""
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"go {number}"}) + "\n" for number in range(3)))
    (tmp_path / "r.py").write_text("from skyrl_engine import reward\n@reward()\ndef score(text, task):\n    return 0.5\n")
    (tmp_path / "empty.jsonl").write_text("")
    base = ("evaluate", "--model", world / "model", "--env", f"{tmp_path / 'r.py'}:score", "--data", tmp_path / "empty.jsonl")
    assert main([*map(str, (*base, "--split", split, *_lengths()))]) == 4
    err = capsys.readouterr().err
    assert f"there is no {'held-out task' if split == 'eval' else 'task'} to attempt" in err


def _lengths() -> tuple[str, ...]:
    return ("--max-tokens", "44", "--set", "rl.max_prompt_tokens=64")


def _find_world(run: Path) -> str:
    import tomllib

    return str(tomllib.loads((run / "config.toml").read_text())["environments"][0]["use"])
