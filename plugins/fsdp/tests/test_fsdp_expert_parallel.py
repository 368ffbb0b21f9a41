"""Experts that data-parallel and context-parallel ranks share: gradients are the definition's, whoever holds the experts of a token.

Gradients are compared with the float64 definition, per parameter, as ||g - g'|| / ||g'||.
"""

from pathlib import Path
from typing import Any

import pytest
from architectures import FAMILIES
from fsdp_layouts import require_definition, zero_routers
from fsdp_lora_tasks import gradients_of
from fsdp_resuming import check_other_layout, check_resume_and_export
from fsdp_tasks import accumulate_gradients
from test_fsdp_adapter_sets import train_sharing
from transformers import AutoConfig

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import LoraConfig, ModelConfig
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.testing.backends.batches import build_packed, build_padded, definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.layer_styles import SHARED_EXPERTS
from skyrl_engine_fsdp.plugin import FsdpConfig, fsdp

EP = FsdpConfig(expert_parallel=2)
PARTLY_FLOAT32 = ("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe")
LAYOUTS = {
    "two shards of ep2": EP,
    "ep4": FsdpConfig(expert_parallel=4),
    "cp2 x ep2": FsdpConfig(expert_parallel=2, context_parallel=2),
    "once a pass": FsdpConfig(expert_parallel=2, gradient_sync="pass"),
    "two copies of ep2": FsdpConfig(expert_parallel=2, replicate=2),
    "tp2 x ep2": FsdpConfig(expert_parallel=2, tensor_parallel=2),
}


def write(folder: Path, family: str, **settings: Any) -> str:
    write_model(folder, family, **{**FAMILIES[family], **settings})
    make_parts_differ(folder)
    return str(folder)


@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(family, marks=pytest.mark.nightly) for family in SHARED_EXPERTS if family != "mixtral")]
)
def test_gradients_of_a_family_are_the_definitions(pair: World, tmp_path: Path, family: str) -> None:
    """In float64, by the code that computes only experts that tokens go to.

    Families whose routers compute in float32 round as rows are batched: those are compared with ranks that have all experts and the same rows.
    """
    directory = write(tmp_path, family)
    due = definition(directory, documents())
    ranks = pair.run(accumulate_gradients, directory, build_padded, EP, dtype="float64")
    for _, gradients in ranks:
        assert gradients.keys() == due.gradients.keys()
        assert find_worst_difference(gradients, due.gradients) <= (1e-6 if family in PARTLY_FLOAT32 else 1e-9)
    if family in PARTLY_FLOAT32:
        whole = pair.run(accumulate_gradients, directory, build_padded, FsdpConfig(), dtype="float64")
        for (_, gradients), (_, others) in zip(ranks, whole, strict=True):
            assert find_worst_difference(gradients, others) <= 1e-9


@pytest.mark.parametrize("layout", ["two copies of ep2", "tp2 x ep2"])
@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_copies_and_tensor_parallel_ranks_share_experts_too(quad: World, tmp_path: Path, layout: str, family: str) -> None:
    """In float64: copies sum experts' gradients, and tensor-parallel ranks send rows of different experts."""
    directory = write(tmp_path, family)
    due = definition(directory, documents())
    for _, gradients in quad.run(accumulate_gradients, directory, build_padded, LAYOUTS[layout], dtype="float64"):
        assert gradients.keys() == due.gradients.keys()
        assert find_worst_difference(gradients, due.gradients) <= 1e-9


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_shards_of_ranks_that_share_experts_sum_the_same(quad: World, tmp_path: Path, layout: str, family: str) -> None:
    """In float32, by transformers' grouped products, over packed rows, with recomputed layers."""
    directory = write(tmp_path, family)
    due = definition(directory, documents())
    options = LAYOUTS[layout]
    ranks = quad.run(
        accumulate_gradients, directory, build_packed, options, rows="packed", activation_checkpointing=layout == "ep4"
    )
    require_definition(ranks, due, options.context_parallel * options.tensor_parallel)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_bfloat16_stays_within_its_precision(pair: World, tmp_path: Path, family: str) -> None:
    """As far from the definition as ranks are that have all experts, which round in other places."""
    directory = write(tmp_path, family)
    due = definition(directory, documents())
    shared, whole = (
        pair.run(accumulate_gradients, directory, build_packed, options, rows="packed", dtype="bfloat16")
        for options in (EP, FsdpConfig())
    )
    for (_, gradients), (_, others) in zip(shared, whole, strict=True):
        assert find_worst_difference(gradients, due.gradients) <= max(5e-2, 1.5 * find_worst_difference(others, due.gradients))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_rank_to_whose_experts_no_token_goes_waits_for_nobody(pair: World, tmp_path: Path, dtype: str) -> None:
    """A router of zeros sends every token to the same two experts, which one rank has."""
    directory = write(tmp_path, "mixtral")
    zero_routers(tmp_path)
    due = definition(directory, documents())
    for _, gradients in pair.run(accumulate_gradients, directory, build_padded, EP, dtype=dtype):
        assert find_worst_difference(gradients, due.gradients) <= 1e-5


@pytest.mark.nightly
def test_training_goes_on_exactly_and_the_export_is_whole(quad: World, tmp_path: Path) -> None:
    check_resume_and_export(quad, write(tmp_path / "model", "gpt_oss"), tmp_path, EP)


@pytest.mark.nightly
@pytest.mark.parametrize(("wrote", "reads"), [(EP, FsdpConfig()), (FsdpConfig(), EP)], ids=["ep to dp", "dp to ep"])
def test_another_layout_resumes_what_ranks_with_experts_saved(
    pair: World, tmp_path: Path, wrote: FsdpConfig, reads: FsdpConfig
) -> None:
    check_other_layout(pair, write(tmp_path / "model", "mixtral"), tmp_path, wrote, reads)


@pytest.mark.nightly
def test_adapters_and_further_sets_of_them_learn_beside_shared_experts(pair: World, tmp_path: Path) -> None:
    """Gradients are those of ranks that have all experts, and sets share the experts' memory."""
    directory = write(tmp_path, "mixtral")
    lora = LoraConfig(rank=2, targets=("q_proj", "o_proj"))
    shared, whole = (
        pair.run(gradients_of, directory, sizes=(1, 3), lora=lora, dtype="float64", options=options)
        for options in (EP, FsdpConfig())
    )
    for parts, due in zip(shared, whole, strict=True):
        for (_, gradients, norm), (_, wanted, expected) in zip(parts, due, strict=True):
            learned = {name: gradient for name, gradient in wanted.items() if gradient.any()}
            assert learned
            assert find_worst_difference({name: gradients[name] for name in learned}, learned) <= 1e-9
            assert norm == pytest.approx(expected, rel=1e-9)
    for by_name, by_unit, _, norm in pair.run(train_sharing, directory, options=EP):
        assert by_name
        assert by_unit
        assert norm > 0


@pytest.mark.parametrize(
    ("options", "ranks", "words"),
    [
        ({"expert_parallel": 4, "tensor_parallel": 2}, 4, "the 2 data-parallel and context-parallel ranks cannot be divided"),
        ({"expert_parallel": 4, "replicate": 2}, 4, "ranks of each of backend.replicate = 2 copies of the model cannot be divided"),
        ({"expert_parallel": 2}, 3, "3 data-parallel and context-parallel ranks cannot be divided"),
    ],
)
def test_layouts_that_cannot_share_experts_are_refused(options: dict[str, int], ranks: int, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        fsdp.skyrl_engine_describe_backend(FsdpConfig(**options), ranks)


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("llama", {}, "has no experts that ranks could share"),
        ("phimoe", {}, "no test shows that ranks which share experts compute what phimoe models"),
        ("mixtral", {"num_experts": 3}, r"backend\.expert_parallel = 2 does not divide num_local_experts = 3"),
    ],
)
def test_models_that_cannot_share_experts_are_refused(tmp_path: Path, family: str, settings: dict[str, Any], words: str) -> None:
    """Before a rank starts."""
    config = AutoConfig.from_pretrained(write(tmp_path, family, **settings))
    with pytest.raises(UnsupportedError, match=words) as caught:
        fsdp.skyrl_engine_describe_backend(EP, 2).refuse_model(config, ModelConfig(str(tmp_path)))
    assert "backend.expert_parallel = 1" in caught.value.remedy or "divisor" in caught.value.remedy
