"""Adapters in a model: which layers get them, what of an existing one is taken, and what is refused, in words."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft import IA3Config
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.errors import EngineError, ModelError, UnsupportedError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.modeling.exporting import write_pretrained
from skyrl_engine.modeling.loading import load_scorer, load_skeleton
from skyrl_engine.modeling.lora import iterate_merged_weights, list_trained_parameters, write_adapters
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing.adapters import with_adapter, write_adapter

LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("base")
    write_model(path)
    return str(path)


@pytest.fixture(scope="module")
def adapter_folder(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_adapter(base, tmp_path_factory.mktemp("adapters") / "written")


@pytest.fixture
def adapter(adapter_folder: str, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(adapter_folder, tmp_path / "adapter"))


def layers_of(model: Any) -> set[str]:
    return {name.partition(".lora_")[0].removeprefix("model.layers.") for name in list_trained_parameters(model)}


def refusal(spec: ModelConfig) -> tuple[str, str]:
    with pytest.raises(EngineError) as caught:
        load_scorer(spec)
    return caught.value.cause, caught.value.remedy


def change(adapter: Path, **settings: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_all_linear_layers_of_the_decoder_or_those_that_are_named(base: str) -> None:
    everything, _ = load_scorer(ModelConfig(base, lora=LoraConfig()))
    assert {name.rpartition(".")[2] for name in layers_of(everything)} == set(LINEAR)
    assert everything.peft_config["default"].target_modules == set(LINEAR)
    some, _ = load_scorer(ModelConfig(base, lora=LoraConfig(targets=("1.self_attn.q_proj", "gate_proj"))))
    assert layers_of(some) == {"1.self_attn.q_proj", "0.mlp.gate_proj", "1.mlp.gate_proj"}
    assert not any(parameter.requires_grad for name, parameter in some.named_parameters() if ".lora_" not in name)


@pytest.mark.parametrize("targets", [("q_proj", "c_attn"), ("lm_head",), ("embed_tokens",), ("proj",)])
def test_targets_that_are_no_linear_layer_are_refused_with_those_that_are(base: str, targets: tuple[str, ...]) -> None:
    cause, remedy = refusal(ModelConfig(base, lora=LoraConfig(targets=targets)))
    assert cause == f"model.lora.targets names {targets[-1]!r}, which no linear layer of {base}'s decoder is called"
    assert remedy == f'Choose among {", ".join(LINEAR)}, or write model.lora.targets = "all-linear"'


def test_without_peft_the_remedy_installs_it(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UnsupportedError) as caught:
        load_scorer(ModelConfig(base, lora=LoraConfig()))
    assert caught.value.summary == 'model.lora needs the package peft, which is not installed. Run pip install "skyrl-engine[lora]"'
    load_scorer(ModelConfig(base))


def test_a_skeleton_has_the_same_parameters_and_no_values(base: str) -> None:
    spec = ModelConfig(base, lora=LoraConfig(), dtype="bfloat16", value_head=True)
    (whole, _), (skeleton, _) = load_scorer(spec), load_skeleton(spec)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in whole.named_parameters()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in skeleton.named_parameters()
    }
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert {parameter.dtype for parameter in list_trained_parameters(whole).values()} == {torch.float32}
    assert {"score.weight", "score.bias"} < list_trained_parameters(whole).keys()
    assert {parameter.dtype for parameter in whole.parameters() if not parameter.requires_grad} == {torch.bfloat16}


def test_transposed_layers_are_merged_as_peft_merges_them(tmp_path: Path) -> None:
    """GPT-2 keeps its weights as [in, out]."""
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=64)).save_pretrained(tmp_path / "base")
    adapter = write_adapter(str(tmp_path / "base"), tmp_path / "adapter")
    model, _ = load_scorer(ModelConfig(str(tmp_path / "base"), lora=LoraConfig(path=adapter)))
    assert {name.rpartition(".")[2] for name in layers_of(model)} == {"c_attn", "c_fc", "c_proj"}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = dict(iterate_merged_weights(model, lambda parameter: parameter.detach()))
    assert merged.keys() == dict(plain.named_parameters()).keys()
    by_peft = with_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(merged[name])
        ids = torch.arange(10)[None]
        torch.testing.assert_close(plain.eval()(ids).logits, by_peft(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [{"rslora": True}, {"dora": True}, {"dora": True, "rslora": True}], ids=" ".join)
def test_kinds_of_adapters_compute_learn_and_merge_as_in_peft(base: str, tmp_path: Path, kind: dict[str, bool]) -> None:
    """Bit for bit in float64: scores, gradients of matrices and magnitudes, and the weights that a merge gives. Both ways through files."""
    adapter = write_adapter(base, tmp_path / "adapter", **kind)
    ours, _ = load_scorer(ModelConfig(base, dtype="float64", lora=LoraConfig(path=adapter)))
    ours.set_attn_implementation("eager")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    theirs = with_adapter(plain, adapter).double()
    ids = torch.arange(1, 9)[None]
    for model in (ours, theirs):
        model.eval()(input_ids=ids, labels=ids).loss.backward()
    gradients, due = (
        {name: value.grad for name, value in each.named_parameters() if value.requires_grad} for each in (ours, theirs)
    )
    assert gradients.keys() == due.keys()
    assert any("magnitude" in name for name in due) == ("dora" in kind)
    assert all(torch.equal(gradients[name], due[name]) and due[name].abs().max() > 0 for name in due)
    write_pretrained(ours, tmp_path / "again")
    stored, again = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "adapter", tmp_path / "again"))
    assert {name: value.tolist() for name, value in stored.items()} == {name: value.tolist() for name, value in again.items()}
    merged = dict(iterate_merged_weights(ours, lambda parameter: parameter.detach()))
    for module in theirs.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    for name, value in theirs.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(merged[name.replace(".base_layer.", ".")], value), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_adapters_of_dora_start_at_the_norms_of_the_weights_that_are_computed_with(base: str, dtype: Any) -> None:
    model, _ = load_scorer(ModelConfig(base, dtype=dtype, lora=LoraConfig(dora=True)))
    layer = model.model.layers[0].mlp.up_proj
    assert torch.equal(layer.lora_magnitude_vector["default"].weight, torch.linalg.norm(layer.base_layer.weight.float(), dim=1))


def test_an_existing_adapter_brings_its_own_numbers(base: str, adapter: Path, tmp_path: Path) -> None:
    config = LoraConfig(path=str(adapter), rank=4, alpha=8, targets=tuple(LINEAR), dropout=0.25)
    model, _ = load_scorer(ModelConfig(base, lora=config))
    assert model.peft_config["default"].lora_dropout == 0.25
    write_pretrained(model, tmp_path / "again")
    stored, again = (load_file(path / "adapter_model.safetensors") for path in (adapter, tmp_path / "again"))
    assert stored.keys() == again.keys()
    assert all(torch.equal(stored[name], again[name]) for name in stored)
    for key, wrong, has in (
        ("rank", 8, "4"),
        ("alpha", 16, "8"),
        ("dora", True, "false"),
        ("rslora", True, "false"),
        ("targets", ("q_proj",), ", ".join(LINEAR)),
    ):
        cause, remedy = refusal(ModelConfig(base, lora=LoraConfig(**{"path": str(adapter), key: wrong})))
        assert cause == f"model.lora.{key} differs from that of the adapter {adapter}, which is {has}"
        assert remedy == f"Remove model.lora.{key}: an existing adapter brings its own"
    every = ModelConfig(base, lora=LoraConfig(path=str(adapter), targets="all-linear", rslora=False, dora=False))
    assert load_scorer(every)[0].peft_config["default"].r == 4
    change(adapter, target_modules=LINEAR[1:])
    assert refusal(every)[0].startswith(f"model.lora.targets differs from that of the adapter {adapter}, which is {LINEAR[1]}")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"modules_to_save": ["lm_head"], "bias": "all"}, "bias, modules_to_save"),
    ],
)
def test_other_kinds_of_adapters_are_refused(base: str, adapter: Path, settings: dict[str, Any], names: str) -> None:
    change(adapter, **settings)
    cause, _ = refusal(ModelConfig(base, lora=LoraConfig(path=str(adapter))))
    assert cause == f"the adapter {adapter} sets {names}, which LoRA, rsLoRA and DoRA of linear layers do not have"


def test_adapters_of_another_kind_or_model_are_refused(base: str, adapter: Path, tmp_path: Path) -> None:
    IA3Config(target_modules=["q_proj"], feedforward_modules=[]).save_pretrained(tmp_path / "other")
    cause, _ = refusal(ModelConfig(base, lora=LoraConfig(path=str(tmp_path / "other"))))
    assert cause == f"the adapter {tmp_path / 'other'} is of the kind IA3"
    change(adapter, target_modules=["c_attn"])
    assert refusal(ModelConfig(base, lora=LoraConfig(path=str(adapter))))[0].startswith(
        f"the adapter {adapter} does not fit {base}: "
    )
    write_model(tmp_path / "untied", "llama")
    change(adapter, target_modules=["q_proj", "embed_tokens"])
    cause, _ = refusal(ModelConfig(str(tmp_path / "untied"), lora=LoraConfig(path=str(adapter))))
    assert cause == f"the adapter {adapter} changes model.embed_tokens, which is no linear layer of the decoder"
    cause, remedy = refusal(ModelConfig(base, lora=LoraConfig(path=str(tmp_path / "nowhere"))))
    assert cause.startswith(f"the adapter {tmp_path / 'nowhere'} cannot be read: ")
    assert "adapter_config.json" in remedy


def test_tensors_that_are_missing_or_left_over_are_refused(base: str, adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    stored = load_file(path)
    name = min(stored)
    own = name.removeprefix("base_model.model.").replace("lora_A", "lora_A.default")
    shape = list(stored[name].shape)
    spec = ModelConfig(base, lora=LoraConfig(path=str(adapter)))
    for changed, found in (
        ({key: stored[key] for key in stored if key != name}, "nothing"),
        ({**stored, name: stored[name][:, 1:].contiguous()}, f"shape [{shape[0]}, {shape[1] - 1}]"),
    ):
        save_file(changed, path)
        assert refusal(spec)[0] == f"the adapter {adapter} holds {found} for {own}, which has shape {shape}"
    extra = "base_model.model.score.weight"
    save_file({**stored, extra: torch.zeros(1, 4)}, path)
    cause, remedy = refusal(spec)
    assert cause == f"the adapter {adapter} holds {extra}, which {base} has no place for (1 such tensors)"
    assert remedy == "Set model.value_head = true"


def test_a_model_path_that_is_an_adapter_says_where_it_belongs(adapter: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_config(ModelConfig(str(adapter)))
    assert caught.value.remedy == "Set model.path to the adapter's base model and model.lora.path to this directory"


def test_the_file_names_its_base_model_and_layers_alike_in_every_process(base: str, adapter: Path) -> None:
    config = peft.LoraConfig.from_pretrained(str(adapter))
    assert (config.base_model_name_or_path, config.task_type, config.r, config.lora_alpha) == (base, "CAUSAL_LM", 4, 8)
    assert json.loads((adapter / "adapter_config.json").read_text())["target_modules"] == LINEAR
    assert np.isclose(
        load_scorer(ModelConfig(base, lora=LoraConfig(path=str(adapter))))[0].model.layers[0].mlp.up_proj.scaling["default"], 2
    )


MOE = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
OF_SHARED = {
    "deepseek_v3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 4,
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
    },
    "glm4_moe": {"n_group": 1, "topk_group": 1},
    "qwen3_next": {
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "qwen3_moe": {},
    "phimoe": {"num_local_experts": 4},
}
"""The last two share no experts. The router of "phimoe" is a linear layer that returns three tensors."""
PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("family", OF_SHARED)
def test_all_linear_layers_of_a_mixture_are_those_that_peft_adapts_and_the_rest_is_said(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT reads the names of dense projections as the experts': shared experts were refused as an adapter `None`, experts left out unsaid."""
    write_model(tmp_path / "base", family, **MOE, **OF_SHARED[family])
    with caplog.at_level("INFO"):
        model = load_scorer(ModelConfig(str(tmp_path / "base"), lora=LoraConfig(rank=2)))[0]
    adapted = {name.rpartition(".")[2] for name in layers_of(model)}
    assert {"o_proj"} < adapted
    assert not adapted & PROJECTIONS
    [warning] = [each.getMessage() for each in caplog.records if "all-linear" in each.getMessage() and each.levelname == "WARNING"]
    leaves = warning.partition(" leaves frozen ")[2]
    assert "experts.gate_up_proj (" in leaves
    [message] = [each.getMessage() for each in caplog.records if ": adapted are " in each.getMessage()]
    adapts, _, frozen_too = message.partition("; frozen stay ")
    assert "o_proj (" in adapts
    assert leaves.startswith(f"{frozen_too}: ")
    if family not in ("qwen3_moe", "phimoe"):
        assert re.search(r"shared_experts?\.gate_proj \(\d\)", leaves)
    matrices = {name for name, value in model.get_decoder().named_parameters() if value.dim() > 1 and "embed_tokens" not in name}
    frozen = [name for name in matrices if "base_layer" not in name and ".lora_" not in name]
    assert sum(map(int, re.findall(r"\((\d+)\)", leaves))) == len(frozen)

    with torch.no_grad():
        for value in list_trained_parameters(model).values():
            value.normal_(std=0.1)
    write_adapters(model, tmp_path, list_trained_parameters(model))
    read = load_scorer(ModelConfig(str(tmp_path / "base"), lora=LoraConfig(path=str(tmp_path))))[0]
    for name, value in list_trained_parameters(read).items():
        torch.testing.assert_close(value, list_trained_parameters(model)[name], rtol=0, atol=0)
    model.set_attn_implementation("eager")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(plain, tmp_path, is_trainable=True)
    ids = torch.arange(1, 9)[None]
    gradients = []
    for each in (model, again):
        each.eval()
        each(input_ids=ids, labels=ids).loss.backward()
        named = each.named_parameters()
        gradients.append({name.removeprefix("base_model.model."): value.grad for name, value in named if value.requires_grad})
    ours, theirs = gradients
    assert ours.keys() == theirs.keys() == list_trained_parameters(model).keys()
    for name, gradient in ours.items():
        # One computation twice in float32; the experts' sums may run in another order.
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6)
    assert any(gradient.abs().max() > 0 for gradient in ours.values())


def test_a_projection_that_peft_takes_for_the_experts_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "glm4_moe", **MOE, **OF_SHARED["glm4_moe"])
    cause, remedy = refusal(ModelConfig(str(tmp_path), lora=LoraConfig(targets=("q_proj", "up_proj"))))
    assert cause.startswith("model.lora.targets names 'up_proj', which PEFT takes for the experts of")
    assert remedy.startswith("Choose among k_proj, o_proj, q_proj, v_proj, or")


def test_a_dense_model_is_adapted_whole_without_a_warning(base: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        load_scorer(ModelConfig(base, lora=LoraConfig()))
    assert (
        "adapted are down_proj (2), gate_proj (2), k_proj (2), o_proj (2), q_proj (2), up_proj (2), v_proj (2); frozen stay none"
        in caplog.text
    )
    assert not [record for record in caplog.records if record.levelname == "WARNING" and record.name.startswith("skyrl_engine")]
