"""Tensor parallelism of families by style of their plans: fused projections, norms over all heads, latent attention, experts, embeddings.

Gradients are compared with the float64 definition, per parameter, as ||g - g'|| / ||g'||: in float64, within 1e-10, but where a family
computes a part of itself in float32 whatever its precision, such as a router.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import FAMILIES
from attrs import evolve
from fsdp_layouts import zero_routers
from fsdp_resuming import check_other_layout, check_resume_and_export
from fsdp_tasks import (
    accumulate_gradients,
    count_local_numbers,
    outcome_with,
)
from transformers import AutoConfig

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.engine.model_shape import read_model_shape
from skyrl_engine.model_facts.rank_memory import count_share, read_divided_patterns
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.testing.backends.batches import build_packed, build_padded, definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.layer_styles import refuse_model
from skyrl_engine_fsdp.plugin import FsdpConfig
from skyrl_engine_fsdp.state_layout import describe_state

TP = FsdpConfig(tensor_parallel=2)
BY_DAY = ("phi3", "olmo2", "gpt_neox", "mixtral", "deepseek_v2")
AT_NIGHT = (
    *("codegen", "flex_olmo", "glm", "glm4", "gptj", "granitemoe", "jamba", "minimax", "olmo3", "olmoe", "qwen2_moe", "qwen3_moe"),
    *("deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "hunyuan_v1_moe", "llama4_text", "qwen3_next"),
)
PARTLY_FLOAT32 = ("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe", "qwen3_next")


def write(folder: Path, family: str, **settings: Any) -> str:
    write_model(folder, family, **{**FAMILIES[family], **settings})
    make_parts_differ(folder)
    return str(folder)


@pytest.mark.parametrize("family", [*BY_DAY, *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT)])
def test_gradients_of_a_family_are_the_definitions(pair: World, tmp_path: Path, family: str) -> None:
    directory = write(tmp_path, family)
    due = definition(directory, documents())
    dtype = "float32" if family == "llama4_text" else "float64"
    tolerance = 1e-5 if dtype == "float32" else 1e-6 if family in PARTLY_FLOAT32 else 1e-10
    for _, gradients in pair.run(accumulate_gradients, directory, build_padded, TP, dtype=dtype):
        assert gradients.keys() == due.gradients.keys()
        assert find_worst_difference(gradients, due.gradients) <= tolerance


@pytest.mark.parametrize("family", ["mixtral", pytest.param("deepseek_v2", marks=pytest.mark.nightly)])
def test_experts_are_sharded_over_data_parallel_ranks_too(quad: World, tmp_path: Path, family: str) -> None:
    """In float32, by transformers' grouped products, over packed rows; every rank sees one gradient, bit for bit."""
    directory = write(tmp_path, family)
    due = definition(directory, documents())
    ranks = quad.run(accumulate_gradients, directory, build_packed, TP, rows="packed")
    for _, gradients in ranks:
        assert find_worst_difference(gradients, due.gradients) <= 1e-5
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, ranks[0][1][name], err_msg=name)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_rank_to_whose_experts_no_token_goes_waits_for_nobody(pair: World, tmp_path: Path, dtype: str) -> None:
    """A router of zeros sends every token to the same two experts, which one rank has."""
    directory = write(tmp_path, "mixtral")
    zero_routers(tmp_path)
    due = definition(directory, documents())
    experts = next(gradient for name, gradient in due.gradients.items() if name.endswith("experts.gate_up_proj"))
    assert [bool(expert.any()) for expert in experts] in ([True, True, False, False], [False, False, True, True])
    for _, gradients in pair.run(accumulate_gradients, directory, build_padded, TP, dtype=dtype):
        assert find_worst_difference(gradients, due.gradients) <= (1e-10 if dtype == "float64" else 1e-5)


def test_a_mixture_is_exported_and_resumed(pair: World, tmp_path: Path) -> None:
    check_resume_and_export(pair, write(tmp_path / "model", "mixtral"), tmp_path, TP)


@pytest.mark.parametrize(("wrote", "reads"), [(TP, FsdpConfig()), (FsdpConfig(), TP)], ids=["tp to dp", "dp to tp"])
def test_another_layout_resumes_a_mixture(pair: World, tmp_path: Path, wrote: FsdpConfig, reads: FsdpConfig) -> None:
    """Weights and moments bit for bit: experts are rows of one tensor, whoever holds them."""
    check_other_layout(pair, write(tmp_path / "model", "mixtral"), tmp_path, wrote, reads)


@pytest.mark.parametrize(
    "family", ["deepseek_v2", *(pytest.param(name, marks=pytest.mark.nightly) for name in (*BY_DAY, *AT_NIGHT))]
)
def test_a_rank_holds_the_numbers_that_are_planned(pair: World, tmp_path: Path, family: str) -> None:
    """A plan may leave attention whole, as those of latent attention do."""
    model = ModelConfig(write(tmp_path, family))
    shape = read_model_shape(model)
    assert shape is not None
    topology = TP.topology(2)
    divided = read_divided_patterns(shape, describe_state(TP, topology, model))
    planned = sum(count_share(each, divided, topology) for each in shape.parameters if not each.is_tied)
    assert pair.run(count_local_numbers, model.path, TP) == [planned] * 2


def test_a_latent_projection_whose_rotary_part_is_not_summed_is_noticed_at_load(pair: World, tmp_path: Path) -> None:
    directory = write(tmp_path, "deepseek_v2")
    for message in pair.run(outcome_with, directory, TP, forgotten="kv_a_proj_with_mqa"):
        assert "its ranks get different gradients for model." in message
    for message in pair.run(outcome_with, directory, TP):
        assert message == "set up"


def test_styles_and_numbers_of_experts_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    """Before a rank starts."""
    config, model = AutoConfig.from_pretrained(write(tmp_path, "mixtral", num_experts=3)), ModelConfig(str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"backend\.tensor_parallel = 2 does not divide num_local_experts = 3"):
        refuse_model(2, config, model)
    refuse_model(3, _with(config, num_attention_heads=3, num_key_value_heads=3, intermediate_size=33), model)
    config.base_model_tp_plan = {"embed_tokens": "embedding_rowwise"}
    with pytest.raises(UnsupportedError, match="plan for mixtral models such as it divides the embedding alone"):
        refuse_model(2, config, evolve(model, path="it"))
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "sequence_parallel"}
    with pytest.raises(UnsupportedError, match=r"divide layers\.\*\.mlp\.up_proj by 'sequence_parallel', which is not known here"):
        refuse_model(2, config, evolve(model, path="it"))


def _with(config: Any, **numbers: int) -> Any:
    other = type(config)(**config.to_dict())
    for name, number in numbers.items():
        setattr(other, name, number)
    return other
