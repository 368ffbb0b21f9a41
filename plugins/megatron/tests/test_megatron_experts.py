"""Mixtures of experts: gradients are those of transformers' model, however experts are held, and checkpoints move between the ways.

Compared in float32, because transformers' experts know no float64. A token whose second and third expert are equally probable could go to
another one in another layout; there is none in this data.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from by_day import now, rarely
from megatron_tasks import (
    VOCABULARY,
    Case,
    continue_training,
    export_weights,
    resume_checkpoint,
    run_passes,
    save_checkpoint,
    save_tiny,
    start,
)
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import AdamWSettings, ModelConfig
from skyrl_engine.testing.backends.batches import DefinedResult, definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron import experts
from skyrl_engine_megatron.experts import MixtureOfExperts
from skyrl_engine_megatron.limits import refuse_model
from skyrl_engine_megatron.plugin import MegatronConfig, megatron

PAIRS = {
    "tp2": MegatronConfig(tensor_parallel=2),
    "ep2": MegatronConfig(tensor_parallel=2, expert_parallel=2),
    "tp2-whole-sequences": MegatronConfig(tensor_parallel=2, sequence_parallel=False),
    "ep2-whole-sequences": MegatronConfig(tensor_parallel=2, expert_parallel=2, sequence_parallel=False),
    "cp2": MegatronConfig(context_parallel=2),
    "pp2": MegatronConfig(pipeline_parallel=2),
    "dp2": MegatronConfig(),
    "ep2-of-dp2": MegatronConfig(expert_parallel=2),
    "ep2-of-dp2-whole-optimizer": MegatronConfig(expert_parallel=2, distributed_optimizer=False),
    "ep2-of-cp2": MegatronConfig(context_parallel=2, expert_parallel=2),
}
QUADS = {
    "ep2xdp2": MegatronConfig(tensor_parallel=2, expert_parallel=2),
    "ep2xpp2": MegatronConfig(tensor_parallel=2, expert_parallel=2, pipeline_parallel=2),
    "ep2xcp2": MegatronConfig(tensor_parallel=2, expert_parallel=2, context_parallel=2),
    "ep2-of-dp4": MegatronConfig(expert_parallel=2),
    "ep2-of-dp2xpp2": MegatronConfig(expert_parallel=2, pipeline_parallel=2, virtual_pipeline=2),
}
CUTS = [Case(rows, size, calls=2) for rows in ("padded", "packed") for size in (1, 3)]


@pytest.fixture(scope="module")
def truth(models: dict[str, str]) -> DefinedResult:
    return definition(models["qwen3-moe"], documents(VOCABULARY), dtype=torch.float32)


@pytest.mark.parametrize("layout", now(PAIRS, "ep2"))
def test_two_ranks(pair: World, models: dict[str, str], truth: DefinedResult, layout: str) -> None:
    for rank in pair.run(run_passes, models["qwen3-moe"], PAIRS[layout], CUTS):
        for case in rank:
            assert find_worst_difference(case.gradients, truth.gradients) <= 1e-5


@pytest.mark.proof
@pytest.mark.parametrize("layout", now(QUADS, "ep2xpp2"))
def test_four_ranks(quad: World, models: dict[str, str], truth: DefinedResult, layout: str) -> None:
    for rank in quad.run(run_passes, models["qwen3-moe"], QUADS[layout], CUTS):
        for case in rank:
            assert find_worst_difference(case.gradients, truth.gradients) <= 1e-5


@pytest.mark.nightly
def test_ranks_of_different_tokens_that_hold_four_blocks_of_experts(quad: World, tmp_path: Path) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
    directory = save_tiny(tmp_path, "qwen3_moe", tied=False, **sizes)
    truth = definition(directory, documents(VOCABULARY), dtype=torch.float32)
    options = MegatronConfig(tensor_parallel=2, expert_parallel=4)
    for rank in quad.run(run_passes, directory, options, CUTS):
        for case in rank:
            assert find_worst_difference(case.gradients, truth.gradients) <= 1e-5


@pytest.mark.parametrize("layout", now(["ep2", "tp2"], "ep2"))
def test_recomputed_activations_change_nothing(pair: World, models: dict[str, str], truth: DefinedResult, layout: str) -> None:
    ranks = pair.run(run_passes, models["qwen3-moe"], PAIRS[layout], [Case("packed")], activation_checkpointing=True)
    assert all(find_worst_difference(case.gradients, truth.gradients) <= 1e-5 for (case,) in ranks)


@pytest.mark.usefixtures("alone")
def test_weights_that_do_not_add_up_to_one(tmp_path: Path) -> None:
    sizes = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    directory = save_tiny(tmp_path, "qwen3_moe", tied=True, norm_topk_prob=False, **sizes)
    (case,) = run_passes(directory, MegatronConfig(), [Case("packed")])
    assert (
        find_worst_difference(case.gradients, definition(directory, documents(VOCABULARY), dtype=torch.float32).gradients) <= 1e-5
    )


def test_widths_that_the_grouped_product_does_not_take(pair: World, tmp_path: Path) -> None:
    """Rows of 10 float32 numbers, a rank's columns of an expert of 20, are no multiple of 16 bytes."""
    assert not experts._takes_groups(torch.zeros(3, 32), torch.zeros(4, 32, 10))
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    directory = save_tiny(tmp_path, "qwen3_moe", tied=False, norm_topk_prob=True, **sizes)
    truth = definition(directory, documents(VOCABULARY), dtype=torch.float32)
    for (case,) in pair.run(run_passes, directory, PAIRS["tp2"], [Case("packed")]):
        assert find_worst_difference(case.gradients, truth.gradients) <= 1e-5


@pytest.mark.usefixtures("alone")
def test_numbers_of_tokens_stay_on_the_device(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing between routing and the sum of outputs becomes a number of Python's, which would wait for a GPU in every layer."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the host waits for the device")

    right = MixtureOfExperts._run_experts

    def watched(self: MixtureOfExperts, *tensors: torch.Tensor) -> torch.Tensor:
        with monkeypatch.context() as context:
            for name in ("tolist", "item", "nonzero", "bincount", "cpu", "__bool__", "__int__", "__float__", "__index__"):
                context.setattr(torch.Tensor, name, refuse)
            return right(self, *tensors)

    monkeypatch.setattr(MixtureOfExperts, "_run_experts", watched)
    (case,) = run_passes(models["qwen3-moe"], MegatronConfig(), [Case("packed")])
    assert case.gradients


@pytest.mark.proof
@pytest.mark.parametrize(
    ("wrote", "reads"),
    [("tp2", "ep2"), *(rarely(*each) for each in (("ep2-of-dp2", "tp2"), ("tp2", "ep2-of-dp2-whole-optimizer")))],
)
def test_checkpoints_move_between_the_ways_to_hold_experts(
    pair: World, models: dict[str, str], tmp_path: Path, wrote: str, reads: str
) -> None:
    """From columns of every expert to whole experts and back; an epsilon as large as the gradients makes steps follow them.

    Gradients are clipped, by a norm in which each expert counts once.
    """
    smooth = AdamWSettings(learning_rate=1e-2, epsilon=1.0, weight_decay=0.1, max_grad_norm=1.0)
    expected = pair.run(save_checkpoint, models["qwen3-moe"], PAIRS[wrote], smooth, tmp_path, before=2, after=2)[0]
    for history, weights in pair.run(resume_checkpoint, models["qwen3-moe"], PAIRS[reads], smooth, tmp_path, after=2):
        assert find_worst_difference(weights, expected[1]) <= 1e-6
        assert [norm for _, norm, _ in history] == pytest.approx([norm for _, norm, _ in expected[0]], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["ep2-of-dp2", "ep2-of-dp2-whole-optimizer"])
def test_experts_of_other_ranks_are_saved_and_exported(pair: World, models: dict[str, str], tmp_path: Path, layout: str) -> None:
    options = PAIRS[layout]
    for uninterrupted, resumed in pair.run(
        continue_training, models["qwen3-moe"], options, AdamWSettings(learning_rate=1e-3), tmp_path, before=2, after=2
    ):
        assert resumed[0] == uninterrupted[0]
        assert all((resumed[1][name] == weight).all() for name, weight in uninterrupted[1].items())
    (weights, _), _ = pair.run(export_weights, models["qwen3-moe"], options, tmp_path / "export")
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, tensor in exported.state_dict().items():
        assert (tensor.numpy() == weights[name]).all(), name


@pytest.mark.parametrize(
    ("options", "ranks", "cause"),
    [
        ({"tensor_parallel": 4, "expert_parallel": 2}, 8, "expert_parallel = 2 is no multiple of tensor_parallel = 4"),
        ({"expert_parallel": 4}, 2, "expert_parallel = 4 does not divide the 2 ranks of a pipeline stage"),
        ({"expert_parallel": 4, "pipeline_parallel": 4}, 8, "expert_parallel = 4 does not divide the 2 ranks of a pipeline stage"),
    ],
)
def test_expert_parallel_ranks_that_cannot_be_are_refused(options: dict[str, int], ranks: int, cause: str) -> None:
    with pytest.raises(UnsupportedError, match=cause):
        megatron.skyrl_engine_describe_backend(MegatronConfig(**options), ranks)


@pytest.mark.parametrize(
    ("sizes", "options", "cause"),
    [
        (
            {"num_experts": 5},
            {"tensor_parallel": 2, "expert_parallel": 2},
            "expert_parallel = 2 does not divide num_experts = 5 of the model",
        ),
        (
            {"moe_intermediate_size": 25},
            {"tensor_parallel": 2},
            "tensor_parallel = 2 does not divide moe_intermediate_size = 25 of the model",
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(
    models: dict[str, str], sizes: dict[str, int], options: dict[str, Any], cause: str
) -> None:
    config = AutoConfig.from_pretrained(models["qwen3-moe"], **sizes)
    with pytest.raises(UnsupportedError, match=cause):
        refuse_model(MegatronConfig(**options), config, ModelConfig("the model"))


@pytest.mark.usefixtures("alone")
def test_experts_in_float64_are_refused(models: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match="is a mixture of experts, which transformers does not compute in float64"):
        start(models["qwen3-moe"], dtype="float64")
