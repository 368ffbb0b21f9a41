"""Mixtures of experts: gradients are those of transformers' model, however experts are held, and checkpoints move between the ways.

Compared in float32, because transformers' experts know no float64. A token whose second and third expert are equally probable could go to
another one in another layout; there is none in this data.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from by_day import now
from megatron_tasks import VOCABULARY, Case, resume_checkpoint, run_passes, save_checkpoint, save_tiny, start
from transformers import AutoConfig

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import AdamWSettings, ModelConfig
from skyrl_engine.testing.backends.batches import DefinedResult, definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
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
}
QUADS = {
    "ep2xdp2": MegatronConfig(tensor_parallel=2, expert_parallel=2),
    "ep2xpp2": MegatronConfig(tensor_parallel=2, expert_parallel=2, pipeline_parallel=2),
    "ep2xcp2": MegatronConfig(tensor_parallel=2, expert_parallel=2, context_parallel=2),
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


@pytest.mark.proof
def test_checkpoints_move_between_the_ways_to_hold_experts(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    """From columns of every expert to whole experts; an epsilon as large as the gradients makes steps follow them."""
    smooth = AdamWSettings(learning_rate=1e-2, epsilon=1.0, weight_decay=0.1)
    expected = pair.run(save_checkpoint, models["qwen3-moe"], PAIRS["tp2"], smooth, tmp_path, before=2, after=2)[0][1]
    for _, weights in pair.run(resume_checkpoint, models["qwen3-moe"], PAIRS["ep2"], smooth, tmp_path, after=2):
        assert find_worst_difference(weights, expected) <= 1e-5


def test_expert_parallel_ranks_are_the_tensor_parallel_ones() -> None:
    with pytest.raises(UnsupportedError, match="expert_parallel = 4: tensor-parallel ranks hold the experts, and there are 2"):
        megatron.skyrl_engine_describe_backend(MegatronConfig(tensor_parallel=2, expert_parallel=4), 8)


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
