"""Adapters under ZeRO: trained alone, exact in every stage, saved, resumed in another stage, and exported for PEFT.

Gradients are compared with plain PEFT (one process, one unpadded document at a time, whole logits), per parameter, as ||g - g'|| / ||g'||,
at adapters whose two matrices are both random: of new ones, where B is zero, A has no gradient. Tolerances as in test_deepspeed_gradients.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import rarely
from deepspeed_tasks import arrays, continued, exported, gradients_of, save_after_a_step, scored, start
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyrl_engine.contracts import LoraConfig
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.adapters import with_adapter, write_adapter
from skyrl_engine.testing.backends.batches import DefinedResult, definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World

STAGES = [*(pytest.param(stage, marks=pytest.mark.proof) for stage in (0, 1, 2)), 3]


@pytest.fixture(scope="module")
def adapters(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    adapters = {name: write_adapter(models[name], root / name) for name in ("qwen3", "llama")}
    return {**adapters, "critic": write_adapter(models["critic"], root / "critic", value_head=True)}


@pytest.fixture(scope="module")
def due(models: dict[str, str], adapters: dict[str, str]) -> dict[str, DefinedResult]:
    """The right loss and gradient by model."""
    return {name: definition(models[name], documents(VOCABULARY), adapter=adapter) for name, adapter in adapters.items()}


def check(ranks: Any, due: DefinedResult, tolerance: float) -> None:
    """The ranks' parts of the loss add up, every rank has the adapters' whole gradient, and the step reports its norm."""
    norm = np.sqrt(sum(np.square(gradient.astype(np.float64)).sum() for gradient in due.gradients.values()))
    for parts in zip(*ranks, strict=True):
        assert sum(loss for loss, _, _ in parts) == pytest.approx(due.loss, rel=max(1e-5, tolerance / 5))
        for _, gradients, reported in parts:
            assert find_worst_difference(gradients, due.gradients) <= tolerance
            assert reported == pytest.approx(norm, rel=tolerance)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("name", "rows"), [rarely("qwen3", "padded"), ("llama", "packed")])
def test_two_ranks_equal_plain_peft(
    pair: World, models: dict[str, str], adapters: dict[str, str], due: dict[str, DefinedResult], name: str, rows: str, stage: int
) -> None:
    check(pair.run(gradients_of, models[name], stage, rows=rows, lora=LoraConfig(path=adapters[name])), due[name], 1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_magnitudes_as_plain_peft(pair: World, models: dict[str, str], tmp_path: Path, stage: int) -> None:
    adapter = write_adapter(models["llama"], tmp_path, dora=True)
    expected = definition(models["llama"], documents(VOCABULARY), adapter=adapter)
    assert any("magnitude" in name for name in expected.gradients)
    check(pair.run(gradients_of, models["llama"], stage, rows="packed", lora=LoraConfig(path=adapter)), expected, 1e-5)


@pytest.mark.nightly
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.proof), 3])
def test_one_rank_equals_plain_peft(
    models: dict[str, str], adapters: dict[str, str], due: dict[str, DefinedResult], stage: int
) -> None:
    lora = LoraConfig(path=adapters["qwen3"])
    check([gradients_of(models["qwen3"], stage, lora=lora, activation_checkpointing=True)], due["qwen3"], 1e-5)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_bfloat16_stays_within_its_precision(
    pair: World, models: dict[str, str], adapters: dict[str, str], due: dict[str, DefinedResult], stage: int
) -> None:
    ranks = pair.run(gradients_of, models["llama"], stage, sizes=(2,), lora=LoraConfig(path=adapters["llama"]), dtype="bfloat16")
    check(ranks, due["llama"], 5e-2)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_value_head_learns_beside_the_adapters(pair: World, models: dict[str, str], adapters: dict[str, str], stage: int) -> None:
    """Its gradient is zero where no loss reads the values."""
    lora = LoraConfig(path=adapters["critic"])
    plain = definition(models["critic"], documents(VOCABULARY), adapter=adapters["critic"]).gradients
    for ranks in pair.run(gradients_of, models["critic"], stage, sizes=(2,), value_head=True, lora=lora):
        exported = ranks[0][1]
        assert not exported.pop("score.weight").any()
        assert not exported.pop("score.bias").any()
        assert find_worst_difference(exported, plain) <= 1e-5


@pytest.mark.parametrize(
    ("stage", "later"), [*(pytest.param(*case, marks=pytest.mark.proof) for case in ((0, 0), (2, 1), (1, 3))), (3, 3)]
)
def test_resumed_equals_uninterrupted(pair: World, models: dict[str, str], tmp_path: Path, stage: int, later: int) -> None:
    """With dropout, so that random states count too, and magnitudes; in another stage as well, to float32's rounding."""
    lora = LoraConfig(rank=4, dropout=0.3, targets=("q_proj", "down_proj"), dora=True)
    for uninterrupted, resumed in pair.run(
        continued, models["qwen3"], stage, tmp_path, before=2, after=2, later_stage=later, lora=lora
    ):
        tolerance = 0.0 if stage == later else 1e-5
        np.testing.assert_allclose(np.array(resumed[0]), np.array(uninterrupted[0]), rtol=tolerance)
        for name, values in uninterrupted[1].items():
            np.testing.assert_allclose(resumed[1][name], values, rtol=tolerance, atol=tolerance / 10, err_msg=name)
    names = {name for rank in (0, 1) for name in torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True)["parameters"]}
    assert len(names) == 2 * 2 * 3
    assert all(".lora_" in name for name in names)


@pytest.mark.parametrize("stage", STAGES)
def test_the_export_is_what_peft_loads(pair: World, models: dict[str, str], tmp_path: Path, stage: int) -> None:
    lora = LoraConfig(rank=4, alpha=32, targets=("q_proj", "o_proj"))
    merged = pair.run(exported, models["llama"], stage, tmp_path, lora=lora)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    base = AutoModelForCausalLM.from_pretrained(models["llama"])
    before = {name: parameter.detach().numpy().copy() for name, parameter in base.named_parameters()}
    moved = {name for name, values in merged.items() if not np.array_equal(values, before[name])}
    assert moved == {name for name in before if "q_proj" in name or "o_proj" in name}
    plain = AutoModelForCausalLM.from_pretrained(models["llama"])
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(torch.from_numpy(merged[name]))
        ids = torch.arange(12)[None] % VOCABULARY
        by_peft = with_adapter(base, str(tmp_path)).eval()(input_ids=ids).logits
        torch.testing.assert_close(by_peft, plain.eval()(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("alone")
def test_one_rank_that_only_scores_exports_what_two_have_saved(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    """As `skyrl-engine export` does."""
    lora = LoraConfig(rank=4)
    trained = pair.run(save_after_a_step, models["llama"], 2, tmp_path, lora=lora)[0]
    backend = start(models["llama"], 3, None, lora=lora)
    backend.load(tmp_path)
    for name, values in arrays(backend.weights()).items():
        np.testing.assert_allclose(values, trained[name], rtol=1e-6, atol=1e-8, err_msg=name)
    backend.export(tmp_path / "out")
    backend.close()
    assert len(load_file(tmp_path / "out" / "adapter_model.safetensors")) == 2 * 2 * 7


def test_ranks_that_only_score_divide_adapters_too(
    pair: World, models: dict[str, str], adapters: dict[str, str], due: dict[str, DefinedResult]
) -> None:
    """As for a reference model."""
    parts = pair.run(scored, models["llama"], lora=LoraConfig(path=adapters["llama"]))
    assert sum(loss for loss, _ in parts) == pytest.approx(due["llama"].loss, rel=1e-5)


@pytest.mark.parametrize("lora", [LoraConfig(rank=4), None], ids=["adapters", "all weights"])
def test_ranks_that_only_score_read_a_checkpoint(
    pair: World, models: dict[str, str], tmp_path: Path, lora: LoraConfig | None
) -> None:
    """They hold one part of every weight each; it was written in other parts."""
    trained = pair.run(save_after_a_step, models["llama"], 2, tmp_path, lora=lora)[0]
    for _, weights in pair.run(scored, models["llama"], tmp_path, lora=lora):
        for name, values in trained.items():
            np.testing.assert_allclose(weights[name], values, rtol=1e-6, atol=1e-8, err_msg=name)
