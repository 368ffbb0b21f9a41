"""`--dry-run` refuses what the run would refuse, with the file or key and a remedy; nothing but configuration and files is looked at."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.cli.demo.recipe import Exchange, write_exchanges
from skyrl_engine.cli.demo.tiny import make_model
from skyrl_engine.modeling.tiny import write_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    exchanges = [Exchange(f"Say {number:03d}", f"{number:03d}") for number in range(8)]
    make_model(folder / "model", exchanges)
    write_exchanges(folder / "data.jsonl", exchanges)
    return folder


def keep(_model: Path) -> None:
    """Leave the model as it is."""


def change_config(model: Path, **values: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def replace_by_mamba(model: Path) -> None:
    (model / "model.safetensors").unlink()
    write_model(model, "mamba", vocab_size=json.loads((model / "config.json").read_text())["vocab_size"])


@pytest.mark.parametrize(
    ("change", "settings", "code", "words"),
    [
        (keep, [], 0, ""),
        (lambda model: (model / "config.json").unlink(), [], 4, "holds no config.json"),
        (lambda model: (model / "config.json").write_text("{\n"), [], 4, "model/config.json is not valid JSON: line 2, column 1"),
        (lambda model: change_config(model, model_type="nosuch"), [], 4, 'the model_type "nosuch", which transformers'),
        (
            lambda model: change_config(model, model_type="own", auto_map={"AutoConfig": "own.A", "AutoModelForCausalLM": "own.B"}),
            [],
            4,
            "model.trust_remote_code = true",
        ),
        (lambda model: (model / "model.safetensors").unlink(), [], 4, "holds no weights"),
        (lambda model: (model / "model.safetensors").rename(model / "x"), ["--backend", "deepspeed"], 4, "holds no weights"),
        (lambda model: change_config(model, intermediate_size=24), [], 4, "mlp.down_proj.weight has the shape"),
        (
            lambda model: change_config(model, hidden_act="nosuch"),
            [],
            4,
            "cannot be built from its config.json: KeyError: 'nosuch'",
        ),
        (lambda model: [file.unlink() for file in model.glob("tokenizer*")], [], 4, "holds no tokenizer"),
        (lambda model: (model / "tokenizer.json").write_text("{"), [], 4, "model/tokenizer.json is not valid JSON"),
        (lambda model: (model / "chat_template.jinja").unlink(), [], 4, "has no chat template. Set model.chat_template"),
        (lambda model: (model / "chat_template.jinja").write_text("\n{% for"), [], 4, "is no Jinja template: line 2"),
        (replace_by_mamba, ["--collator", "packed"], 2, "cannot be trained on packed rows"),
        (replace_by_mamba, [], 0, ""),
        (keep, ["model.lora.targets=['no_such']"], 4, "'no_such', which no linear layer"),
        (keep, ["run.device=cuda"], 2, 'run.device = "cuda", and torch finds no CUDA device on this machine'),
        (keep, ["run.device=cuda", "--launch", "ray"], 2, "torch finds no CUDA device on this machine"),
        (keep, ["run.device=cuda", "--launch", "ray", "run.ray_address=10.0.0.1:6379"], 0, ""),
    ],
)
def test_what_the_run_would_refuse(command, inputs, tmp_path, monkeypatch, change, settings, code, words):
    if "deepspeed" in settings:
        pytest.importorskip("skyrl_engine_deepspeed", reason="NOT PROVED HERE: this needs skyrl-engine-deepspeed")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shutil.copytree(inputs / "model", tmp_path / "model")
    change(tmp_path / "model")
    arguments = ("--model", tmp_path / "model", "--data", inputs / "data.jsonl", "data.cache=./cache", "--output", "run", *settings)
    outcome = command("sft", "--quiet", *arguments, "--dry-run")
    assert outcome.code == code, outcome.err
    assert words in outcome.last_line
    assert "traceback" not in outcome.err
    assert not (tmp_path / "run").exists()
