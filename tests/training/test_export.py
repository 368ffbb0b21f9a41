"""Exported directories load in transformers and are the trained model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import CheckpointError, EngineError, ModelError
from skyrl_engine.training.export import ExportChoices, export_checkpoint
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


@pytest.mark.nightly
def test_a_checkpoint_keeps_what_training_did_not_use_wherever_the_run_lies(
    configure: Configure, material: Path, tmp_path: Path
) -> None:
    """The run directory moves, the base moves: the export says what it needs, and with it is the model of the run's end, byte for byte."""
    source = tmp_path / "source"
    shutil.copytree(material / "model", source)
    weights = load_file(source / "model.safetensors")
    save_file({**weights, "mtp.fc.weight": torch.ones(2, 2)}, source / "model.safetensors", metadata={"format": "pt"})
    for lora in (None, {"rank": 2}):
        model = {"path": str(source)} | ({} if lora is None else {"lora": lora})
        run = run_sft(configure("run" if lora is None else "adapters", model=model, training={"steps": 2})).directory
        run = run.rename(tmp_path / f"moved-{run.name}")
        choices = ExportChoices(merge=lora is not None)
        whole = tmp_path / f"whole-{run.name}"
        export_checkpoint(run, whole, choices=choices)
        source.rename(tmp_path / "elsewhere")
        with pytest.raises(ModelError, match=r"mtp.fc.weight is not there any more|base model .* is not there") as caught:
            export_checkpoint(run, tmp_path / "refused", choices=choices)
        assert "--model PATH" in caught.value.remedy
        export_checkpoint(run, tmp_path / f"again-{run.name}", choices=evolve(choices, model=str(tmp_path / "elsewhere")))
        found = [tensors(place) for place in (whole, tmp_path / f"again-{run.name}", *([run / "model"] if lora is None else []))]
        for tensors_of_place in found:
            assert tensors_of_place.keys() == {*weights, "mtp.fc.weight"}
            assert all(torch.equal(tensors_of_place[name], found[0][name]) for name in tensors_of_place)
        (tmp_path / "elsewhere").rename(source)


def test_layers_that_are_frozen_stay_as_they_were_and_are_in_every_checkpoint(
    configure: Configure, material: Path, tmp_path: Path
) -> None:
    groups = [{"match": "lm_head.*", "learning_rate": 1e-3}]
    settings = {"training": {"steps": 2}, "model": {"freeze": ["model.layers.0.*"]}, "optimizer": {"groups": groups}}
    run = run_sft(configure(**settings)).directory
    export_checkpoint(run, tmp_path / "output")
    before, after, exported = (tensors(place) for place in (material / "model", run / "model", tmp_path / "output"))
    assert all(torch.equal(after[name], exported[name]) for name in after)
    assert {name for name in after if torch.equal(before[name], after[name])} == {name for name in after if ".layers.0." in name}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
