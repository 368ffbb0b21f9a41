"""Every family's scores and gradients are those of transformers, however it is divided, and exports are what transformers loads.

Compared in float64, where transformers computes norms and softmax in float32 still, so that 1e-5 is near what can be asked (a lost norm, bias,
window, factor or kind of positions shows as 1e-2 and more). Windows are shorter than documents. Not covered: CUDA.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import now, rarely
from megatron_families import FAMILIES, MIXTURES, learn_trees, save_families
from megatron_tasks import VOCABULARY, Case, Passed, export_weights, resume_checkpoint, run_passes, save_checkpoint, start
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import AdamWSettings, ModelConfig
from skyrl_engine.testing.backends.batches import (
    DefinedResult,
    WeightedObjective,
    branching_documents,
    build_packed,
    definition,
    documents,
)
from skyrl_engine.testing.backends.batches import find_worst_difference as find_worst
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.limits import refuse_model
from skyrl_engine_megatron.plugin import MegatronConfig, megatron

LAYOUTS = {
    "tp2": MegatronConfig(tensor_parallel=2),
    "tp2-whole-sequences": MegatronConfig(tensor_parallel=2, sequence_parallel=False),
    "pp2": MegatronConfig(pipeline_parallel=2),
    "cp2": MegatronConfig(context_parallel=2),
    "pp2-interleaved": MegatronConfig(pipeline_parallel=2, virtual_pipeline=2),
}
MIXTURE_LAYOUTS = {**LAYOUTS, "ep2": MegatronConfig(tensor_parallel=2, expert_parallel=2), "dp2": MegatronConfig()}
CASES = [Case("padded", 3, calls=2), Case("packed", 1)]
ALL = [(name, layout) for name in FAMILIES for layout in LAYOUTS if layout != "pp2-interleaved"]
BY_DAY = [(name, ("tp2", "pp2", "cp2")[place % 3]) for place, name in enumerate(FAMILIES)]
"""One layout for each family; each layout has some of the families."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_families(tmp_path_factory.mktemp("families"))


def agree(ranks: Sequence[Sequence[Passed]], true: DefinedResult) -> None:
    """Gradients on every rank, and every document's log-probabilities on those that collect."""
    for case in zip(*ranks, strict=True):
        for rank in case:
            assert find_worst(rank.gradients, true.gradients) <= 1e-5
        for output in (rank.evaluated for rank in case if rank.evaluated.coords.collects):
            for place, number in enumerate(output.sample_ids):
                expected = true.logprobs.get(int(number), np.zeros(0))
                np.testing.assert_allclose(output.fields["logprobs"][place], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "layout"), now(ALL, *BY_DAY))
def test_gradients_are_those_of_transformers(pair: World, families: dict[str, str], name: str, layout: str) -> None:
    true = definition(families[name], documents(VOCABULARY))
    agree(pair.run(run_passes, families[name], LAYOUTS[layout], CASES, dtype="float64"), true)


MIXTURES_BY_DAY = [(name, ("ep2", "tp2", "pp2", "cp2")[place % 4]) for place, name in enumerate(MIXTURES)]


@pytest.mark.parametrize(
    ("name", "layout"), now([(name, layout) for name in MIXTURES for layout in MIXTURE_LAYOUTS], *MIXTURES_BY_DAY)
)
def test_mixtures_are_those_of_transformers(pair: World, families: dict[str, str], name: str, layout: str) -> None:
    """In float32, because transformers' experts know no float64."""
    true = definition(families[name], documents(VOCABULARY), dtype=torch.float32)
    for rank in pair.run(run_passes, families[name], MIXTURE_LAYOUTS[layout], CASES):
        for case in rank:
            assert find_worst(case.gradients, true.gradients) <= 1e-5


@pytest.mark.parametrize("name", now(MIXTURES, "glm4-moe", "gpt-oss"))
def test_a_correction_decides_and_does_not_learn(pair: World, families: dict[str, str], tmp_path: Path, name: str) -> None:
    """Exports and checkpoints hold the bias by which routers choose, in whichever layout; nothing steps it."""
    pair.run(export_weights, families[name], MIXTURE_LAYOUTS["ep2"], tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before = dict(AutoModelForCausalLM.from_pretrained(families[name]).named_buffers())
    corrections = {key: buffer for key, buffer in loaded.named_buffers() if "correction" in key}
    assert len(corrections) == (3 if MIXTURES[name][0] in ("glm4_moe", "deepseek_v3") else 0)
    for key, buffer in corrections.items():
        assert buffer.any()
        assert torch.equal(buffer, before[key])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("five-layers", "pp2"),
        ("five-layers", "pp2-interleaved"),
        ("one-key-head", "tp2"),
        rarely("one-key-head", "tp2-whole-sequences"),
        rarely("one-fused-key-head", "tp2"),
    ],
)
def test_what_ranks_cannot_divide_evenly(pair: World, families: dict[str, str], name: str, layout: str) -> None:
    """Pieces of a pipeline with unequal numbers of layers; key heads that several ranks share."""
    agree(
        pair.run(run_passes, families[name], LAYOUTS[layout], CASES, dtype="float64"),
        definition(families[name], documents(VOCABULARY)),
    )


@pytest.mark.proof
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("two-key-heads", {"tensor_parallel": 4}),
        ("one-key-head", {"tensor_parallel": 4}),
        ("five-layers", {"pipeline_parallel": 4}),
        ("olmo2", {"tensor_parallel": 4}),
        ("olmo3", {"tensor_parallel": 2, "context_parallel": 2}),
        ("gemma3", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ],
)
def test_four_ranks(quad: World, families: dict[str, str], name: str, options: dict[str, int]) -> None:
    ranks = quad.run(run_passes, families[name], MegatronConfig(**options), CASES, dtype="float64")
    agree(ranks, definition(families[name], documents(VOCABULARY)))


def test_checkpoints_of_odd_shares_continue_under_another_layout(pair: World, families: dict[str, str], tmp_path: Path) -> None:
    """From a shared key head, unequal stages, and a correction beside sharded weights; the large epsilon makes steps follow gradients."""
    smooth = AdamWSettings(learning_rate=1e-2, epsilon=1.0, weight_decay=0.1)
    for name, first, second in (("one-key-head", "tp2", "pp2"), ("five-layers", "pp2", "tp2"), ("glm4-moe", "dp2", "ep2")):
        checkpoint = tmp_path / name
        checkpoint.mkdir()
        expected = pair.run(save_checkpoint, families[name], MIXTURE_LAYOUTS[first], smooth, checkpoint, before=2, after=2)[0][1]
        for _, weights in pair.run(resume_checkpoint, families[name], MIXTURE_LAYOUTS[second], smooth, checkpoint, after=2):
            assert find_worst(weights, expected) <= 1e-5


@pytest.mark.parametrize("name", now(FAMILIES, "phi3", "gemma3"))
def test_exports_load_without_a_missing_or_unexpected_key(pair: World, families: dict[str, str], tmp_path: Path, name: str) -> None:
    """Weights are equal bit for bit, and score the same."""
    ranks = pair.run(export_weights, families[name], LAYOUTS["tp2"], tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for weights, _ in ranks:
        assert weights.keys() == dict(loaded.named_parameters()).keys()
        for key, parameter in loaded.named_parameters():
            np.testing.assert_array_equal(weights[key], parameter.detach().numpy(), err_msg=key)
    true = definition(str(tmp_path), documents(VOCABULARY), dtype=torch.float32)
    for output in (output for _, output in ranks if output.coords.collects):
        for place, number in enumerate(output.sample_ids):
            np.testing.assert_allclose(output.fields["logprobs"][place], true.logprobs.get(int(number), np.zeros(0)), atol=1e-4)


@pytest.mark.usefixtures("alone")
def test_rotary_frequencies_are_fixed_for_the_length_of_a_run(families: dict[str, str]) -> None:
    """Rows beyond LongRoPE's threshold have another set, which short rows of that run have too; longer ones are refused."""
    short = run_passes(families["phi3-longrope"], MegatronConfig(), CASES[:1])[0]
    long = run_passes(families["phi3-longrope"], MegatronConfig(), CASES[:1], rotary_length=100)[0]
    assert find_worst(short.gradients, long.gradients) > 1e-2
    backend = start(families["phi3-longrope"])
    with pytest.raises(UnsupportedError, match="a row has 65 tokens, and the model chooses its rotary frequencies by length"):
        backend.forward(build_packed(long_documents(65), 1), WeightedObjective())
    backend.close()


def long_documents(length: int) -> Any:
    first, *_ = documents(VOCABULARY)
    ids = torch.arange(length) % 50 + 1
    return [type(first)(0, ids, torch.ones(length))]


@pytest.mark.parametrize(
    ("name", "change", "cause"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "has attention in both directions"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "has a soft cap on its attention's scores"),
        ("seed-oss", {"residual_dropout": 0.1}, r"has dropout of 0.1 \(residual_dropout\)"),
        ("phi3", {"resid_pdrop": 0.1}, r"has dropout of 0.1 \(resid_pdrop\)"),
        ("llama-biases", {"hidden_act": "gelu"}, "has the activation gelu"),
    ],
)
def test_what_a_family_would_lose_is_refused(families: dict[str, str], name: str, change: dict[str, Any], cause: str) -> None:
    config = AutoConfig.from_pretrained(families[name])
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(UnsupportedError, match=f"the model {cause}"):
        refuse_model(MegatronConfig(), config, ModelConfig("the model"))


@pytest.mark.parametrize("name", now(["mistral-window", "smollm3", "granite", "gemma3", "glm4", "deepseek-v3"], "gemma3"))
def test_shared_prefixes_are_seen_through_windows(pair: World, families: dict[str, str], name: str) -> None:
    """Rows of trees have the gradient of their samples one by one, with windows shorter than what samples share."""
    true = definition(families[name], branching_documents(VOCABULARY), dtype=torch.float32)
    for gradients in pair.run(learn_trees, families[name], LAYOUTS["tp2"]):
        assert find_worst(gradients, true.gradients) <= 1e-5


def test_sinks_are_not_given_to_trees_or_kernels_without_them(families: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match="has sinks of attention, which are computed within documents") as caught:
        megatron.skyrl_engine_describe_backend(None, 1).rehearse(ModelConfig(families["gpt-oss"]), "tree")
    assert caught.value.remedy == "Choose the collator packed"
    config = AutoConfig.from_pretrained(families["gpt-oss"])
    with pytest.raises(UnsupportedError, match=r'which model\.attention = "flash" does not compute'):
        refuse_model(MegatronConfig(), config, ModelConfig("the model", attention="flash"))


@pytest.mark.parametrize("name", ["mistral-window", "granite", "gemma3"])
def test_windows_and_scales_are_not_given_to_kernels_that_are_compared_without_them(families: dict[str, str], name: str) -> None:
    config = AutoConfig.from_pretrained(families[name])
    with pytest.raises(UnsupportedError, match="the model attends in windows, with sinks or with a scale of its own") as caught:
        refuse_model(MegatronConfig(attention="transformer_engine"), config, ModelConfig("the model", dtype="bfloat16"))
    assert caught.value.remedy == 'Set backend.attention to "auto"'


@pytest.mark.parametrize("name", now(FAMILIES, "olmo3"))
def test_recomputed_activations_change_nothing(pair: World, families: dict[str, str], name: str) -> None:
    """Sums over tensor-parallel ranks, kinds of positions and factors are there at recomputation."""
    true = definition(families[name], documents(VOCABULARY))
    options = {"dtype": "float64", "activation_checkpointing": True}
    agree(pair.run(run_passes, families[name], LAYOUTS["tp2"], [Case("packed")], **options), true)
