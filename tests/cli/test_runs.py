"""`skyrl-engine runs` over real runs, and over what became of them: moved, damaged, killed, of another version, never started."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pair_runs import runs_over, write_pairs
from rl_runs import write_world

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.report.run_facts import read_run
from skyrl_engine.report.watched import watch_run
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.training.sft.trainer import run_sft


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs: `sft` of six steps with as many checkpoints, `rl` of two, and copies of the former by their state."""
    root = tmp_path_factory.mktemp("listed")
    configure = runs_over(write_pairs(root.with_name("pairs")), "sft", root)
    changes = {"data": {"map": {"completion": "chosen"}}, "evaluation": {"every": 2}, "checkpoint": {"every": 1, "keep": None}}
    run_sft(configure("sft", **changes))
    world = write_world(root.with_name("world"))
    sizes = {"steps": 2, "groups": 2, "group_size": 2, "max_tokens": 12, "max_prompt_tokens": 64}
    tables = {
        "trainer": "rl",
        "model": {"path": str(world / "model")},
        "environments": [{"use": f"{world}/world.py:world"}],
        "rl": sizes,
        "run": {"directory": str(root / "rl"), "device": "cpu"},
    }
    run_rl(resolve(from_dict(tables, "test")))
    for name in ("failed", "killed", "damaged", "lost", "other", "elsewhere"):
        shutil.copytree(root / "sft", root / "copies" / name)
    copies = root / "copies"
    rewrite(copies / "failed", finished="2026-01-01T00:00:00+00:00", error="loss: no number.\nLook at the data.")
    rewrite(copies / "killed", finished=None, end_step=None)
    rewrite(copies / "elsewhere", finished=None, end_step=None)
    holder = {"host": "gpu-7", "pid": 12, "since": "2026-01-01T00:00:00+00:00", "work": "run"}
    (copies / "elsewhere" / ".lock").write_text(json.dumps(holder))
    (copies / "damaged" / "run.json").write_bytes((copies / "damaged" / "run.json").read_bytes()[:100])
    (copies / "lost" / "run.json").unlink()
    (copies / "other" / "run.json").write_text('{"format": 9}')
    (copies / "begun").mkdir()
    for name in (".lock", "run.log"):
        (copies / "begun" / name).touch()
    return root


def rewrite(run: Path, **changes: object) -> None:
    manifest = json.loads((run / "run.json").read_text())
    manifest["sessions"][-1].update(changes)
    (run / "run.json").write_text(json.dumps(manifest))


def test_a_list_tells_every_state_and_fails_on_none(runs, command):
    listed = {run["name"]: run for run in json.loads(command("runs", "list", runs, "--json").out)}
    states = {name: run["state"]["word"] for name, run in listed.items()}
    assert states == {
        "sft": "ended",
        "rl": "ended",
        "failed": "failed",
        "killed": "killed",
        "elsewhere": "unknown",
        "damaged": "damaged",
        "lost": "damaged",
        "other": "unreadable",
        "begun": "never started",
    }
    facts, sft = read_run(runs / "sft"), listed["sft"]
    assert (sft["step"], sft["total_steps"], sft["trainer"]) == (6, 6, "sft")
    assert sft["last"]["loss"] == facts.metrics.steps["loss"].values[-1]
    losses = facts.metrics.evaluations["loss"]
    assert sft["best"] == {"metric": "loss", "value": losses.values.min(), "step": losses.steps[losses.values.argmin()]}
    assert sft["bytes"] == sum(path.stat().st_size for path in (runs / "sft").rglob("*") if path.is_file())
    table = command("runs", "list", runs, "--sort", "size").out
    assert "process 12 on gpu-7 cannot be checked from here" in table
    assert "loss: no number.\\nLook at the data." in table
    sizes = [listed[line.split()[0].rpartition("/")[2]]["bytes"] for line in table.splitlines()[1:]]
    assert sizes == sorted(sizes)


def test_one_run_is_shown_whole(runs, command):
    shown = command("runs", "show", runs / "sft").out
    for words in ("ended at step 6 of 6", "latest", "best", "optimizer.learning_rate", "cross_entropy", "held-out/loss"):
        assert words in shown
    table = json.loads(command("runs", "show", runs / "rl", "--json").out)
    assert table["state"]["word"] == "ended"
    assert table["bytes"]["rollouts"] > 0
    assert [each["step"] for each in table["checkpoints"] if each["latest"]] == [2]
    assert "begun in" in command("runs", "show", runs / "copies" / "killed").out  # it is not called "sft" any more
    for name, words in (("begun", "no run that started"), ("damaged", "is damaged"), ("other", "format 1"), ("", "no run that")):
        refused = command("runs", "show", runs / "copies" / name)
        assert refused.code in (2, 4)
        assert words in refused.last_line


def test_a_difference_names_what_differs_alone(runs, command, tmp_path):
    other = shutil.copytree(runs / "sft", tmp_path / "other")
    manifest = json.loads((other / "run.json").read_text())
    manifest["config"]["optimizer"]["learning_rate"] = 0.5
    (other / "run.json").write_text(json.dumps(manifest))
    (other / "metrics.jsonl").write_text((runs / "sft" / "metrics.jsonl").read_text().replace('"grad_norm": ', '"grad_norm": 7'))
    differences = json.loads(command("runs", "diff", runs / "sft", other, runs / "sft" / ".." / "copies" / "failed", "--json").out)
    assert differences["runs"] == ["sft", "other", "failed"]
    assert differences["differences"]["Configuration"] == {"optimizer.learning_rate": ["0.01", "0.5", "0.01"]}
    assert list(differences["differences"]["Last metrics"]) == ["grad_norm"]
    assert differences["differences"]["Plugins"] == {}
    assert "Course" in command("runs", "diff", runs / "sft", runs / "copies" / "failed").out
    assert "needs two run directories" in command("runs", "diff", runs / "sft").last_line


def test_pruning_asks_first_and_frees_what_it_says(runs, command, tmp_path):
    run = shutil.copytree(runs / "sft", tmp_path / "run")
    assert "Say what to keep" in command("runs", "prune", run).last_line
    assert "--yes" in command("runs", "prune", run, "--keep-last", "2").last_line
    planned = command("runs", "prune", run, "--keep-last", "2", "--dry-run").out
    assert planned.count("delete") == 4 + 1
    assert len(CheckpointStore(run / "checkpoints").all()) == 6
    freed = command("runs", "prune", run, "--keep-last", "2", "--yes")
    assert [checkpoint.step for checkpoint in CheckpointStore(run / "checkpoints").all()] == [5, 6]
    size = planned[planned.index("to delete: ") :].split(": ")[1].strip()
    assert f"freed: {size}" in freed.out
    assert command("report", run).code == 0
    unknown = command("runs", "prune", runs / "copies" / "elsewhere", "--keep-last", "1", "--yes")
    assert "nobody here can say" in unknown.last_line
    assert "no run directory" in command("runs", "prune", run / "model", "--keep-last", "1", "--yes").last_line
    assert "no time such as" in command("runs", "prune", run, "--older-than", "soon").last_line


def test_of_a_folder_every_run_is_pruned_that_can_be(runs, command, tmp_path):
    shutil.copytree(runs / "sft", tmp_path / "one")
    shutil.copytree(runs / "copies" / "elsewhere", tmp_path / "below" / "elsewhere")
    assert "--dry-run" in command("runs", "prune", tmp_path, "--keep-last", "2", "--json").last_line
    done = json.loads(command("runs", "prune", tmp_path, tmp_path / "one", "--keep-last", "2", "--json", "--yes").out)
    assert [checkpoint.step for checkpoint in CheckpointStore(tmp_path / "one" / "checkpoints").all()] == [5, 6]
    assert done["freed"] == sum(row["bytes"] for row in done["files"] if row["goes"]) > 0
    assert [path for path, why in done["left_alone"].items() if "nobody here can say" in why] == [
        str(tmp_path / "below" / "elsewhere")
    ]


def test_what_tells_nothing_is_not_shown(runs, command):
    shown = command("runs", "show", runs / "sft").out
    assert "train.dropped_overlong" not in shown
    assert "train.rows" in shown
    lines = command("runs", "diff", runs / "sft", runs / "rl").out.splitlines()
    assert {"data.bad_images", "rl.preset", "reward/mean", "train.dropped_ties"}.isdisjoint(line.split(" ")[0] for line in lines)
    assert {"data.train", "rl.steps", "train.rows", "loss"} <= {line.split(" ")[0] for line in lines}


LIVE = """
import sys
from pathlib import Path
from skyrl_engine.contracts.kinds.observer import EvaluationFinished, SessionStarted, StepFinished
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.metrics import MetricsJsonl
run, observer = RunDirectory(Path(sys.argv[1])), MetricsJsonl()
with run.lock():
    observer.skyrl_engine_session_started(SessionStarted(run.path, {}, total_steps=9))
    for step in range(1, 5):
        observer.skyrl_engine_step_finished(StepFinished(step, 9, {"loss": 1 / step, "tokens": 8.0}, 2.0))
    observer.skyrl_engine_evaluation_finished(EvaluationFinished(4, {"loss": 0.25}, 0.1))
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def live(runs, tmp_path):
    """A run in a process of its own that has done four steps of nine and goes on until it is killed."""
    run = tmp_path / "live"
    run.mkdir()
    shutil.copy(runs / "copies" / "killed" / "run.json", run)
    process = subprocess.Popen([sys.executable, "-c", LIVE, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield run, process
        process.kill()


def test_watch_shows_a_run_on_a_terminal_until_it_is_killed(live):
    run, process = live
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover - another process
        os.environ.update({"COLUMNS": "100", "LINES": "30", "TERM": "xterm"})
        os.execv(sys.executable, [sys.executable, "-m", "skyrl_engine", "runs", "watch", str(run), "--every", "0.1"])
    seen, until = b"", time.monotonic() + 60
    while time.monotonic() < until:
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if "█".encode() in seen and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    text = seen.decode()
    for words in ("running: process", "4 of 9", "0:10", "█▃▁▁", "loss 0.25 after step 4", "killed: no end is recorded"):
        assert words in text, words


def test_watch_writes_lines_into_a_pipe(runs, live, command):
    run, process = live
    process.kill()
    process.wait()
    lines = command("runs", "watch", run).out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["1/9", "2/9", "3/9", "4/9"]
    assert lines[-1].endswith("killed: no end is recorded, and no process works on it")
    assert "is no run directory" in command("runs", "watch", run.parent).last_line
    assert "cannot be followed (never started)" in command("runs", "watch", runs / "copies" / "begun").last_line


def test_watch_knows_the_last_attempts_of_a_run_by_reinforcement(runs):
    watched = watch_run(runs / "rl")
    watched.refresh(attempts=2)
    assert watched.is_over
    assert len(watched.attempts) == 2
    for name, attempt in watched.attempts:
        assert name.startswith("world: task ")
        assert watched.decode(attempt.token_ids)


@pytest.mark.nightly
def test_a_pruned_run_goes_on_as_one_that_was_not(runs, command, tmp_path):
    weights = []
    for name in ("pruned", "whole"):
        run = shutil.copytree(runs / "sft", tmp_path / name)
        if name == "pruned":
            assert command("runs", "prune", run, "--keep-last", "1", "--yes").code == 0
        changes = (f"run.directory={run}", "checkpoint.resume=true", "training.steps=8")
        assert command("run", run / "config.toml", *changes).code == 0
        weights.append((run / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
