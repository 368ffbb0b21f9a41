"""`skyrl-engine init`: what is written is a configuration that runs, and every key that it shows has the default that it says."""

import io
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.cli.app import main
from skyrl_engine.config import load, resolve
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

OPTIONS = {
    "sft": ["--data", "rows.jsonl", "--eval-fraction", "0.5", "--lora", "4"],
    "preference": ["--data", "rows.jsonl"],
    "reward_model": ["--data", "rows.jsonl"],
    "rl": ["--data", "rows.jsonl", "--reward", "score.py:length"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_model(tmp_path / "model", tokenizer=write_tokenizer(tmp_path / "model", ["one and two"]))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "completion": "two"}\n' * 4)
    (tmp_path / "score.py").write_text("def length(text, task):\n    return float(len(text))\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("trainer", OPTIONS)
def test_the_file_resolves_and_its_comments_state_the_defaults(folder: Path, trainer: str) -> None:
    assert main(["init", "first.toml", "--trainer", trainer, "--model", "model", *OPTIONS[trainer]]) == 0
    text = (folder / "first.toml").read_text()
    (folder / "all.toml").write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    shown, whole = (tomllib.loads((folder / name).read_text()) for name in ("first.toml", "all.toml"))
    assert sum(len(table) for table in whole.values() if isinstance(table, dict)) > 10
    # the model has fewer positions than the default makes use of
    assert shown.get("rl") == ({"max_tokens": 80} if trainer == "rl" else None)
    first, full = (resolve(load(folder / name)).as_dict() for name in ("first.toml", "all.toml"))
    assert first == full
    assert shown["model"]["path"] == "./model"


def test_a_first_file_runs_and_is_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "configs").mkdir()
    line = ["init", "configs/run.toml", "--trainer", "sft", "--model", "model", *OPTIONS["sft"]]
    assert main(line) == 0
    assert "skyrl-engine run configs/run.toml" in capsys.readouterr().out
    assert tomllib.loads((folder / "configs/run.toml").read_text())["data"]["train"] == "../rows.jsonl"
    assert main(["run", "configs/run.toml", "--dry-run", "run.device=cpu"]) == 0
    assert main(line) == 2
    assert "is there already" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_asked_five_questions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ("rl", "model", "score.py:length", "rows.jsonl", "0.5", "8")
    monkeypatch.setattr("sys.stdin", Terminal("".join(f"{answer}\n" for answer in answers)))
    monkeypatch.setattr("sys.stderr", Terminal())
    assert main(["init"]) == 0
    table: Any = tomllib.loads((folder / "run.toml").read_text())
    assert table["environments"] == [
        {"use": "function", "reward": "./score.py:length", "data": "./rows.jsonl", "eval_fraction": 0.5}
    ]
    assert table["model"] == {"path": "./model", "lora": {"rank": 8}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trainer", "sft"], "Give --model and --data: there is no terminal to ask at"),
        (["--trainer", "rl", "--model", "model"], "Give --reward (or --env) and --data: there is"),
        (["--trainer", "sft", "--model", "m", "--data", "d", "--reward", "r"], "--reward and --env are for trainer rl"),
        (["--trainer", "rl", "--model", "m", "--env", "e", "--data", "d"], "has tasks of its own"),
        (["a.yaml"], "does not end in .toml"),
        (["away/a.toml"], "There is no folder away"),
        (["--trainer", "rl", "--model", "model", "--env", "nobody:knows"], "nobody:knows"),
    ],
)
def test_refusals(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(["init", *arguments]) in (2, 3)
    assert words in capsys.readouterr().err
    assert [file.name for file in folder.iterdir() if file.suffix == ".toml"] == []
