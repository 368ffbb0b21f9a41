"""Tensor parallelism and hybrid sharding: the same sums, norms, steps and exports as one plain process, on every layout of ranks.

Gradients are compared with the float64 definition (one process, one unpadded sequence at a time, whole logits), per parameter, as
||g - g'|| / ||g'||; float32 sums in another order stay below 1e-5, a part that is not summed over ranks is off by about 1. On CPU with gloo,
two and four ranks; test_fsdp_cuda.py has the little there is for CUDA. Not covered: eight ranks and more.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from by_day import now
from fsdp_layouts import require_definition
from fsdp_tasks import (
    accumulate_gradients,
    clip_norms,
    compare_with_a_teacher,
    continue_training,
    critic_gradients_of,
    export_weights,
    outcome_with,
    plain_adamw,
    scores_of_parts,
    spoil_step,
    start,
    train_from_start,
)
from transformers import AutoModelForCausalLM

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import AdamWSettings, ModelConfig, RankEnvironment, Topology
from skyrl_engine.contracts.kinds.needs import TOP_1_AGREEMENT, Divergence
from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine.modeling.chunked_head import VOCABULARY_SCORES
from skyrl_engine.modeling.tiny import VOCABULARY, make_parts_differ, write_model
from skyrl_engine.testing.backends.batches import build_packed, build_padded, definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.backend import FsdpBackend
from skyrl_engine_fsdp.plugin import FsdpConfig, fsdp

TP = FsdpConfig(tensor_parallel=2)
EVERY_SCORE = (*VOCABULARY_SCORES, "logprobs_at")
HYBRID = FsdpConfig(replicate=2)


@pytest.fixture(params=now(["tp2", "dp2 x tp2", "2 replicas of 2 shards"], "dp2 x tp2"))
def layout(request: pytest.FixtureRequest) -> tuple[World, FsdpConfig]:
    """Ranks, and the options that lay them out."""
    world = request.getfixturevalue("pair" if request.param == "tp2" else "quad")
    return world, HYBRID if "replicas" in request.param else TP


@pytest.mark.parametrize(
    ("name", "rows_are"),
    [
        ("qwen3-tied", "packed"),
        pytest.param("llama-untied", "padded", marks=pytest.mark.nightly),
        pytest.param("llama-untied", "packed", marks=pytest.mark.nightly),
        pytest.param("qwen3-tied", "padded", marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_the_definitions(layout: tuple[World, FsdpConfig], models: dict[str, str], name: str, rows_are: str) -> None:
    """Over two calls of several micro-batches, an empty row among them; every rank sees one gradient, bit for bit."""
    world, options = layout
    due = definition(models[name], documents())
    ranks = world.run(
        accumulate_gradients,
        models[name],
        build_padded if rows_are == "padded" else build_packed,
        options,
        rows=rows_are,
    )
    require_definition(ranks, due, options.tensor_parallel)


@pytest.mark.parametrize("name", ["critic", pytest.param("critic-tied", marks=pytest.mark.nightly)])
def test_a_value_head_learns_alike(quad: World, models: dict[str, str], name: str) -> None:
    needs = ("logprobs", "values")
    due = definition(models[name], documents(), needs=needs)
    for ((_, gradients),) in quad.run(critic_gradients_of, models[name], *needs, sizes=(2,), options=TP):
        assert find_worst_difference(gradients, due.gradients) <= 1e-5


def test_float64_is_exact_to_1e_10(pair: World, models: dict[str, str]) -> None:
    """Activation checkpointing recomputes what views hid, sums and gathered weights."""
    due = definition(models["qwen3-tied"], documents())
    ranks = pair.run(accumulate_gradients, models["qwen3-tied"], build_padded, TP, dtype="float64", activation_checkpointing=True)
    assert find_worst_difference(ranks[0][1], due.gradients) <= 1e-10


@pytest.mark.nightly
def test_bfloat16_stays_within_its_precision(pair: World, models: dict[str, str]) -> None:
    due = definition(models["qwen3-tied"], documents())
    for _, gradients in pair.run(accumulate_gradients, models["qwen3-tied"], build_padded, TP, dtype="bfloat16"):
        assert find_worst_difference(gradients, due.gradients) <= 5e-2
        assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(np.float32)}


def test_a_vocabulary_that_does_not_divide_stays_whole(pair: World, tmp_path: Path) -> None:
    write_model(tmp_path / "odd", "llama", vocab_size=VOCABULARY + 1)
    due = definition(str(tmp_path / "odd"), documents())
    for _, gradients in pair.run(accumulate_gradients, str(tmp_path / "odd"), build_padded, TP):
        assert find_worst_difference(gradients, due.gradients) <= 1e-5


@pytest.mark.proof
@pytest.mark.parametrize("name", ["qwen3-untied", "llama-tied", "mistral", "gemma2", "gemma3_text", "cohere"])
def test_other_architectures_are_cut_alike(pair: World, models: dict[str, str], name: str) -> None:
    """Soft-capped and scaled logits, scaled embeddings, sliding windows."""
    due = definition(models[name], documents())
    for _, gradients in pair.run(accumulate_gradients, models[name], build_padded, TP):
        assert find_worst_difference(gradients, due.gradients) <= 1e-5


@pytest.mark.proof
@pytest.mark.parametrize(("family", "options"), [("qwen2", {}), ("starcoder2", {"use_bias": True}), ("phi", {})])
def test_biases_are_cut_or_counted_once(pair: World, tmp_path: Path, family: str, options: dict[str, bool]) -> None:
    """Biases of queries and keys; of projections back, which no rank owns; of the head. They start at zero and get values.

    In float64: a key's bias hardly moves the softmax, and the norm of its gradient is no measure for what float32 rounds.
    """
    write_model(tmp_path, family, **options)
    make_parts_differ(tmp_path)
    directory = str(tmp_path)
    due = definition(directory, documents())
    for _, gradients in pair.run(accumulate_gradients, directory, build_padded, TP, dtype="float64"):
        assert find_worst_difference(gradients, due.gradients) <= 1e-10


def test_the_norm_is_the_true_one_and_clipping_reaches_the_limit(layout: tuple[World, FsdpConfig], models: dict[str, str]) -> None:
    world, options = layout
    due = definition(models["qwen3-tied"], documents())
    true = np.sqrt(sum(np.square(gradient).sum() for gradient in due.gradients.values()))
    for limit in (true / 7, true * 7):
        ranks = world.run(clip_norms, models["qwen3-tied"], limit, options)
        assert {reported for reported, _ in ranks} == {ranks[0][0]}
        assert ranks[0][0] == pytest.approx(true, rel=1e-5)
        assert ranks[0][1] == pytest.approx(min(limit, true), rel=1e-5)


def test_two_steps_equal_plain_adamw(layout: tuple[World, FsdpConfig], models: dict[str, str]) -> None:
    world, options = layout
    optimizer = AdamWSettings(learning_rate=1e-2, epsilon=0.5, weight_decay=0.1, max_grad_norm=1.0)
    history, plain = plain_adamw(models["qwen3-tied"], optimizer, (1e-2, 1e-2))
    ranks = world.run(train_from_start, models["qwen3-tied"], optimizer, 2, options=options)
    for step, (loss, norm, rate) in enumerate(history):
        assert sum(own[step][0] for own, _ in ranks) / options.tensor_parallel == pytest.approx(loss, rel=1e-5)
        assert ranks[0][0][step][1:] == (pytest.approx(norm, rel=1e-4), rate)
        assert {own[step][1:] for own, _ in ranks} == {ranks[0][0][step][1:]}
    for _, weights in ranks:
        assert weights.keys() == plain.keys()
        for name, weight in plain.items():
            np.testing.assert_allclose(weights[name], weight, rtol=1e-4, atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(weights[name], ranks[0][1][name], err_msg=name)


@pytest.mark.parametrize(
    ("by", "named"),
    [("objective", ""), ("model.norm.weight", "model.norm.weight"), ("model.layers.1.mlp.up_proj.weight", "up_proj")],
)
def test_a_gradient_that_is_no_number_stops_all_ranks(quad: World, models: dict[str, str], by: str, named: str) -> None:
    """Also where one rank alone has it, in its copy of a weight that all have."""
    ranks = quad.run(spoil_step, models["llama-untied"], TP, by=by)
    for cause, kept, _ in ranks:
        assert "is not finite" in cause
        assert kept
    assert any(named in detail for _, _, details in ranks for detail in details)


def test_ranks_drop_the_same_numbers_and_stay_equal(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    """With dropout; and saved and resumed equals uninterrupted, bit for bit."""
    ranks = pair.run(continue_training, models["dropout"], AdamWSettings(learning_rate=1e-2), tmp_path, TP, before=1, after=2)
    for uninterrupted, resumed in ranks:
        assert uninterrupted[0] == resumed[0] == ranks[0][0][0]
        for name, weight in uninterrupted[1].items():
            np.testing.assert_array_equal(weight, resumed[1][name], err_msg=name)
            np.testing.assert_array_equal(weight, ranks[0][0][1][name], err_msg=name)


@pytest.mark.parametrize("name", ["qwen3-tied", pytest.param("llama-untied", marks=pytest.mark.nightly)])
def test_the_export_is_what_was_trained(
    layout: tuple[World, FsdpConfig], models: dict[str, str], tmp_path: Path, name: str
) -> None:
    world, options = layout
    (weights, logprobs), *_ = world.run(export_weights, models[name], tmp_path, options)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert dict(loaded.named_parameters()).keys() == weights.keys()
    for key, parameter in loaded.named_parameters():
        np.testing.assert_array_equal(weights[key], parameter.detach().numpy(), err_msg=key)
    row = documents()[0]
    with torch.no_grad():
        expected = loaded(input_ids=row.ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, row.ids[1:, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected[row.weights[1:] != 0].numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "sizes", "why"),
    [
        ("gpt2", {}, "transformers has no tensor-parallel plan for gpt2 models"),
        (
            "qwen3_moe",
            {"num_experts": 3, "moe_intermediate_size": 32},
            "backend.tensor_parallel = 2 does not divide num_local_experts = 3",
        ),
        ("llama", {"num_key_value_heads": 1}, "backend.tensor_parallel = 2 does not divide num_key_value_heads = 1"),
        ("llama", {"intermediate_size": 127}, "backend.tensor_parallel = 2 does not divide intermediate_size = 127"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(pair: World, tmp_path: Path, family: str, sizes: dict[str, int], why: str) -> None:
    write_model(tmp_path, family, tie_word_embeddings=False, **sizes)
    for message in pair.run(outcome_with, str(tmp_path), TP):
        assert why in message
        assert "backend.tensor_parallel" in message


@pytest.mark.parametrize(
    ("forgotten", "why"),
    [
        ("k_norm", "its ranks get different gradients for model.layers.0.self_attn.k_norm.weight, which they share"),
        ("", "set up"),
    ],
)
def test_a_plan_that_forgets_a_sum_is_noticed_at_load(pair: World, models: dict[str, str], forgotten: str, why: str) -> None:
    """Transformers' plan of Apertus, for one, forgets its activation's weights (5.23)."""
    for message in pair.run(outcome_with, models["qwen3-tied"], TP, forgotten=forgotten):
        assert why in message


@pytest.mark.parametrize("needs", [(), *((name,) for name in EVERY_SCORE[1:]), EVERY_SCORE[1:]], ids=str)
@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.3, softcap=2.0), LogitRule(scale=1.7)])
def test_scores_of_a_divided_vocabulary_are_those_of_the_whole(pair: World, rule: LogitRule, needs: tuple[str, ...]) -> None:
    """But for rounding: scores are differences of numbers as large as a logit, 30 at most here, that sum over ten tokens rounds as often."""
    rounding = 10 * 30 * np.finfo(np.float64).eps
    for expected, got in pair.run(scores_of_parts, rule, 0.7, ("logprobs", *needs)):
        assert len(expected) == len(got) == 2 + len(needs)
        for whole, part in zip(expected, got, strict=True):
            np.testing.assert_allclose(part, whole, rtol=0, atol=rounding)


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.3, softcap=2.0)])
def test_a_divided_head_compares_with_a_teacher_as_a_whole_one_does(pair: World, rule: LogitRule) -> None:
    """Every divergence, beside log-probabilities and the agreement on the best token; gradients of states, weight and bias."""
    kinds = (Divergence("forward"), Divergence("reverse", temperature=2.0), Divergence("jensen_shannon", beta=0.3))
    requested = ("logprobs", *(kind.need for kind in kinds), TOP_1_AGREEMENT)
    for whole, divided in pair.run(compare_with_a_teacher, rule, 0.7, requested):
        assert len(whole) == len(divided) == len(requested) + 3
        for due, got in zip(whole, divided, strict=True):
            np.testing.assert_allclose(got, due, rtol=1e-12, atol=1e-13)


def test_layouts() -> None:
    described = fsdp.skyrl_engine_describe_backend(FsdpConfig(tensor_parallel=2, replicate=2), 8)
    assert described.topology == Topology(dp=4, tp=2)
    assert "tensor_parallel" in described.capabilities
    with pytest.raises(UnsupportedError, match=r"3 ranks cannot be laid out with backend.tensor_parallel = 2.*multiple of 2"):
        fsdp.skyrl_engine_describe_backend(TP, 3)
    with pytest.raises(UnsupportedError, match=r"3 data-parallel ranks cannot be divided among backend.replicate = 2 copies"):
        fsdp.skyrl_engine_describe_backend(HYBRID, 3)


@pytest.mark.usefixtures("alone")
def test_cpu_offload_is_refused_on_cpu(models: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match=r"this rank computes on the CPU.*Set backend.cpu_offload = false"):
        start(models["qwen3-tied"], options=FsdpConfig(cpu_offload=True))


@pytest.mark.usefixtures("alone")
def test_a_model_that_was_offloaded_is_exported_on_cpu(models: dict[str, str], tmp_path: Path) -> None:
    """Scoring only: one process on the CPU writes the model of a run on GPUs."""
    backend = FsdpBackend(FsdpConfig(cpu_offload=True))
    backend.setup(ModelConfig(models["qwen3-tied"]), None, RankEnvironment(0, 1, "cpu", 0))
    backend.export(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "qwen3"
