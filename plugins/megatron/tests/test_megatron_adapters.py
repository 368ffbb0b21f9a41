"""Adapters: the same as PEFT's in every layout, trained alone, saved, resumed, merged, and exported for PEFT.

Gradients are compared with plain PEFT in float64, one process and one document at a time, as in test_megatron_gradients.py, at adapters whose
two matrices are both random. megatron-core computes queries, keys and values as one layer, of which each has an adapter of its own.
"""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from by_day import now
from megatron_families import FAMILIES
from megatron_tasks import PAIRS, VOCABULARY, Case, Passed, draw_adapters, run_passes, save_tiny, set_up, start, train_adapters
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import AdamWSettings, LoraConfig, ModelConfig
from skyrl_engine.testing.adapters import with_adapter, write_adapter
from skyrl_engine.testing.backends.batches import DefinedResult, definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.limits import refuse_model
from skyrl_engine_megatron.plugin import MegatronConfig

CASES = [Case("padded", 3), Case("packed", 1, calls=2)]
FUSED = ("phi3", "gemma3", "seed-oss", "arcee")
SOME = ("k_proj", "o_proj", "up_proj")
"""One alone of layers that are computed together, and one of divided inputs."""


@pytest.fixture(scope="module")
def adapters(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    written = {name: write_adapter(models[name], root / name) for name in ("qwen3-tied", "qwen2-untied")}
    some = write_adapter(models["llama-untied"], root / "llama-untied", targets=SOME, rslora=True)
    critic = write_adapter(models["critic"], root / "critic", value_head=True)
    return {**written, "llama-untied": some, "critic": critic}


def check(ranks: list[list[Passed]], due: DefinedResult, tolerance: float = 1e-5) -> None:
    for passed in zip(*ranks, strict=True):
        for rank in passed:
            assert find_worst_difference(rank.gradients, due.gradients) <= tolerance
        collected = [output for rank in passed for output in rank.outputs if output.coords.collects]
        assert sum(output.metrics["loss"].value for output in collected) == pytest.approx(due.loss, rel=max(1e-6, tolerance / 5))


@pytest.mark.parametrize("name", now(["qwen3-tied", "llama-untied", "qwen2-untied"], "llama-untied"))
@pytest.mark.parametrize("layout", now(PAIRS, "tp2", "pp2", "cp2"))
def test_gradients_are_those_of_peft(pair: World, models: dict[str, str], adapters: dict[str, str], layout: str, name: str) -> None:
    due = definition(models[name], documents(VOCABULARY), adapter=adapters[name])
    check(pair.run(run_passes, models[name], PAIRS[layout], CASES, lora=LoraConfig(path=adapters[name])), due)


@pytest.mark.parametrize(
    ("family", "layout"), now([(family, layout) for family in FUSED for layout in ("tp2", "pp2")], ("phi3", "tp2"))
)
def test_layers_of_other_families(pair: World, tmp_path: Path, family: str, layout: str) -> None:
    """phi3's queries, keys and values are one layer in transformers too, with one adapter; arcee has no gate, gemma3 scales embeddings."""
    kind, tied, options = FAMILIES[family]
    model = save_tiny(tmp_path / "model", kind, tied=tied, **options)
    adapter = write_adapter(model, tmp_path / "adapter")
    due = definition(model, documents(VOCABULARY), adapter=adapter)
    check(pair.run(run_passes, model, PAIRS[layout], CASES, lora=LoraConfig(path=adapter), dtype="float64"), due)


@pytest.mark.parametrize(
    ("name", "layout"),
    now(
        [(name, layout) for name in ("qwen2-untied", "qwen3-tied") for layout in PAIRS],
        ("qwen2-untied", "tp2"),
    ),
)
def test_gradients_are_those_of_dora(pair: World, models: dict[str, str], tmp_path: Path, layout: str, name: str) -> None:
    """Qwen2's queries, keys and values have biases, on which magnitudes have no effect."""
    adapter = write_adapter(models[name], tmp_path / "adapter", dora=True)
    due = definition(models[name], documents(VOCABULARY), adapter=adapter)
    assert any("magnitude" in key for key in due.gradients)
    check(pair.run(run_passes, models[name], PAIRS[layout], CASES, lora=LoraConfig(path=adapter), dtype="float64"), due)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["phi3", "arcee"])
def test_dora_of_other_families(pair: World, tmp_path: Path, family: str) -> None:
    kind, tied, options = FAMILIES[family]
    model = save_tiny(tmp_path / "model", kind, tied=tied, **options)
    adapter = write_adapter(model, tmp_path / "adapter", dora=True)
    due = definition(model, documents(VOCABULARY), adapter=adapter)
    check(pair.run(run_passes, model, PAIRS["tp2"], CASES, lora=LoraConfig(path=adapter), dtype="float64"), due)


@pytest.mark.proof
@pytest.mark.parametrize("layout", now(["tp2xpp2", "tp2xcp2", "tp2xdp2"], "tp2xpp2"))
def test_four_ranks(quad: World, models: dict[str, str], adapters: dict[str, str], layout: str) -> None:
    more = {"tp2xpp2": {"pipeline_parallel": 2}, "tp2xcp2": {"context_parallel": 2}, "tp2xdp2": {}}[layout]
    due = definition(models["qwen3-tied"], documents(VOCABULARY), adapter=adapters["qwen3-tied"])
    options = MegatronConfig(tensor_parallel=2, **more)
    check(quad.run(run_passes, models["qwen3-tied"], options, CASES, lora=LoraConfig(path=adapters["qwen3-tied"])), due)


@pytest.mark.parametrize("layout", now(["tp2", "pp2", "cp2"], "tp2"))
def test_recomputed_activations_change_nothing(pair: World, models: dict[str, str], adapters: dict[str, str], layout: str) -> None:
    """The first layer's input, a frozen embedding's output, must take part in the backward pass all the same."""
    due = definition(models["qwen3-tied"], documents(VOCABULARY), adapter=adapters["qwen3-tied"])
    options: dict[str, Any] = {"lora": LoraConfig(path=adapters["qwen3-tied"]), "activation_checkpointing": True}
    check(pair.run(run_passes, models["qwen3-tied"], PAIRS[layout], CASES, **options), due)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_bfloat16_stays_within_its_precision(pair: World, models: dict[str, str], adapters: dict[str, str], layout: str) -> None:
    """As in test_megatron_gradients.py."""
    due = definition(models["qwen3-tied"], documents(VOCABULARY), adapter=adapters["qwen3-tied"])
    options: dict[str, Any] = {"lora": LoraConfig(path=adapters["qwen3-tied"]), "dtype": "bfloat16"}
    check(pair.run(run_passes, models["qwen3-tied"], PAIRS[layout], CASES, **options), due, 1e-1)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_attention_of_a_mixture_of_experts(pair: World, models: dict[str, str], tmp_path: Path, layout: str) -> None:
    """New adapters, of which B alone has a gradient."""
    lora = LoraConfig(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    pair.run(set_up, models["qwen3-moe"], PAIRS[layout], tmp_path, lora=lora)
    due = definition(models["qwen3-moe"], documents(VOCABULARY), adapter=str(tmp_path), dtype=torch.float32).gradients
    for passed in pair.run(run_passes, models["qwen3-moe"], PAIRS[layout], CASES, lora=lora):
        for case in passed:
            assert case.gradients.keys() == due.keys()
            assert not any(gradient.any() for name, gradient in case.gradients.items() if ".lora_A." in name)
            ours, theirs = ({name: each[name] for name in due if ".lora_B." in name} for each in (case.gradients, due))
            assert find_worst_difference(ours, theirs) <= 1e-5


@pytest.mark.parametrize("layout", now(["tp2", "pp2"], "tp2"))
def test_a_value_head_learns_beside_the_adapters(
    pair: World, models: dict[str, str], adapters: dict[str, str], layout: str
) -> None:
    needs = ("logprobs", "values")
    due = definition(models["critic"], documents(VOCABULARY), adapter=adapters["critic"], needs=needs)
    assert {"score.weight", "score.bias"} < due.gradients.keys()
    options: dict[str, Any] = {"lora": LoraConfig(path=adapters["critic"]), "value_head": True}
    check(pair.run(run_passes, models["critic"], PAIRS[layout], [Case(needs=needs)], **options), due)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks transformers for it
def test_new_adapters_are_those_of_peft(pair: World, models: dict[str, str]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(models["qwen3-tied"])
    torch.manual_seed(0)
    plain = get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])).base_model.model
    expected = {name: parameter.detach().numpy() for name, parameter in plain.named_parameters() if parameter.requires_grad}
    for weights in pair.run(
        draw_adapters, models["qwen3-tied"], PAIRS["tp2"], lora=LoraConfig(rank=4, targets=("q_proj", "up_proj"))
    ):
        assert weights.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(weights[name], values, err_msg=name)


@pytest.mark.parametrize("dora", now([False, True], False))
@pytest.mark.parametrize("layout", now(["tp2", "pp2", "cp2", "dp2"], "tp2", "pp2"))
def test_they_are_saved_resumed_merged_and_exported(
    pair: World, models: dict[str, str], tmp_path: Path, layout: str, dora: bool
) -> None:
    """Bit for bit from a checkpoint that holds adapters alone; PEFT loads the export, and merges it to what `weights` gives."""
    name, checkpoint, target = models["llama-untied"], tmp_path / "state", tmp_path / "out"
    checkpoint.mkdir()
    lora, optimizer = (
        LoraConfig(rank=4, alpha=32, targets=("q_proj", "o_proj", "gate_proj"), dora=dora),
        AdamWSettings(learning_rate=1e-2),
    )
    ranks = pair.run(train_adapters, name, PAIRS[layout], optimizer, checkpoint, target, lora)
    before = dict(AutoModelForCausalLM.from_pretrained(name).named_parameters())
    by_peft = definition(name, documents(VOCABULARY), dtype=torch.float32, adapter=str(target))
    for uninterrupted, resumed, output in ranks:
        assert uninterrupted[0] == resumed[0]
        merged = resumed[1]
        assert merged.keys() == before.keys()
        for key, weight in uninterrupted[1].items():
            np.testing.assert_array_equal(weight, merged[key], err_msg=key)
        moved = {key for key, weight in merged.items() if not np.array_equal(weight, before[key].detach().numpy())}
        assert moved == {key for key in merged if any(part in key for part in ("q_proj", "o_proj", "gate_proj"))}
        for place, number in enumerate(output.sample_ids):
            due = by_peft.logprobs.get(int(number), np.zeros(0))
            np.testing.assert_allclose(output.fields["logprobs"][place], due, atol=1e-4)
    stored = {key for file in checkpoint.glob("*.safetensors") for key in load_file(file) if key.startswith("model.")}
    assert stored
    assert all(".lora_" in key for key in stored)
    plain = with_adapter(AutoModelForCausalLM.from_pretrained(name), str(target))
    for module_name, module in plain.named_modules():
        if hasattr(module, "lora_A"):
            module.merge()
            weight = module.base_layer.weight.detach().numpy()
            np.testing.assert_allclose(ranks[0][1][1][f"{module_name}.weight"], weight, rtol=1e-6, atol=1e-7, err_msg=module_name)


@pytest.mark.parametrize(
    ("lora", "model", "cause"),
    [
        (
            LoraConfig(load_in_4bit=True),
            {},
            r"model.lora.load_in_4bit is set, and the adapters of the megatron backend do not have it",
        ),
        (LoraConfig(), {"compile": True}, r"model.compile is set with model.lora"),
    ],
)
def test_what_they_do_not_have_is_refused(models: dict[str, str], lora: LoraConfig, model: dict[str, Any], cause: str) -> None:
    with pytest.raises(UnsupportedError, match=cause):
        refuse_model(
            MegatronConfig(), AutoConfig.from_pretrained(models["qwen3-tied"]), ModelConfig("the model", lora=lora, **model)
        )


def test_shared_key_heads_are_refused(models: dict[str, str]) -> None:
    config = AutoConfig.from_pretrained(models["llama-untied"])
    with pytest.raises(
        UnsupportedError, match="tensor_parallel = 8 divides each of num_key_value_heads = 4 of the model, and adapters"
    ):
        refuse_model(MegatronConfig(tensor_parallel=8), config, ModelConfig("the model", lora=LoraConfig()))


def test_a_stage_without_adapters_is_refused(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    lora = LoraConfig(path=write_adapter(models["llama-untied"], tmp_path, layers=[0]))
    with pytest.raises(UnsupportedError, match="pipeline stage 1 would have no adapter"):
        pair.run(start, models["llama-untied"], options=PAIRS["pp2"], lora=lora)
