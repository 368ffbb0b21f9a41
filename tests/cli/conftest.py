"""Command lines run in this process, as the console script runs them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import frozen

from skyrl_engine.cli import app
from skyrl_engine.config.trainers import TRAINERS


@frozen
class Outcome:
    """Result of one command line."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.err.rstrip("\n").rpartition("\n")[2]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Outcome]:
    """Run a command line in an empty directory; environment variables that it sets are taken back."""
    monkeypatch.chdir(tmp_path)
    for name in {*app._ENVIRONMENT, *app._QUIET_LIBRARIES}:
        monkeypatch.setenv(name, "what undoing takes back")
        monkeypatch.delenv(name)
    monkeypatch.setattr("platformdirs.user_log_path", lambda *_: tmp_path / "logs")

    def run(*arguments: str | Path) -> Outcome:
        code = app.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def inputs(tmp_path: Path) -> None:
    """Write a configuration for every trainer, and a run directory, which command lines of `command_lines` name."""
    for trainer in TRAINERS:
        data = '[[environments]]\nuse = "prompts"\ndata = "d.jsonl"\n' if trainer == "rl" else '[data]\ntrain = "d.jsonl"\n'
        (tmp_path / f"{trainer}.toml").write_text(f'trainer = "{trainer}"\n[model]\npath = "m"\n{data}')
    (tmp_path / "trained" / "model").mkdir(parents=True)
    (tmp_path / "trained" / "config.toml").write_text((tmp_path / "rl.toml").read_text())
