"""The trainer `perplexity` is found, checked, planned and run by its name, and its numbers are the model's."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers

from skyrl_engine.cli import app
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

TEXTS = ["one two three", "two two two two", "three one", "one one two three three two", "two three"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("perplexity") / "model"
    write_model(folder)
    write_tokenizer(folder, TEXTS)
    return folder


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration file of a run in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    file = tmp_path / "perplexity.toml"
    file.write_text(
        f'trainer = "perplexity"\n[model]\npath = "{model}"\n[data]\ntrain = "./train.jsonl"\n[run]\ndirectory = "out"\n'
    )
    return file


def test_the_perplexity_of_every_sample_is_the_models(
    config: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["run", str(config), "perplexity.batch_size=2", "training.micro_batch_rows=1"]) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in (tmp_path / "out" / "perplexities.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in lines] == list(range(len(TEXTS)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model)
    nats = tokens = 0
    for line, text in zip(lines, TEXTS, strict=True):
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        assert line["tokens"] == ids.shape[1] - 1
        with torch.no_grad():
            scores = torch.log_softmax(reference(ids).logits[0, :-1].double(), -1)
        due = -scores.gather(1, ids[0, 1:, None])
        assert line["perplexity"] == pytest.approx(float(due.mean().exp()), rel=1e-4)
        nats, tokens = nats + float(due.sum()), tokens + line["tokens"]
    assert f"{torch.tensor(nats / tokens).exp().item():.5g}" in captured.out
    assert "next" not in captured.err, "the engine knows no command that follows on another's trainer"
    written = (tmp_path / "out" / "config.toml").read_text()
    assert "[perplexity]\nbatch_size = 2\n" in written
    trainer = json.loads((tmp_path / "out" / "run.json").read_text())["plugins"]["trainer"]
    assert (trainer["distribution"], trainer["name"], trainer["version"]) == (
        "acme-perplexity",
        "perplexity",
        version("acme-perplexity"),
    )
    assert app.main(["config", "check", str(tmp_path / "out" / "config.toml")]) == 0


def test_a_plan_is_printed_and_starts_nothing(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["run", str(config), "--dry-run", "perplexity.batch_size=2"]) == 0
    assert "3 of 2" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("perplexity.batch=2", "batch_size"),
        ("perplexity.batch_size=0", "must be at least 1"),
        ("rl.steps=2", "[rl] is a table of trainer rl, and this run's trainer is perplexity"),
        ("trainer=sft perplexity.batch_size=2", "[perplexity] is a table of trainer perplexity, and this run's trainer is sft"),
        ("trainer=perplexty", 'Did you mean "perplexity"?'),
    ],
)
def test_a_mistake_is_refused_by_name(config: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["run", str(config), *override.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_schema_of_files_has_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "batch_size" in schema["properties"]["perplexity"]["properties"]
    assert "perplexity" in schema["properties"]["trainer"]["enum"]
