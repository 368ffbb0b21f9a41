"""`preference`, its other name, and `data preview` of pairs, on a tiny model."""

import json
import tomllib

import pytest

from skyrl_engine.cli.demo.recipe import Exchange
from skyrl_engine.cli.demo.tiny import make_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model directory and ten pairs as messages."""
    folder = tmp_path_factory.mktemp("inputs")
    make_model(folder / "model", [Exchange(f"Say {number}", f"{number} {number + 1}") for number in range(24)])
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Say {number}"}],
            "chosen": [{"role": "assistant", "content": f"{number}"}],
            "rejected": [{"role": "assistant", "content": f"{number + 1}"}],
        }
        for number in range(10)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def arguments(inputs):
    return ("--model", inputs / "model", "--data", inputs / "pairs.jsonl")


@pytest.mark.parametrize("name", ["preference", "dpo"])
def test_the_printed_configuration_trains_on_pairs(command, arguments, tmp_path, name):
    options = ("--eval-fraction", "0.2", "--steps", "1", "--batch-size", "4", "--output", "run", "loss.beta=0.2")
    if name == "preference":
        outcome = command(name, *arguments, *options, "--dry-run", f"data.cache={tmp_path / 'cache'}")
        assert outcome.code == 0, outcome.err
        assert "8 pairs of 8 rows, 0 dropped" in " ".join(outcome.err.split())
        return
    outcome = command(name, *arguments, *options, f"data.cache={tmp_path / 'cache'}")
    assert outcome.code == 0, outcome.err
    printed = tomllib.loads(outcome.out)
    assert printed["trainer"] == "preference"
    assert printed["loss"] == {"beta": 0.2}
    assert "rewards/margins" in outcome.err
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["loss"]["use"] == "dpo"


def test_preview_shows_which_tokens_of_both_halves_carry_loss(command, arguments, tmp_path):
    """`trainer=preference` names the trainer; rows with chosen and rejected answers are known without it."""
    outcome = command("data", "preview", *arguments, "--samples", "1", "--json", f"data.cache={tmp_path / 'cache'}")
    assert outcome.code == 0, outcome.err
    samples = json.loads(outcome.out)["samples"]
    assert [(sample["row"], sample["role"]) for sample in samples] == [(0, "chosen"), (0, "rejected")]
    carrying = ["".join(token["text"] for token in sample["tokens"] if token["loss"]) for sample in samples]
    assert carrying[0].startswith("0")
    assert carrying[1].startswith("1")
    shown = command("data", "preview", *arguments, "trainer=preference", "--samples", "1", f"data.cache={tmp_path / 'cache'}")
    assert shown.code == 0, shown.err
    assert "row 0, rejected:" in shown.out
    assert "10 pairs of 10 rows" in shown.out


def test_sft_names_the_trainer_of_pairs(command, arguments, tmp_path):
    outcome = command("sft", *arguments, "--dry-run", f"data.cache={tmp_path / 'cache'}")
    assert outcome.code == 4
    assert 'trainer = "preference"' in outcome.last_line
