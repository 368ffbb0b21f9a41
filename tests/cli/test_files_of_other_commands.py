"""A configuration of a command that another distribution adds is answered with that command, whatever is made of it."""

import pytest

from skyrl_engine.cli.demo.second_act import _SERVE


@pytest.mark.parametrize(
    "line",
    [
        ("config", "check", "serve.toml"),
        ("config", "show", "serve.toml"),
        ("run", "serve.toml", "--dry-run"),
        ("run", "serve.toml", "run.seed=1"),
        ("data", "preview", "serve.toml"),
        ("prove", "serve.toml"),
        ("diff-backends", "serve.toml", "--b", "fsdp"),
    ],
    ids=" ".join,
)
def test_the_demos_file_for_serve_is_given_back_to_serve(command, tmp_path, line) -> None:
    (tmp_path / "serve.toml").write_text(_SERVE)
    outcome = command(*line)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    words = (
        "is a table of the command `skyrl-engine serve` (skyrl-engine-tinker), and no run. Write `skyrl-engine serve serve.toml`."
    )
    assert words in outcome.last_line


def test_a_file_with_tables_of_a_run_too_is_read_as_one(command, tmp_path) -> None:
    (tmp_path / "both.toml").write_text(_SERVE + '[model]\npath = "m"\n[data]\ntrain = "d"\n')
    outcome = command("config", "check", "both.toml")
    assert outcome.code == 2
    assert "serve: is not a known key" in outcome.err
