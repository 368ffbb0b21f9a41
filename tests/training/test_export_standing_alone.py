"""A run directory exports from anywhere: without its base model, from another place, whatever the current folder is."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import CheckpointError, ModelError
from skyrl_engine.registry.discovery import discover
from skyrl_engine.training.export import ExportChoices, export_checkpoint
from skyrl_engine.training.sft.trainer import run_sft

Configure = Callable[..., ResolvedConfig]
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture
def base(material: Path, tmp_path: Path) -> Path:
    """A model of this test's own, without dropout, which not every backend trains with; it can be taken away."""
    shutil.copytree(material / "model", tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    return tmp_path / "base"


def train_and_move(configure: Configure, base: Path, **changes: Any) -> Path:
    """Run in a directory, then move that away and delete the base model."""
    tables = {"training": {"steps": 2}, **changes}
    tables["model"] = {"path": str(base), **changes.get("model", {})}
    run = run_sft(configure(**tables)).directory
    return Path(shutil.move(run, run.with_name("moved")))


def weights(directory: Path, name: str = "model") -> Tensors:
    return load_file(directory / f"{name}.safetensors")


def assert_equal(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


BACKENDS = [record.name for record in discover().records if record.kind == "backend"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_moved_run_exports_without_its_base(
    configure: Configure, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    run = train_and_move(configure, base, backend={"use": backend}, model={"dtype": "bfloat16", "chat_template": str(template)})
    shutil.rmtree(base)
    template.unlink()
    monkeypatch.chdir(run.parent)
    export_checkpoint(run, tmp_path / "exported")
    assert_equal(weights(tmp_path / "exported"), weights(run / "model"))
    assert {tensor.dtype for tensor in weights(run / "model").values()} == {torch.bfloat16}
    assert json.loads((run / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert "message.content" in AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template
    export_checkpoint(run, tmp_path / "precise", choices=ExportChoices(precision="float32"))
    precise = weights(tmp_path / "precise")
    assert {tensor.dtype for tensor in precise.values()} == {torch.float32}
    assert_equal({name: tensor.bfloat16() for name, tensor in precise.items()}, weights(run / "model"))


LORA: dict[str, Any] = {"model": {"lora": {"rank": 2, "alpha": 4}}, "optimizer": {"learning_rate": 1e-1, "warmup_steps": 0}}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_adapters_record_a_base_that_peft_finds(
    configure: Configure, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration names the base by a path that is relative to a folder which is not the current one later."""
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(base.parent)
    run = train_and_move(configure, Path(base.name), **LORA)
    monkeypatch.chdir("/")
    aside = base.rename(base.with_name("aside"))
    export_checkpoint(run, tmp_path / "exported")
    assert_equal(weights(tmp_path / "exported", "adapter_model"), weights(run / "model", "adapter_model"))
    aside.rename(base)
    for place in (run / "model", tmp_path / "exported"):
        assert json.loads((place / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
        AutoPeftModelForCausalLM.from_pretrained(place)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_merged_adapters_are_one_model_with_its_tokenizer(configure: Configure, base: Path, tmp_path: Path) -> None:
    """The same logits as PEFT's, to float32's rounding, and other ones than the base's."""
    from peft import AutoPeftModelForCausalLM

    run = train_and_move(configure, base, **LORA)
    aside = base.rename(base.with_name("aside"))
    with pytest.raises(ModelError, match=r"base model .*base, .* is not there") as caught:
        export_checkpoint(run, tmp_path / "merged", choices=ExportChoices(merge=True))
    assert "--model" in caught.value.remedy
    export_checkpoint(run, tmp_path / "merged", choices=ExportChoices(merge=True, model=str(aside)))
    export_checkpoint(run, tmp_path / "adapters", choices=ExportChoices(model=str(aside)))
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")("1 + 2 =", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        merged, adapted, plain = (
            model.eval()(ids).logits
            for model in (
                AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
                AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters"),
                AutoModelForCausalLM.from_pretrained(aside),
            )
        )
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-5)
    assert (merged - plain).abs().max() > 1e-2
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_a_run_from_an_existing_adapter_exports_without_it(configure: Configure, base: Path, tmp_path: Path) -> None:
    first = train_and_move(configure, base, **LORA)
    adapter = tmp_path / "adapter"
    shutil.copytree(first / "model", adapter)
    shutil.rmtree(first)
    run = train_and_move(configure, base, model={"lora": {"path": str(adapter)}})
    shutil.rmtree(adapter)
    shutil.rmtree(base)
    export_checkpoint(run, tmp_path / "exported")
    assert_equal(weights(tmp_path / "exported", "adapter_model"), weights(run / "model", "adapter_model"))


def test_adapters_go_with_their_own_base_alone(configure: Configure, base: Path, tmp_path: Path) -> None:
    """A base that was moved is the same; one with other weights is refused, by a resume and by a merge."""
    run = run_sft(configure(**{**LORA, "training": {"steps": 2}, "model": {"path": str(base), **LORA["model"]}})).directory
    moved = base.rename(base.with_name("elsewhere"))
    longer = {**LORA, "training": {"steps": 3}}
    assert run_sft(configure(**{**longer, "model": {"path": str(moved), **LORA["model"]}}), resume=True).step == 3
    model = AutoModelForCausalLM.from_pretrained(moved)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(moved)
    with pytest.raises(CheckpointError, match="adapters of another base model") as caught:
        run_sft(configure(**{**longer, "training": {"steps": 4}, "model": {"path": str(moved), **LORA["model"]}}), resume=True)
    assert "model.path" in caught.value.remedy
    with pytest.raises(CheckpointError, match="adapters of another base model"):
        export_checkpoint(run, tmp_path / "merged", choices=ExportChoices(merge=True, model=str(moved)))
