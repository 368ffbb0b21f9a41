"""Files, overrides and options: merged, with the origin of every key."""

import os
from pathlib import Path

import pytest

from skyrl_engine.config.reading.merging import Option
from skyrl_engine.config.reading.sources import from_dict, load
from skyrl_engine.errors import ConfigError

TOML = """\
[model]
path = "tiny"

[training]
batch_size = 4
steps = 10

[[loss.terms]]
use = "kl"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def origins(raw: object) -> dict[str, str]:
    return {key: str(origin) for key, origin in raw.origins.items()}  # type: ignore[attr-defined] # a RawConfig


def test_a_file_overrides_and_options_in_rising_order(folder: Path) -> None:
    Path("train.toml").write_text(TOML)
    raw = load(
        Path("train.toml"),
        ["training.batch_size=8", "training.batch_size=16", "loss={use = 'focal', gamma = 2}", "data.train=x.jsonl"],
        {"reducer.use": "sum", "model.path": "other", "training.steps": Option("--stop-after", 3), "backend.use": None},
    )
    assert raw.table == {
        "model": {"path": "other"},
        "training": {"batch_size": 16, "steps": 3},
        "loss": {"use": "focal", "gamma": 2},
        "data": {"train": "x.jsonl"},
        "reducer": {"use": "sum"},
    }
    assert origins(raw) == {
        "training.batch_size": "command line",
        "loss.use": "command line",
        "loss.gamma": "command line",
        "data.train": "command line",
        "reducer.use": "--reducer",
        "model.path": "--model",
        "training.steps": "--stop-after",
    }
    assert raw.problems == ()


def test_lines_of_a_file_are_remembered(folder: Path) -> None:
    Path("train.toml").write_text(TOML)
    assert origins(load(Path("train.toml"))) == {
        "model.path": "train.toml:2",
        "training.batch_size": "train.toml:5",
        "training.steps": "train.toml:6",
        "loss.terms[0].use": "train.toml:9",
    }


def test_yaml_says_the_same(folder: Path) -> None:
    Path("train.toml").write_text(TOML)
    Path("train.yaml").write_text("model: {path: tiny}\ntraining:\n  batch_size: 4\n  steps: 10\nloss:\n  terms:\n    - use: kl\n")
    assert load(Path("train.yaml")).table == load(Path("train.toml")).table
    assert origins(load(Path("train.yaml")))["loss.terms[0].use"] == "train.yaml:7"


def test_without_a_file_the_command_line_is_everything() -> None:
    raw = load(None, ["run.seed=1"])
    assert raw.table == {"run": {"seed": 1}}
    assert raw.label == "command line"


def test_problems_of_the_command_line_are_kept_for_later(folder: Path) -> None:
    Path("train.toml").write_text(TOML)
    raw = load(Path("train.toml"), ["nonsense", "model.path.deep=1", "run.seed=[", "loss.use=a"], {"loss.use": "b"})
    assert [str(problem) for problem in raw.problems] == [
        "command line: nonsense: is not an override. Write section.key=value",
        "command line: model.path.deep: model.path holds a value, not a table. Set model.path as a whole",
        "command line: run.seed=[: the value is not TOML. Close every bracket and quote, and quote text inside lists and tables",
        "--loss: loss.use: loss.use=a is given too. Give one of the two",
    ]
    assert raw.table["model"] == {"path": "tiny"}


def test_an_option_may_repeat_what_an_override_says() -> None:
    assert load(None, ["loss.use=a"], {"loss.use": "a"}).problems == ()


def test_a_broken_file_is_reported_with_the_problems_of_the_command_line(folder: Path) -> None:
    Path("train.toml").write_text("[model\n")
    with pytest.raises(ConfigError) as caught:
        load(Path("train.toml"), ["nonsense"])
    assert [problem.where for problem in caught.value.problems] == ["train.toml:1:7", "command line: nonsense"]


@pytest.mark.parametrize(
    ("name", "content", "where", "cause"),
    [
        ("train.toml", None, "train.toml", "there is no such file"),
        ("train.json", b"{}", "train.json", "is neither TOML nor YAML by its name"),
        ("train.toml", b"a = '\xff'", "train.toml", "is not UTF-8 text (byte 5)"),
        ("train.toml", b"a = " + b"[" * 5000, "train.toml", "is nested too deeply"),
        ("train.yaml", b"a: " + b"[" * 5000, "train.yaml", "is nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read(folder: Path, name: str, content: bytes | None, where: str, cause: str) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(Path(name))
    (problem,) = caught.value.problems
    assert (problem.where, problem.cause) == (where, cause)
    assert caught.value.exit_code == 2


def test_a_folder_is_not_a_configuration(folder: Path) -> None:
    Path("train.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(Path("train.toml"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(folder: Path) -> None:
    Path("train.toml").touch(mode=0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load(Path("train.toml"))


def test_a_byte_order_mark_is_no_content(folder: Path) -> None:
    Path("train.toml").write_bytes(b"\xef\xbb\xbf[run]\nseed = 1\n")
    assert load(Path("train.toml")).table == {"run": {"seed": 1}}


def test_a_saved_configuration_is_its_own_copy() -> None:
    saved = {"run": {"seed": 1}}
    raw = from_dict(saved, "runs/a/run.json")
    saved["run"]["seed"] = 2
    assert raw.table == {"run": {"seed": 1}}
    assert origins(raw) == {"run.seed": "runs/a/run.json"}
