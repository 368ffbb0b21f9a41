"""Interrupted and resumed equals uninterrupted, bit for bit, wherever the interruption falls. The model has dropout."""

import errno
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from by_day import now
from safetensors.numpy import load_file

from skyrl_engine import hookimpl
from skyrl_engine.cli.app import main
from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.observer import StepFinished
from skyrl_engine.errors import CheckpointError, PluginBrokenError
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.trainer import RunResult, run_sft

Configure = Callable[..., ResolvedConfig]


def curve(directory: Path) -> list[tuple[int, float, float, float]]:
    """Number, loss, gradient norm and learning rate by step."""
    steps = [record for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]
    return [(entry["step"], *(entry["metrics"][name] for name in ("loss", "grad_norm", "learning_rate"))) for entry in steps]


def evaluations(directory: Path) -> list[tuple[int, float]]:
    records = [record for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "evaluation"]
    return [(record["step"], record["metrics"]["loss"]) for record in records]


def weights(directory: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(directory / "model" / "model.safetensors").items()}


def sessions(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((directory / "run.json").read_text())["sessions"]
    return found


def assert_same_run(run: Path, reference: Path) -> None:
    assert curve(run) == curve(reference)
    assert evaluations(run) == evaluations(reference)
    assert weights(run) == weights(reference)


SETTINGS: dict[str, Any] = {"evaluation": {"every": 5, "at_start": True}}


@pytest.fixture
def reference(configure: Configure) -> Path:
    return run_sft(configure("reference", **SETTINGS)).directory


class Interruption:
    """Does something in the middle of the run: after the named step was recorded."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step = step
        self.action = action

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        if event.step == self.step:
            self.action()


def fail() -> None:
    raise RuntimeError("pulled the plug")


@pytest.mark.nightly
def test_two_uninterrupted_runs_are_equal(configure: Configure, reference: Path) -> None:
    assert_same_run(run_sft(configure(**SETTINGS)).directory, reference)


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.nightly) for step in (1, 2, 5, 6, 9, 10))])
def test_a_failure_after_any_step_and_a_resume_equal_an_uninterrupted_run(configure: Configure, reference: Path, step: int) -> None:
    """Checkpoints are at 3, 6 and 9, epochs end at 3, 6 and 9, evaluations are at 0, 5 and 10."""
    resolved = configure(**SETTINGS)
    with pytest.raises(PluginBrokenError, match="pulled the plug"):
        run_sft(resolved, observers=[Interruption(step, fail)])
    result = run_sft(resolved, resume=True)
    assert_same_run(result.directory, reference)
    assert [session["start_step"] for session in sessions(result.directory)] == [0, (step - 1) // 3 * 3]
    assert [session["error"] is None for session in sessions(result.directory)] == [False, True]


def test_a_run_interrupted_again_and_again_equals_an_uninterrupted_run(configure: Configure, reference: Path) -> None:
    resolved = configure(**SETTINGS)
    for step in (4, 4, 5, 8, 10):
        with pytest.raises(PluginBrokenError):
            run_sft(resolved, observers=[Interruption(step, fail)], resume=True)
    result = run_sft(resolved, resume=True)
    assert_same_run(result.directory, reference)
    assert [session["start_step"] for session in sessions(result.directory)] == [0, 3, 3, 3, 6, 9]


def test_a_signal_ends_the_run_after_its_step_and_a_resume_goes_on_from_there(configure: Configure, reference: Path) -> None:
    resolved = configure(**SETTINGS)
    result = run_sft(resolved, observers=[Interruption(4, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert (result.step, result.stopped_by) == (4, "SIGTERM")
    assert (result.directory / "checkpoints" / "latest").read_text() == "step-00000004\n"
    assert not (result.directory / "model").exists()
    resumed = run_sft(resolved, resume=True)
    assert (resumed.step, resumed.stopped_by) == (10, None)
    assert_same_run(resumed.directory, reference)


@pytest.mark.nightly
@pytest.mark.parametrize("content", now([b"", b'{"format": 1, "plug', b"\xff\x00"], b'{"format": 1, "plug'))
def test_a_damaged_manifest_does_not_keep_a_run_from_going_on(
    configure: Configure, reference: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    resolved = configure(**SETTINGS)
    with pytest.raises(PluginBrokenError):
        run_sft(resolved, observers=[Interruption(5, fail)])
    manifest = Path(resolved.config.run.directory or "") / "run.json"
    manifest.write_bytes(content)
    result = run_sft(resolved, resume=True)
    assert_same_run(result.directory, reference)
    assert "run.json is missing or damaged" in caplog.text
    assert [session["start_step"] for session in sessions(result.directory)] == [3]


def test_the_record_of_a_checkpoint_that_a_kill_prevented_is_made_good(configure: Configure) -> None:
    """A kill between publishing step 3 and recording it leaves the checkpoint and not the record."""
    resolved = configure(**SETTINGS)
    with pytest.raises(PluginBrokenError):
        run_sft(resolved, observers=[Interruption(4, fail)])
    metrics = Path(resolved.config.run.directory or "") / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["kind"] != "checkpoint"))
    run_sft(resolved, resume=True)
    recorded = [record["step"] for record in read_metrics(metrics) if record["kind"] == "checkpoint"]
    assert recorded == [3, 6, 9, 10]


def test_resuming_a_finished_run_changes_nothing(configure: Configure, reference: Path) -> None:
    before = {path: path.read_bytes() for path in (reference / "checkpoints").rglob("*") if path.is_file()}
    curve_before = curve(reference)
    result = run_sft(configure("reference", **SETTINGS), resume=True)
    assert (result.directory, result.step) == (reference, 10)
    assert curve(reference) == curve_before
    assert {path: path.read_bytes() for path in (reference / "checkpoints").rglob("*") if path.is_file()} == before


@pytest.mark.nightly
def test_resume_without_a_run_starts_one(configure: Configure, reference: Path) -> None:
    assert_same_run(run_sft(configure(**SETTINGS), resume=True).directory, reference)


RUNNER = """
import json, sys
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.training.sft.trainer import run_sft
run_sft(resolve(from_dict(json.loads(sys.argv[1]), "test")), resume=True)
"""


def kill_at(resolved: ResolvedConfig, after: int) -> None:
    """Run in a process of its own and SIGKILL that as soon as step `after` is recorded, wherever it then is."""
    metrics = Path(resolved.config.run.directory or "") / "metrics.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, "-c", RUNNER, json.dumps(resolved.as_dict())]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        line = re.compile(rf'"kind": "step", "step": {after},')
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and line.search(metrics.read_text())):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


@pytest.mark.proof
def test_killed_twice_at_any_moment_and_resumed_equals_an_uninterrupted_run(configure: Configure) -> None:
    """The reference runs in this process, the killed run in others: nothing of a process's own state is in the numbers."""
    long = {"training": {"steps": 24}, "checkpoint": {"every": 2}}
    reference = run_sft(configure("reference", **long)).directory
    resolved = configure(**long)
    kill_at(resolved, after=5)
    kill_at(resolved, after=13)
    resumed = run_sft(resolved, resume=True).directory
    assert_same_run(resumed, reference)
    starts = [session["start_step"] for session in sessions(resumed)]
    assert starts[0] == 0
    assert 4 <= starts[1] < 12 <= starts[2] < 24


def test_a_disk_that_fills_during_a_checkpoint_loses_nothing(configure: Configure, reference: Path) -> None:
    """A limit on file sizes makes the backend's own writes fail halfway, as a full disk does; resuming with space back is exact."""
    resolved = configure(**SETTINGS)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited = Interruption(5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, before[1])))
    try:
        with pytest.raises(CheckpointError, match=r"step 6 could not be written .*step-00000003 is whole") as caught:
            run_sft(resolved, observers=[limited])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.strerror(errno.EFBIG) in str(caught.value)
    run = Path(resolved.config.run.directory or "")
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["latest", "step-00000003"]
    assert "could not be written" in sessions(run)[-1]["error"]
    assert_same_run(run_sft(resolved, resume=True).directory, reference)


LOSS = "from skyrl_engine import loss\n@loss(needs=('logprobs',))\ndef mine(tokens, config):\n    return -tokens.logprobs{}\n"


def interrupt(resolved: ResolvedConfig) -> RunResult:
    return run_sft(resolved, observers=[Interruption(4, lambda: os.kill(os.getpid(), signal.SIGINT))])


def test_another_trainer_is_refused_before_its_plugins_are(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its plugins are others too, and allowing them would not help."""
    resolved = configure()
    run = interrupt(resolved).directory
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": " b", "rejected": " c"}\n' * 2)
    arguments = ["--model", str(resolved.config.model.path), "--data", str(pairs), "--output", str(run), "checkpoint.resume=true"]
    assert main(["preference", *arguments]) == 4
    assert "the checkpoint is one of trainer sft, and this run's trainer is preference" in capsys.readouterr().err


def test_another_loss_is_refused_unless_allowed_by_name(configure: Configure, tmp_path: Path) -> None:
    file = tmp_path / "my_loss.py"
    file.write_text(LOSS.format(""))
    use = {"loss": {"use": f"{file}:mine"}}
    run = interrupt(configure(**use)).directory
    file.write_text(LOSS.format(" * 2"))
    with pytest.raises(CheckpointError, match=r"made with other plugins") as caught:
        run_sft(configure(**use), resume=True)
    assert "my_loss.py" in caught.value.details[0]
    assert len(sessions(run)) == 1  # refused before anything was written
    result = run_sft(configure(**use, checkpoint={"allow_changed": ["loss:mine"]}), resume=True)
    assert result.step == 10
    assert any("my_loss.py" in change for change in sessions(run)[-1]["changed"])


def test_changed_configuration_is_warned_of_and_recorded(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    run = interrupt(configure()).directory
    with caplog.at_level(logging.WARNING, "skyrl_engine"):
        run_sft(configure(optimizer={"learning_rate": 2e-2}, checkpoint={"keep": 1}), resume=True)
    assert "optimizer.learning_rate: 0.01 -> 0.02" in caplog.text
    assert sessions(run)[-1]["changed"] == ["optimizer.learning_rate: 0.01 -> 0.02"]


def test_changed_data_is_refused(configure: Configure, material: Path, tmp_path: Path) -> None:
    interrupt(configure())
    (tmp_path / "train.jsonl").write_text((material / "eval.jsonl").read_text())
    with pytest.raises(CheckpointError, match="the training data has changed"):
        run_sft(configure(data={"train": str(tmp_path / "train.jsonl")}), resume=True)


def test_a_damaged_checkpoint_is_refused(configure: Configure) -> None:
    run = interrupt(configure()).directory
    largest = max((run / "checkpoints" / "step-00000004").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: the content of") as caught:
        run_sft(configure(), resume=True)
    assert "step-00000003" in caught.value.remedy
