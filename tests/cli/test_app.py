"""Reading of command lines, and how they end."""

import os
import subprocess
import sys
from collections.abc import Callable

import click
import pytest

from skyrl_engine import __version__, errors
from skyrl_engine.cli import app
from skyrl_engine.cli.command import CommandSettings, every_command
from skyrl_engine.cli.failures import exit_code_of

Command = Callable[..., object]


def test_help_names_every_command(command):
    outcome = command("--help")
    assert outcome.code == 0
    for name, lazy in app.COMMANDS.items():
        assert name in outcome.out
        assert lazy.short_help.split()[0] in outcome.out


def test_every_command_loads_and_has_help(command):
    paths = [path for path, _ in every_command(app.app, (app.PROGRAM,))]
    assert len(paths) > 12
    for path in paths:
        outcome = command(*path[1:], "--help")
        assert outcome.code == 0, outcome.err
        assert outcome.out.startswith(f"Usage: {' '.join(path)}")


def test_short_help_of_groups_is_that_of_their_commands():
    for name, lazy in app.COMMANDS.items():
        assert lazy.load().name == name


def test_version(command):
    assert command("--version").out == f"skyrl-engine {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rum"], "error: There is no command 'rum'. Did you mean 'run'? See `skyrl-engine --help`."),
        (["plugins", "lst"], "error: There is no command 'lst'. Did you mean 'list'? See `skyrl-engine plugins --help`."),
        (
            ["run"],
            "error: Missing argument 'CONFIG'. Name a configuration file, or a recorded run with --from. See `skyrl-engine run --help`.",
        ),
        (
            ["plugins", "list", "--kind", "los"],
            "error: There is no kind 'los'. Did you mean 'loss'? See `skyrl-engine plugins list --help`.",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(command, arguments, line):
    outcome = command(*arguments)
    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"{line}\n")


def test_engine_errors_end_in_one_line_below_their_details(capsys):
    error = errors.DataError("sample 3 of x.jsonl has no 'messages'", remedy="Add them", details=["first", "second"])
    assert exit_code_of(error, CommandSettings()) == 4
    assert capsys.readouterr().err == "first\nsecond\nerror: sample 3 of x.jsonl has no 'messages'. Add them.\n"


def test_an_engine_error_of_a_run_names_the_log_above_the_last_line(capsys, tmp_path):
    exit_code_of(errors.WorkerError("rank 1 died", rank=1, remedy="Look"), CommandSettings(log=tmp_path / "run.log"))
    assert capsys.readouterr().err == f"the log: {tmp_path / 'run.log'}\nerror: rank 1 died. Look.\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError([errors.Problem("a.toml", "is empty", "Write it")]), 2),
        (errors.UnsupportedError("no", remedy="Change it"), 2),
        (errors.PluginNotFoundError("no", remedy="Install it"), 3),
        (errors.ContractError("no", remedy="Report it"), 3),
        (errors.WorkerError("no", rank=1, remedy="Look"), 4),
        (click.Abort(), 130),
        (KeyboardInterrupt(), 130),
        (SystemExit(7), 7),
    ],
)
def test_exit_codes(capsys, error, code):
    assert exit_code_of(error, CommandSettings()) == code
    assert "Traceback" not in capsys.readouterr().err


def _raise(*_: object, **__: object) -> None:
    raise RuntimeError("two\nlines")


def test_an_unexpected_exception_names_its_log(command, monkeypatch, tmp_path):
    monkeypatch.setattr("skyrl_engine.config.config_schema", _raise, raising=False)
    outcome = command("config", "schema")
    (log,) = (tmp_path / "logs").iterdir()
    assert outcome.code == 4
    assert (
        outcome.err
        == f"error: unexpected RuntimeError: two lines. The traceback is in {log}; run again with --debug to see it here.\n"
    )
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize(
    "arguments", [["--debug", "config", "schema"], ["config", "schema", "--debug"], ["config", "--debug", "schema"]]
)
def test_debug_shows_the_traceback_wherever_it_stands(command, monkeypatch, arguments):
    monkeypatch.setattr("skyrl_engine.config.config_schema", _raise, raising=False)
    outcome = command(*arguments)
    assert outcome.code == 4
    assert outcome.err.startswith("Traceback")
    assert outcome.last_line.startswith("error: unexpected RuntimeError: two lines.")


def test_half_a_character_is_written_out_in_the_log(monkeypatch, tmp_path):
    monkeypatch.setattr("platformdirs.user_log_path", lambda *_: tmp_path)
    error = ValueError("a text")
    error.add_note("cut \ud83d")
    exit_code_of(error, CommandSettings())
    assert any("cut \\ud83d" in log.read_text() for log in tmp_path.glob("failure-*.log"))


def test_an_unwritable_log_directory_falls_back_to_the_temporary_one(capsys, monkeypatch, tmp_path):
    occupied = tmp_path / "a file"
    occupied.write_text("")
    monkeypatch.setattr("platformdirs.user_log_path", lambda *_: occupied)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert exit_code_of(RuntimeError("x"), CommandSettings()) == 4
    assert list(tmp_path.glob("failure-*.log"))


def test_telemetry_of_the_libraries_is_off(command, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")
    command("--version")
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


@pytest.mark.parametrize("arguments", [["config", "schema"], ["plugins", "list"]], ids=["plain", "rendered"])
def test_a_reader_that_goes_away_is_no_failure(arguments):
    with subprocess.Popen(
        [sys.executable, "-m", "skyrl_engine", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_process_without_streams_works_and_keeps_their_places_free_of_other_files():
    script = f"exec {sys.executable} -m skyrl_engine plugins list >&- 2>&-"
    assert subprocess.run(["sh", "-c", script], check=False, timeout=60).returncode == 0
