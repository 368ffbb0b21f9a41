"""Models that cannot be trained are refused in words; those that can come in the right precision."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, LlamaConfig, LlamaForCausalLM, T5Config

from skyrl_engine.contracts.values.model import ComputeDtype, ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.loading import load_causal_lm, load_scorer

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    """A model saved in bfloat16, as most are published."""
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).bfloat16().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("compute", "weights"), [("float32", torch.float32), ("bfloat16", torch.float32), ("float64", torch.float64)]
)
def test_weights_are_kept_in_full_precision(saved_model: Path, compute: ComputeDtype, weights: torch.dtype) -> None:
    model, scorer = load_scorer(ModelConfig(str(saved_model), dtype=compute))
    assert {parameter.dtype for parameter in model.parameters()} == {weights}
    assert scorer.training
    published = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.bfloat16)
    for name, parameter in published.named_parameters():
        assert torch.equal(parameter.to(weights), model.get_parameter(name))


def test_activation_checkpointing_is_on_when_asked(saved_model: Path) -> None:
    for wanted in (False, True):
        model, _ = load_scorer(ModelConfig(str(saved_model), activation_checkpointing=wanted))
        assert model.model.layers[0].gradient_checkpointing is wanted


def catch_refusal(path: Path | str, match: str, **options: bool) -> ModelError:
    with pytest.raises(ModelError, match=match) as caught:
        load_causal_lm(ModelConfig(str(path), **options))
    assert caught.value.exit_code == 4
    assert not caught.value.cause.endswith(".")
    return caught.value


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    assert "model.path" in catch_refusal(tmp_path / "nowhere", "there is no model directory .*nowhere").remedy


class Code:
    """Makes a directory when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_weights_that_are_a_pickle_of_code_are_refused_in_our_words(saved_model: Path) -> None:
    """Torch's own message advises to read such a file with weights_only=False."""
    (saved_model / "model.safetensors").unlink()
    torch.save({"lm_head.weight": torch.zeros(2), "code": Code(saved_model / "trace")}, saved_model / "pytorch_model.bin")
    error = catch_refusal(saved_model, "more than tensors and plain values, which could run code")
    assert not (saved_model / "trace").exists()
    assert "weights_only" not in str(error)
    assert "pytorch_model.bin" in error.cause
    assert "mkdir" in error.cause
    assert "convert this one to safetensors on a machine where you trust it" in error.remedy


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_value_head_in_a_pickle_of_code_is_refused_in_our_words(saved_model: Path) -> None:
    weights = LlamaForCausalLM(CONFIG).state_dict()
    (saved_model / "model.safetensors").unlink()
    torch.save(weights, saved_model / "pytorch_model.bin")
    torch.save({"code": Code(saved_model / "trace")}, saved_model / "pytorch_model_further.bin")
    with pytest.raises(ModelError, match=r"value head .* more than tensors and plain values") as caught:
        load_scorer(ModelConfig(str(saved_model), value_head=True))
    assert not (saved_model / "trace").exists()
    assert "weights_only" not in str(caught.value)


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    catch_refusal(tmp_path, "holds no config.json")


def test_a_broken_configuration(saved_model: Path) -> None:
    (saved_model / "config.json").write_text("{")
    assert "Repair" in catch_refusal(saved_model, r"config\.json is not valid JSON: line 1, column 2").remedy


def test_an_unknown_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert (
        "model.path"
        in catch_refusal("nobody/nothing-of-this-name", "the configuration of nobody/nothing-of-this-name cannot be loaded").remedy
    )


def test_a_model_of_another_kind(tmp_path: Path) -> None:
    T5Config(d_model=8, num_layers=1, num_heads=1).save_pretrained(tmp_path)
    catch_refusal(tmp_path, "is a t5 model, which transformers .* has no causal language model for")


def test_missing_weights_would_be_random(saved_model: Path) -> None:
    weights = load_file(saved_model / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, saved_model / "model.safetensors", metadata={"format": "pt"})
    catch_refusal(saved_model, r"lacks 1 of its weights, model.layers.0.mlp.up_proj.weight first")


def test_no_weights_at_all(saved_model: Path) -> None:
    (saved_model / "model.safetensors").unlink()
    catch_refusal(saved_model, "holds no weights: neither model.safetensors nor its index")


def test_truncated_weights(saved_model: Path) -> None:
    file = saved_model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    catch_refusal(saved_model, r"model\.safetensors is damaged")


def test_pickled_weights_that_are_damaged_are_named(saved_model: Path) -> None:
    (saved_model / "model.safetensors").unlink()
    (saved_model / "pytorch_model.bin").write_bytes(b"abc" * 100)
    catch_refusal(saved_model, r"the weights of .*pytorch_model\.bin cannot be loaded")


def test_weights_of_another_shape(saved_model: Path) -> None:
    config = json.loads((saved_model / "config.json").read_text())
    (saved_model / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    error = catch_refusal(
        saved_model,
        r"mlp\.down_proj\.weight has the shape \[16, 32\] in .*/model\.safetensors, and the model's config\.json asks for \[16, 48\] "
        r"\(3 tensors of other shapes in all\)",
    )
    assert "report" not in str(error)


@pytest.mark.parametrize("shards", [True, False])
def test_the_file_of_a_tensor_of_another_shape_is_named(saved_model: Path, shards: bool) -> None:
    """It is the one of several files that holds the tensor; a pickled file does not say what it holds."""
    weights = load_file(saved_model / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(17)
    (saved_model / "model.safetensors").unlink()
    if shards:
        parts = {"a.safetensors": ["model.norm.weight"], "b.safetensors": [name for name in weights if name != "model.norm.weight"]}
        for file, names in parts.items():
            save_file({name: weights[name] for name in names}, saved_model / file, metadata={"format": "pt"})
        places = {name: file for file, names in parts.items() for name in names}
        (saved_model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    else:
        torch.save(weights, saved_model / "pytorch_model.bin")
    where = "/a.safetensors" if shards else ""
    catch_refusal(
        saved_model,
        rf"model\.norm\.weight has the shape \[17\] in {saved_model}{where}, and the model's config\.json asks for \[16\]\. Put",
    )


def test_quantized_weights(saved_model: Path) -> None:
    config = json.loads((saved_model / "config.json").read_text())
    (saved_model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    catch_refusal(saved_model, "holds quantized weights")


def test_remote_code_needs_permission(saved_model: Path) -> None:
    config = json.loads((saved_model / "config.json").read_text())
    code = {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}, "model_type": "own"}
    (saved_model / "config.json").write_text(json.dumps({**config, **code}))
    assert "model.trust_remote_code = true" in catch_refusal(saved_model, "is computed by Python code of its own").remedy


def test_numbers_of_a_configuration_that_do_not_fit_each_other(tmp_path: Path) -> None:
    """The weights have the right shapes, and the model's own code fails."""
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 16, "n_positions": 32}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gptj", **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"the forward pass of .* \(GPTJForCausalLM\) fails: ") as caught:
        load_scorer(ModelConfig(str(tmp_path)))
    assert "config.json" in caught.value.remedy


def test_a_head_behind_a_transform_is_refused(tmp_path: Path) -> None:
    """BERT's head applies a dense layer and a norm first; training it as decoder and matrix would be training another model."""
    config = BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=True
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="computes logits that differ from its decoder and head"):
        load_scorer(ModelConfig(str(tmp_path)))
