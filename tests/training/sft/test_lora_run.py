"""A run that trains adapters: what it learns, what it leaves, how it resumes, and the backends that cannot."""

import json
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.automatic import with_recorded_choices
from skyrl_engine.contracts import LoraConfig
from skyrl_engine.errors import CheckpointError
from skyrl_engine.modeling.sampler_model import iterate_stored_weights
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.run.resume_checks import find_changed_keys
from skyrl_engine.testing.adapters import with_adapter
from skyrl_engine.training.export import ExportChoices, export_checkpoint
from skyrl_engine.training.sft.trainer import run_sft
from skyrl_engine.training.trained_model import NamedModel

Configure = Callable[..., ResolvedConfig]

LORA = {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"], "dropout": 0.1}


def losses(directory: Path) -> list[float]:
    return [record["metrics"]["loss"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]


def load_adapters(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


def test_a_run_learns_adapters_resumes_exactly_and_leaves_them_for_peft(
    configure: Configure, material: Path, tmp_path: Path
) -> None:
    model = {"path": str(material / "model"), "lora": LORA}
    constant = {"schedule": "constant"}  # a shorter training has the rates of a longer one's beginning
    whole = run_sft(configure("whole", model=model, optimizer=constant)).directory
    run_sft(configure("interrupted", model=model, optimizer=constant, training={"steps": 4}))
    run = run_sft(configure("interrupted", model=model, optimizer=constant), resume=True).directory
    assert losses(run) == losses(whole)
    assert np.mean(losses(whole)[-3:]) < np.mean(losses(whole)[:3])
    adapters = load_adapters(whole / "model")
    assert len(adapters) == 2 * 3 * 2
    assert all(torch.equal(adapters[name], tensor) for name, tensor in load_adapters(run / "model").items())
    export_checkpoint(whole, tmp_path / "exported")
    assert all(torch.equal(adapters[name], tensor) for name, tensor in load_adapters(tmp_path / "exported").items())

    ids = AutoTokenizer.from_pretrained(whole / "model")("1 + 2 = 3", return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(material / "model").eval()
    before = base(ids).logits
    assert not torch.allclose(with_adapter(base, str(whole / "model")).eval()(ids).logits, before)

    more = run_sft(configure("more", model={**model, "lora": {"path": str(whole / "model")}}, training={"steps": 2})).directory
    assert losses(more)[0] < losses(whole)[0]
    assert load_adapters(more / "model").keys() == adapters.keys()


def test_an_average_of_adapters_goes_on_over_a_break_and_is_exported(configure: Configure, material: Path, tmp_path: Path) -> None:
    tables = {"model": {"path": str(material / "model"), "lora": LORA}, "checkpoint": {"every": 1, "keep": "none"}}
    constant = {"schedule": "constant", "warmup_steps": 0}
    averaging = {**tables, "optimizer": {**constant, "ema_decay": 0.75}}
    run_sft(configure("run", **averaging, training={"steps": 2}))
    run = run_sft(configure("run", **averaging, training={"steps": 3}), resume=True).directory
    for step in (1, 2, 3):
        export_checkpoint(run, tmp_path / f"{step}", step)
    first, *later = (load_adapters(tmp_path / f"{step}") for step in (1, 2, 3))
    export_checkpoint(run, tmp_path / "average", choices=ExportChoices(ema=True))
    exported = load_adapters(tmp_path / "average")
    for name, weight in first.items():
        average = reduce(lambda mean, weights, name=name: torch.lerp(mean, weights[name], 0.25), later, weight)
        torch.testing.assert_close(exported[name], average, rtol=0, atol=0)
    plain = run_sft(configure("plain", **tables, optimizer=constant, training={"steps": 1})).directory
    with pytest.raises(CheckpointError, match="holds no average of its weights"):
        export_checkpoint(plain, tmp_path / "none", choices=ExportChoices(ema=True))


def test_a_run_of_an_older_engine_goes_on_though_it_recorded_defaults_that_its_adapters_do_not_have(configure: Configure) -> None:
    given = {"path": "adapters", "alpha": 4}
    older = {**given, "rank": 8, "rslora": False, "dora": False, "targets": "all-linear"}
    recorded = configure("older", model={"path": "base", "lora": {**older, "alpha": 16}}).as_dict()
    resumed = with_recorded_choices(configure("older", model={"path": "base", "lora": older}), recorded)
    assert resumed.config.model.lora == LoraConfig(**given)
    assert [change.key for change in find_changed_keys(recorded, resumed.as_dict())] == ["model.lora.alpha"]


@pytest.mark.proof
@pytest.mark.usefixtures("without_ray")
def test_two_ranks_learn_the_adapters_of_one(configure: Configure, material: Path, tmp_path: Path) -> None:
    """The same losses and gradient norms, and the same adapters to rounding; without dropout, of which two ranks draw other masks."""
    directory = tmp_path / "model"
    shutil.copytree(material / "model", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    model = {"path": str(directory), "lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}}
    short = {
        "training": {"steps": 3},
        "optimizer": {"warmup_steps": 0, "epsilon": 0.1},
        "checkpoint": {"every": "none"},
    }
    alone, together = (
        run_sft(configure(name, model=model, run=run, **short)).directory
        for name, run in (("alone", {}), ("together", {"launch": "ray", "ranks": 2}))
    )
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    adapters = load_adapters(alone / "model")
    assert any(tensor.abs().max() > 0 for name, tensor in adapters.items() if ".lora_B." in name)
    for name, tensor in load_adapters(together / "model").items():
        torch.testing.assert_close(tensor, adapters.pop(name), rtol=1e-4, atol=1e-6)
    assert not adapters


def test_adapters_over_weights_in_4_bits_resume_exactly_and_are_never_laid_over_others(
    configure: Configure, material: Path, tmp_path: Path
) -> None:
    """`chat` and `evaluate` of the run and merged exports have the weights that it trained over."""
    lora = {**LORA, "load_in_4bit": True, "double_quantization": True}
    tables = {"model": {"path": str(material / "model"), "lora": lora}, "optimizer": {"schedule": "constant"}}
    whole = run_sft(configure("whole", **tables, training={"steps": 3})).directory
    run_sft(configure("interrupted", **tables, training={"steps": 2}))
    for other, said in (({}, "Set model.lora.load_in_4bit = true and"), ({"double_quantization": False}, "held otherwise")):
        changed = {**tables, "model": {**tables["model"], "lora": {**lora, **other} if other else LORA}}
        with pytest.raises(CheckpointError, match=said):
            run_sft(configure("interrupted", **changed, training={"steps": 3}), resume=True)
    run = run_sft(configure("interrupted", **tables, training={"steps": 3}), resume=True).directory
    assert losses(run) == losses(whole)
    adapters = load_adapters(whole / "model")
    assert all(torch.equal(adapters[name], tensor) for name, tensor in load_adapters(run / "model").items())

    named = NamedModel.of(str(whole)).load(tmp_path, base=None, trust_remote_code=False)
    assert named.lora == LoraConfig(path=str(whole / "model"), load_in_4bit=True, double_quantization=True)
    export_checkpoint(whole, tmp_path / "merged", choices=ExportChoices(merge=True))
    merged = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    assert all(torch.equal(merged[name], weight) for name, weight in iterate_stored_weights(named) if name in merged)
    plain = dict(AutoModelForCausalLM.from_pretrained(material / "model").named_parameters())
    assert not torch.equal(merged["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"]), "is rounded"
