"""Adapters on the backend: the same on every rank, trained alone, exact, saved, resumed, and exported for PEFT.

Gradients are compared with plain PEFT (one process, one unpadded document at a time, whole logits), per parameter, as ||g - g'|| / ||g'||,
at adapters whose two matrices are both random: of new ones, where B is zero, A has no gradient. Tolerances as in test_fsdp_gradients.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from architectures import FAMILIES
from attrs import evolve
from fsdp_lora_tasks import (
    continue_training,
    draw_adapters,
    export_adapters,
    export_alone,
    gradients_of,
    list_dtypes,
    save_adapters,
)
from peft import get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyrl_engine.contracts import LoraConfig
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.testing.adapters import with_adapter, write_adapter
from skyrl_engine.testing.backends.batches import DefinedResult, definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.plugin import FsdpConfig

ALL_BUT_HEAD = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
NAMES = ("qwen3-tied", "llama-untied")
TP = FsdpConfig(tensor_parallel=2)


@pytest.fixture(scope="module")
def adapters(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    written = {name: write_adapter(models[name], root / name) for name in NAMES}
    return {**written, "dora": write_adapter(models["llama-untied"], root / "dora", dora=True)}


@pytest.fixture(scope="module")
def due(models: dict[str, str], adapters: dict[str, str]) -> dict[str, DefinedResult]:
    """The right loss and gradient by model."""
    return {name: definition(models[name], documents(), adapter=adapters[name]) for name in NAMES}


def test_two_ranks_train_magnitudes_as_plain_peft(pair: World, models: dict[str, str], adapters: dict[str, str]) -> None:
    """A layer's norms are of whole weights, which sharding gathers; in bfloat16 of rounded ones."""
    expected = definition(models["llama-untied"], documents(), adapter=adapters["dora"])
    assert sum("magnitude" in name for name in expected.gradients) == 2 * 7
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 5e-2)):
        lora = LoraConfig(path=adapters["dora"])
        ranks = pair.run(gradients_of, models["llama-untied"], rows="packed", sizes=(1, 3), lora=lora, dtype=dtype)
        check(ranks, expected, tolerance)


def norm(gradients: dict[str, Any]) -> float:
    return float(np.sqrt(sum(np.square(gradient.astype(np.float64)).sum() for gradient in gradients.values())))


def check(ranks: Any, due: DefinedResult, tolerance: float) -> None:
    """The ranks' parts of the loss add up, every rank has the adapters' whole gradient, and the step reports its norm."""
    for parts in zip(*ranks, strict=True):
        assert sum(loss for loss, _, _ in parts) == pytest.approx(due.loss, rel=max(1e-5, tolerance / 5))
        for _, gradients, reported in parts:
            assert find_worst_difference(gradients, due.gradients) <= tolerance
            assert reported == pytest.approx(norm(due.gradients), rel=tolerance)


@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [
        *((name, rows, {}) for name in NAMES for rows in ("padded", "packed")),
        ("qwen3-tied", "packed", {"activation_checkpointing": True}),
        ("llama-untied", "padded", {"options": FsdpConfig(reshard_after_forward=False)}),
    ],
)
def test_two_ranks_equal_plain_peft(
    pair: World, models: dict[str, str], adapters: dict[str, str], due: dict[str, DefinedResult], name: str, rows: str, options: Any
) -> None:
    lora = LoraConfig(path=adapters[name])
    check(pair.run(gradients_of, models[name], rows=rows, sizes=(1, 3), lora=lora, **options), due[name], 1e-5)


@pytest.mark.proof
def test_copies_of_shards_equal_plain_peft(
    quad: World, models: dict[str, str], adapters: dict[str, str], due: dict[str, DefinedResult]
) -> None:
    """Two copies of two shards; in bfloat16 frozen weights and adapters share a unit in two precisions."""
    name, copies = "llama-untied", FsdpConfig(replicate=2)
    lora = LoraConfig(path=adapters[name])
    check(quad.run(gradients_of, models[name], rows="packed", sizes=(2,), lora=lora, options=copies), due[name], 1e-5)
    check(quad.run(gradients_of, models[name], sizes=(2,), lora=lora, options=copies, dtype="bfloat16"), due[name], 5e-2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("name", "rows"), [("qwen3-tied", "padded"), ("llama-untied", "packed")])
def test_one_rank_equals_plain_peft(
    models: dict[str, str], adapters: dict[str, str], due: dict[str, DefinedResult], name: str, rows: str
) -> None:
    lora = LoraConfig(path=adapters[name])
    check([gradients_of(models[name], rows=rows, sizes=(2, 8), lora=lora)], due[name], 1e-5)
    check([gradients_of(models[name], rows=rows, sizes=(3,), lora=lora, dtype="float64")], due[name], 1e-10)


def test_bfloat16_keeps_adapters_in_float32_and_what_is_frozen_in_bfloat16(
    pair: World, models: dict[str, str], adapters: dict[str, str], due: dict[str, DefinedResult]
) -> None:
    name, lora = "llama-untied", LoraConfig(path=adapters["llama-untied"])
    check(pair.run(gradients_of, models[name], sizes=(2,), lora=lora, dtype="bfloat16"), due[name], 5e-2)
    assert pair.run(list_dtypes, models[name], lora=lora, dtype="bfloat16") == [({torch.bfloat16}, {torch.float32})] * 2
    assert pair.run(list_dtypes, models[name], lora=lora) == [({torch.float32}, {torch.float32})] * 2


def test_layers_without_adapters_and_ranks_without_scored_tokens_take_part(
    pair: World, models: dict[str, str], tmp_path: Path
) -> None:
    """The first layer is a unit with nothing to train; the second rank's documents carry no loss."""
    adapter = write_adapter(models["llama-untied"], tmp_path, layers=[1])
    unscored = (1, 3, 5, 7)
    reference = definition(models["llama-untied"], documents(unscored=unscored), adapter=adapter)
    assert {name.partition(".self_attn")[0].partition(".mlp")[0] for name in reference.gradients} == {"model.layers.1"}
    ranks = pair.run(gradients_of, models["llama-untied"], sizes=(1, 4), unscored=unscored, lora=LoraConfig(path=adapter))
    check(ranks, reference, 1e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks transformers for it
def test_new_adapters_are_those_of_peft_on_every_rank(pair: World, models: dict[str, str]) -> None:
    lora = LoraConfig(rank=4, targets=("q_proj", "up_proj"))
    plain = AutoModelForCausalLM.from_pretrained(models["qwen3-tied"])
    torch.manual_seed(11)
    plain = get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])).base_model.model
    expected = {name: parameter.detach().numpy() for name, parameter in plain.named_parameters() if parameter.requires_grad}
    results = pair.run(draw_adapters, models["qwen3-tied"], lora=lora, seed=11)
    for weights, following in results:
        assert weights.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(weights[name], values, err_msg=name)
            assert bool(values.any()) == (".lora_A." in name)
        assert following == pair.run(draw_adapters, models["qwen3-tied"])[0][1], "making adapters moved the random state"
    other_weights = pair.run(draw_adapters, models["qwen3-tied"], lora=lora, seed=12)[0][0]
    assert not any(np.array_equal(other_weights[name], values) for name, values in expected.items() if ".lora_A." in name)


@pytest.mark.usefixtures("alone")
def test_one_rank_draws_the_same(pair: World, models: dict[str, str]) -> None:
    lora = LoraConfig()
    (two, _), (of_one_rank, _) = (
        pair.run(draw_adapters, models["llama-untied"], lora=lora, seed=3)[1],
        draw_adapters(models["llama-untied"], lora=lora, seed=3),
    )
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in of_one_rank} == ALL_BUT_HEAD
    for name, values in of_one_rank.items():
        np.testing.assert_array_equal(values, two[name], err_msg=name)


def test_resumed_equals_uninterrupted_and_holds_adapters_alone(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    """With dropout, so that random states count too, and magnitudes."""
    lora = LoraConfig(rank=4, dropout=0.3, targets=("q_proj", "down_proj"), dora=True)
    for uninterrupted, resumed, entries, optimized in pair.run(continue_training, models["qwen3-tied"], tmp_path, lora=lora):
        assert uninterrupted[0] == resumed[0]
        for name, values in uninterrupted[1].items():
            np.testing.assert_array_equal(values, resumed[1][name], err_msg=name)
        weights = [entry.removeprefix("model.") for entry in entries if entry.startswith("model.")]
        assert sorted(weights) == sorted(resumed[1])
        assert optimized == len(weights) == 2 * 2 * 3


def test_the_export_is_what_peft_loads_and_the_next_run_starts_from(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    name, before = "llama-untied", dict(AutoModelForCausalLM.from_pretrained(models["llama-untied"]).named_parameters())
    lora = LoraConfig(rank=4, alpha=32, targets=("q_proj", "o_proj"))
    ranks = pair.run(export_adapters, models[name], tmp_path, lora=lora)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    by_peft = definition(models[name], documents(), dtype=torch.float32, adapter=str(tmp_path))
    for merged, logprobs, _ in ranks:
        for number, values in logprobs.items():
            if len(values):
                np.testing.assert_allclose(values, by_peft.logprobs[number], rtol=1e-5, atol=1e-6)
        assert merged.keys() == before.keys()
        moved = {name for name, values in merged.items() if not np.array_equal(values, before[name].detach().numpy())}
        assert moved == {name for name in merged if "q_proj" in name or "o_proj" in name}
    plain = with_adapter(AutoModelForCausalLM.from_pretrained(models[name]), str(tmp_path))
    for module in plain.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    for parameter_name, parameter in plain.named_parameters():
        if ".lora_" not in parameter_name:
            merged = ranks[1][0][parameter_name.replace(".base_layer.", ".")]
            np.testing.assert_allclose(merged, parameter.detach().numpy(), rtol=1e-6, atol=1e-7, err_msg=parameter_name)
    again = pair.run(draw_adapters, models[name], lora=LoraConfig(path=str(tmp_path)))
    for (weights, _), (_, _, adapters) in zip(again, ranks, strict=True):
        assert weights.keys() == adapters.keys()
        for parameter_name, values in adapters.items():
            np.testing.assert_array_equal(weights[parameter_name], values, err_msg=parameter_name)


@pytest.mark.usefixtures("alone")
def test_one_rank_that_only_scores_exports_what_two_have_saved(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    lora = LoraConfig(rank=4)
    adapters = pair.run(save_adapters, models["qwen3-tied"], tmp_path, lora=lora)[0]
    exported = export_alone(models["qwen3-tied"], tmp_path, tmp_path / "out", lora=lora)
    for name, values in adapters.items():
        np.testing.assert_array_equal(exported[name], values, err_msg=name)
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert set(stored) == {"base_model.model." + name.replace(".default", "") for name in adapters}


def test_a_value_head_learns_beside_the_adapters(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    write_adapter(models["critic"], tmp_path, value_head=True)
    needs = ("logprobs", "values")
    reference = definition(models["critic"], documents(), adapter=str(tmp_path), needs=needs)
    lora = LoraConfig(path=str(tmp_path))
    ranks = pair.run(gradients_of, models["critic"], sizes=(1, 4), needs=needs, value_head=True, lora=lora)
    assert {"score.weight", "score.bias"} < reference.gradients.keys()
    check(ranks, reference, 1e-5)


@pytest.mark.parametrize("name", ["qwen3-tied", pytest.param("llama-untied", marks=pytest.mark.nightly)])
def test_tensor_parallel_ranks_equal_plain_peft(
    pair: World, models: dict[str, str], adapters: dict[str, str], due: dict[str, DefinedResult], name: str
) -> None:
    """In float64, for adapters of all linear layers: of each one matrix is divided, or none where its layer is whole."""
    lora = LoraConfig(path=adapters[name])
    ranks = pair.run(gradients_of, models[name], rows="packed", sizes=(1, 3), lora=lora, dtype="float64", options=TP)
    for parts in ranks:
        for loss, gradients, reported in parts:
            assert loss == pytest.approx(due[name].loss, rel=1e-10)
            assert find_worst_difference(gradients, due[name].gradients) <= 1e-10
            assert reported == pytest.approx(norm(due[name].gradients), rel=1e-10)
    for (_, mine, _), (_, theirs, _) in zip(*ranks, strict=True):
        for key, gradient in mine.items():
            np.testing.assert_array_equal(gradient, theirs[key], err_msg=key)


def test_shards_of_tensor_parallel_ranks_equal_plain_peft(
    quad: World, models: dict[str, str], adapters: dict[str, str], due: dict[str, DefinedResult]
) -> None:
    ranks = quad.run(gradients_of, models["llama-untied"], sizes=(2,), lora=LoraConfig(path=adapters["llama-untied"]), options=TP)
    for ((_, gradients, reported),) in ranks:
        assert find_worst_difference(gradients, due["llama-untied"].gradients) <= 1e-5
        assert reported == pytest.approx(norm(due["llama-untied"].gradients), rel=1e-5)


@pytest.mark.parametrize("family", ["olmo2", pytest.param("phi3", marks=pytest.mark.nightly)])
def test_adapters_of_layers_whose_outputs_are_gathered_equal_plain_peft(pair: World, tmp_path: Path, family: str) -> None:
    write_model(tmp_path / "model", family, **FAMILIES[family])
    make_parts_differ(tmp_path / "model")
    directory = str(tmp_path / "model")
    adapter = write_adapter(directory, tmp_path / "adapter")
    expected = definition(directory, documents(), adapter=adapter)
    ranks = pair.run(gradients_of, directory, sizes=(2,), lora=LoraConfig(path=adapter), dtype="float64", options=TP)
    for ((_, gradients, _),) in ranks:
        assert find_worst_difference(gradients, expected.gradients) <= 1e-10


def test_adapters_beside_experts_and_of_a_latent_projection_equal_those_of_data_parallel_ranks(pair: World, tmp_path: Path) -> None:
    """Both matrices are whole of layers that every rank holds whole; new adapters have B of zeros, and so A no gradient."""
    write_model(tmp_path, "deepseek_v2", **FAMILIES["deepseek_v2"])
    make_parts_differ(tmp_path)
    lora = LoraConfig(targets=("kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
    whole, divided = (
        pair.run(gradients_of, str(tmp_path), sizes=(2,), lora=lora, dtype="float64", options=options)
        for options in (FsdpConfig(), TP)
    )
    due = {name: gradient for name, gradient in whole[0][0][1].items() if gradient.any()}
    assert len(due) == len(whole[0][0][1]) / 2
    for ((_, gradients, _),) in divided:
        assert find_worst_difference({name: gradient for name, gradient in gradients.items() if gradient.any()}, due) <= 1e-6


def test_tensor_parallel_ranks_draw_resume_and_export_as_one_does(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    """New adapters are those of one rank; saved and resumed equals uninterrupted, with dropout; PEFT loads the export."""
    name, lora = "llama-untied", LoraConfig(rank=4, dropout=0.3, targets=("q_proj", "down_proj"))
    draws = [pair.run(draw_adapters, models[name], lora=lora, seed=3, options=options)[0][0] for options in (TP, FsdpConfig())]
    assert draws[0].keys() == draws[1].keys()
    for key, values in draws[0].items():
        np.testing.assert_array_equal(values, draws[1][key], err_msg=key)
    (tmp_path / "checkpoint").mkdir()
    for uninterrupted, resumed, entries, _ in pair.run(
        continue_training, models[name], tmp_path / "checkpoint", lora=lora, options=TP
    ):
        assert uninterrupted[0] == resumed[0]
        for key, values in uninterrupted[1].items():
            np.testing.assert_array_equal(values, resumed[1][key], err_msg=key)
        assert sorted(entry.removeprefix("model.") for entry in entries if entry.startswith("model.")) == sorted(resumed[1])
    exported, lora = tmp_path / "export", evolve(lora, dropout=0.0)
    ranks = pair.run(export_adapters, models[name], exported, lora=lora, options=TP)
    by_peft = definition(models[name], documents(), dtype=torch.float32, adapter=str(exported))
    for _, logprobs, _ in ranks:
        for number, values in logprobs.items():
            if len(values):
                np.testing.assert_allclose(values, by_peft.logprobs[number], rtol=1e-5, atol=1e-6)
    stored = load_file(exported / "adapter_model.safetensors")
    assert set(stored) == {"base_model.model." + key.replace(".default", "") for key in ranks[0][2]}
    again = pair.run(draw_adapters, models[name], lora=LoraConfig(path=str(exported)))
    for key, values in ranks[0][2].items():
        np.testing.assert_array_equal(again[0][0][key], values, err_msg=key)


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("olmo2", "phi3"))])
def test_tensor_parallel_ranks_train_magnitudes_as_plain_peft(pair: World, tmp_path: Path, family: str) -> None:
    """In float64, with biases where the family has them: rows of divided outputs, of gathered ones, and of divided inputs."""
    settings = {"attention_bias": True, "mlp_bias": True} if family == "llama" else FAMILIES[family]
    write_model(tmp_path / "model", family, **settings)
    make_parts_differ(tmp_path / "model")
    directory = str(tmp_path / "model")
    adapter = write_adapter(directory, tmp_path / "adapter", dora=True)
    expected = definition(directory, documents(), adapter=adapter)
    lora = LoraConfig(path=adapter)
    ranks = pair.run(gradients_of, directory, rows="packed", sizes=(1, 3), lora=lora, dtype="float64", options=TP)
    for parts in ranks:
        for loss, gradients, reported in parts:
            assert loss == pytest.approx(expected.loss, rel=1e-10)
            assert find_worst_difference(gradients, expected.gradients) <= 1e-10
            assert reported == pytest.approx(norm(expected.gradients), rel=1e-10)


@pytest.mark.nightly
def test_magnitudes_are_drawn_resumed_and_exported_on_tensor_parallel_ranks(
    quad: World, models: dict[str, str], tmp_path: Path
) -> None:
    """With dropout, on shards of tensor-parallel ranks; new magnitudes are the norms of whole rows, and PEFT loads the export."""
    name, lora = "llama-untied", LoraConfig(rank=4, dropout=0.3, targets=("q_proj", "down_proj"), dora=True)
    draws = [quad.run(draw_adapters, models[name], lora=lora, seed=3, options=options)[0][0] for options in (TP, FsdpConfig())]
    for key, values in draws[0].items():
        np.testing.assert_array_equal(values, draws[1][key], err_msg=key)
    (tmp_path / "checkpoint").mkdir()
    for uninterrupted, resumed, _, _ in quad.run(continue_training, models[name], tmp_path / "checkpoint", lora=lora, options=TP):
        assert uninterrupted[0] == resumed[0]
        for key, values in uninterrupted[1].items():
            np.testing.assert_array_equal(values, resumed[1][key], err_msg=key)
    exported = tmp_path / "export"
    ranks = quad.run(export_adapters, models[name], exported, lora=evolve(lora, dropout=0.0), options=TP)
    by_peft = definition(models[name], documents(), dtype=torch.float32, adapter=str(exported))
    for _, logprobs, _ in ranks:
        for number, values in logprobs.items():
            if len(values):
                np.testing.assert_allclose(values, by_peft.logprobs[number], rtol=1e-5, atol=1e-6)
