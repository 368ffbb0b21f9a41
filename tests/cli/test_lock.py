"""`skyrl-engine lock`, `run --locked` and `run --from`: a run has the plugins that were written down, or there is a table of others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.run.metrics import read_metrics

Run = Callable[..., Any]

LOSS = """
import pathlib
from skyrl_engine import loss

pathlib.Path({trace!r}).touch()


@loss(needs=("logprobs",))
def mine(tokens, config):
    return -tokens.logprobs
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a configuration whose loss is a local file that leaves a trace when it is run."""
    texts = [f"{number} plus {number}" for number in range(4)]
    write_model(tmp_path / "model", "llama", tokenizer=write_tokenizer(tmp_path / "model", texts))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": text, "completion": " 4"}) + "\n" for text in texts))
    (tmp_path / "losses.py").write_text(LOSS.format(trace=str(tmp_path / "has-run")))
    file = tmp_path / "train.toml"
    file.write_text(
        'trainer = "sft"\n[model]\npath = "./model"\n[data]\ntrain = "./rows.jsonl"\n[training]\nsteps = 2\nbatch_size = 4\n'
        '[loss]\nuse = "./losses.py:mine"\n[run]\nlaunch = "inline"\ndirectory = "./run"\nobservers = ["metrics_jsonl"]\n'
    )
    return file


def table_of(err: str) -> list[str]:
    """Return the places of the rows that differ."""
    lines = err.splitlines()
    return [line.split()[0] for line in lines[lines.index(next(line for line in lines if line.startswith("place "))) + 1 : -1]]


def test_a_run_holds_to_the_lock_of_its_configuration(command: Run, file: Path) -> None:
    assert "there is no lock file" in command("run", file, "--locked", "--dry-run").err
    locked = command("lock", file)
    assert locked.code == 0, locked.err
    assert "/" not in (file.parent / "train.lock").read_text().partition("[files]")[2], "its files are beside it"
    assert command("run", file, "--locked", "--dry-run").code == 0
    other = command("run", file, "--locked", "--dry-run", "--loss", "cross_entropy")
    assert (other.code, table_of(other.err)) == (3, ["loss"])

    trace = file.parent / "has-run"
    trace.unlink()
    (file.parent / "losses.py").write_text((file.parent / "losses.py").read_text() + "\n")
    changed = command("run", file, "--locked", "--dry-run")
    assert (changed.code, table_of(changed.err)) == (3, ["loss"])
    assert not trace.exists(), "a plugin that differs is not imported"


def test_files_of_code_that_options_name_are_locked_too(command: Run, file: Path) -> None:
    """The reward imports a file beside it."""
    (file.parent / "helper.py").write_text("RIGHT = 1.0\n")
    (file.parent / "reward.py").write_text("from helper import RIGHT\n\n\ndef score(text, task):\n    return RIGHT\n")
    file.write_text(
        'trainer = "rl"\n[model]\npath = "./model"\n[rl]\nsteps = 1\ngroups = 2\ngroup_size = 2\nmax_tokens = 4\nmax_prompt_tokens = 24\n'
        '[[environments]]\nuse = "function"\ndata = "./rows.jsonl"\nreward = "./reward.py:score"\n'
    )
    assert command("lock", file).code == 0
    assert command("run", file, "--locked", "--dry-run").code == 0
    (file.parent / "helper.py").write_text("RIGHT = 2.0\n")
    changed = command("run", file, "--locked", "--dry-run")
    assert (changed.code, table_of(changed.err)) == (3, [str(file.parent / "helper.py")])


def test_another_version_differs_and_a_plugin_that_is_not_there_is_named(command: Run, file: Path) -> None:
    command("lock", file, "--loss", "cross_entropy")
    place = file.parent / "train.lock"
    text = place.read_text()
    place.write_text(text.replace('"ordered"', '"shuffled"').replace('"skyrl-engine-fsdp"', '"acme-fsdp"'))
    outcome = command("run", file, "--locked", "--dry-run", "--loss", "cross_entropy")
    assert (outcome.code, table_of(outcome.err)) == (3, ["backend", "merger"])
    place.write_text(text)
    outcome = command("run", file, "--locked", "--dry-run", "--loss", "cross_entropy", "backend.use=nowhere")
    assert outcome.code == 3
    assert "nowhere" in outcome.last_line


@pytest.mark.parametrize("text", ["", "format = 2\n", "format = 1\n", "format = 1\n[engine]\n[plugins]\nloss = 3\n", "[[", "\x00"])
def test_what_is_no_lock_is_refused_by_its_name(command: Run, file: Path, text: str) -> None:
    (file.parent / "train.lock").write_text(text)
    outcome = command("run", file, "--locked", "--dry-run")
    assert outcome.code == 2
    assert f"skyrl-engine lock {file}" in outcome.last_line


def test_a_run_is_trained_once_more_from_its_manifest(command: Run, file: Path) -> None:
    assert command("run", file).code == 0
    run, again = file.parent / "run", file.parent / "again"
    assert command("run", "--from", run / "run.json", f"run.directory={again}").code == 0
    first, second = (
        [record["metrics"]["loss"] for record in read_metrics(place / "metrics.jsonl") if record["kind"] == "step"]
        for place in (run, again)
    )
    assert first == second
    assert len(first) == 2
    manifest = json.loads((run / "run.json").read_text())
    manifest["plugins"]["reducer"]["version"] = "0.0.1"
    (run / "run.json").write_text(json.dumps(manifest))
    outcome = command("run", "--from", run, "run.directory=third")
    assert (outcome.code, table_of(outcome.err)) == (3, ["reducer"])


def test_a_schedule_of_the_users_is_locked_too(command: Run, file: Path) -> None:
    (course := file.parent / "course.py").write_text("def course(step, steps):\n    return 1.0\n")
    table = file.read_text() + '[optimizer]\nschedule = "./course.py:course"\n'
    file.write_text(table)
    assert command("lock", file).code == 0
    assert "course.py" in (file.parent / "train.lock").read_text()
    assert command("run", file, "--locked").code == 0
    assert command("run", "--from", "run", "run.directory=again", "--dry-run").code == 0
    course.write_text("def course(step, steps):\n    return 0.5\n")
    changed = command("run", file, "--locked", "run.directory=again", "--dry-run")
    assert (changed.code, table_of(changed.err)) == (3, [str(course)])


def test_a_recorded_run_goes_on_where_its_files_are_now(command: Run, file: Path, tmp_path: Path) -> None:
    assert command("run", file).code == 0
    (there := tmp_path / "there").mkdir()
    for name in ("losses.py", "rows.jsonl", "model"):
        (tmp_path / name).rename(there / name)
    gone = command("run", "--from", "run", "run.directory=again", "--dry-run")
    assert gone.code == 2
    assert str(tmp_path / "losses.py") in gone.err
    keys = ("model.path=./there/model", "data.train=./there/rows.jsonl", "loss.use=./there/losses.py:mine")
    assert command("run", "--from", "run", "run.directory=again", "--dry-run", *keys).code == 0


def test_a_manifest_alone_is_somebody_elses(command: Run, file: Path) -> None:
    assert command("run", file).code == 0
    manifest = json.loads((file.parent / "run" / "run.json").read_text())
    (theirs := file.parent / "theirs.json").write_text(json.dumps({**manifest, "seal": None}))
    (file.parent / "has-run").unlink()
    outcome = command("run", "--from", theirs, "run.directory=again", "--dry-run")
    assert outcome.code == 3
    assert "--trust-code" in outcome.last_line
    assert not (file.parent / "has-run").exists()
    assert command("run", "--from", theirs, "run.directory=again", "--dry-run", "--trust-code").code == 0


@pytest.mark.parametrize("text", [None, "", "[]", '{"format": 1, "sessions": []}', '{"format": 9, "sessions": []}'])
def test_what_is_no_manifest_is_refused(command: Run, tmp_path: Path, text: str | None) -> None:
    place = tmp_path / "run.json"
    if text is not None:
        place.write_text(text)
    outcome = command("run", "--from", place)
    assert outcome.code == 4
    assert str(place) in outcome.last_line


def test_one_configuration_is_named(command: Run, file: Path) -> None:
    for arguments in ((), ("--from", "run", "--locked"), (file, "--from", "run")):
        outcome = command("run", *arguments)
        assert (outcome.code, outcome.out) == (2, "")
