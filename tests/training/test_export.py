"""Exported directories load in transformers and are the trained model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import CheckpointError, EngineError, ModelError
from skyrl_engine.training.export import export_checkpoint
from skyrl_engine.training.sft.trainer import run_sft

Configure = Callable[..., ResolvedConfig]


def test_an_exported_checkpoint_is_the_model_of_its_step(configure: Configure, material: Path, tmp_path: Path) -> None:
    run = run_sft(configure()).directory
    export_checkpoint(run, tmp_path / "last")
    export_checkpoint(run, tmp_path / "earlier", step=9)
    last, earlier = (load_file(tmp_path / name / "model.safetensors") for name in ("last", "earlier"))
    at_end = load_file(run / "model" / "model.safetensors")
    assert last.keys() == at_end.keys()
    assert all(torch.equal(last[name], at_end[name]) for name in at_end)
    assert any(not torch.equal(last[name], earlier[name]) for name in at_end)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "last")
    prompt = tokenizer("1 + 2 = ", return_tensors="pt")["input_ids"]
    logits = [AutoModelForCausalLM.from_pretrained(place).eval()(prompt).logits for place in (tmp_path / "last", run / "model")]
    assert torch.equal(*logits)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(material / "model").get_vocab()


def test_a_run_that_goes_on_after_its_end_leaves_the_new_model(configure: Configure, tmp_path: Path) -> None:
    run = run_sft(configure(training={"steps": 2})).directory
    before = load_file(run / "model" / "model.safetensors")
    run_sft(configure(training={"steps": 3}), resume=True)
    after = load_file(run / "model" / "model.safetensors")
    export_checkpoint(run, tmp_path / "last")
    last = load_file(tmp_path / "last" / "model.safetensors")
    assert all(torch.equal(after[name], last[name]) for name in last)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_what_cannot_be_exported_is_refused(configure: Configure, tmp_path: Path) -> None:
    run = run_sft(configure(training={"steps": 2})).directory
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "mine.txt").touch()
    with pytest.raises(ModelError, match="occupied exists and is not an empty directory"):
        export_checkpoint(run, occupied)
    with pytest.raises(EngineError, match="there is no run directory"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "output")
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        export_checkpoint(run, tmp_path / "output", step=7)
    assert not (tmp_path / "output").exists()


def test_a_disk_that_fills_leaves_no_half_model(configure: Configure, tmp_path: Path) -> None:
    run = run_sft(configure(training={"steps": 2})).directory
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="could not be written"):
        export_checkpoint(run, tmp_path / "file" / "output")
    assert not list(tmp_path.glob(".*partial"))
