"""Bytes that parts of a run take: estimates are held against what torch keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import AutoConfig

from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.contracts.values.state_layout import Holding, StateLayout, Traffic
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.model_facts.loading_memory import count_layers_of_every_kind, count_loading_bytes
from skyrl_engine.model_facts.parameter_shapes import ParameterShape
from skyrl_engine.model_facts.rank_memory import (
    STAGED_CHECKPOINT,
    ActivationShape,
    ModelShape,
    RankWork,
    compute_bubble_share,
    count_rank_memory,
    count_sent_bytes,
    plan_micro_batch_tokens,
)
from skyrl_engine.model_facts.weight_files import count_parameters
from skyrl_engine.modeling.list_shapes import list_parameter_shapes
from skyrl_engine.modeling.loading import build_causal_lm
from skyrl_engine.modeling.tiny import write_model

TOKENS = 64
GIB = 2**30


def count_kept_bytes(config: Any, path: Path) -> int:
    """Count the bytes that torch keeps for the backward pass of the decoder, each storage once, without the weights."""
    model = build_causal_lm(ModelConfig(str(path)), config)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_activations_are_those_that_torch_keeps(tmp_path: Path, family: str) -> None:
    """Equal to what autograd saves within a fifth: rotary angles, the last norm and the embedding are of no layer."""
    write_model(
        tmp_path,
        family,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    config = AutoConfig.from_pretrained(tmp_path)
    shape = ActivationShape.of(config)
    assert shape is not None
    model = ModelConfig(str(tmp_path))
    estimate = shape.count_layers(4, TOKENS, model, StateLayout(), tp=1)
    kept = count_kept_bytes(config, tmp_path)
    assert kept / 1.2 < estimate < kept * 1.2, f"torch keeps {kept} bytes, the estimate is {estimate}"
    recomputed = shape.count_layers(4, TOKENS, evolve(model, activation_checkpointing=True), StateLayout(), tp=1)
    assert recomputed < estimate / 2


def test_parameters_are_counted_from_headers(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    model = build_causal_lm(ModelConfig(str(tmp_path)), AutoConfig.from_pretrained(tmp_path))
    assert count_parameters(ModelConfig(str(tmp_path))) == sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(ModelConfig("acme/on-the-hub")) is None


def shape_of(model: ModelConfig, **sizes: int) -> ModelShape:
    """Return a model of Llama's form without weights: one matrix a layer, and embedding and head of its vocabulary."""
    config = AutoConfig.for_model("llama", **sizes)
    layers, hidden, vocabulary = config.num_hidden_layers, config.hidden_size, config.vocab_size
    trained = model.lora is None
    return ModelShape(
        config,
        model,
        [
            ParameterShape("embed", "embedding", vocabulary, hidden, is_trained=trained),
            *(
                ParameterShape(f"layers.{n}", "layer", 218_000_000 // hidden, hidden, layer=n, is_trained=trained)
                for n in range(layers)
            ),
            ParameterShape("head", "head", vocabulary, hidden, is_trained=trained),
        ],
    )


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_a_budget_follows_the_memory() -> None:
    """Numbers of Llama-3-8B: 8.03e9 parameters in 32 layers of width 4096."""
    model = ModelConfig("llama", dtype="bfloat16")

    def plan(model: ModelConfig, *, ranks: int = 1, memory: int = 80 * GIB) -> int:
        holdings = (Holding("weights", ranks, trained=False), Holding("gradients", ranks), Holding("optimizer", ranks))
        layout, topology = StateLayout(holdings, gathered="layer"), Topology(dp=ranks)
        tokens = plan_micro_batch_tokens(shape_of(model, **LLAMA_8B), layout, topology, memory=memory, optimizer="adamw")
        assert tokens is not None
        assert tokens % 1024 == 0
        return tokens

    assert plan(model) == 1024, "a model that fills the device leaves the least"
    shared = plan(model, ranks=8)
    assert shared >= 4096
    assert plan(model, ranks=8, memory=141 * GIB) > 2 * shared
    assert plan(evolve(model, activation_checkpointing=True), ranks=8) > 4 * shared
    assert plan(evolve(model, lora=LoraConfig())) > 1024
    stateful = ModelShape(AutoConfig.for_model("mamba"), model, [])
    assert plan_micro_batch_tokens(stateful, StateLayout(), Topology(), memory=GIB, optimizer="adamw") is None


def test_loading_takes_the_whole_model_on_rank_0_or_the_layers_that_it_checks() -> None:
    """Llama-3-8B is 30 GB in float32 where one rank reads it; embedding, head and two layers of 32 where each reads its part."""
    outside, layer = 128256 * 4096, 218_000_000 // 4096 * 4096
    shape = shape_of(ModelConfig("llama", dtype="bfloat16"), **LLAMA_8B)
    assert count_loading_bytes(shape, StateLayout()) == 4 * (32 * layer + 2 * outside)
    assert count_loading_bytes(shape, StateLayout(loading="parts")) == 4 * (2 * layer + 2 * outside)
    in_float64 = shape_of(ModelConfig("llama", dtype="float64"), **LLAMA_8B)
    assert count_loading_bytes(in_float64, StateLayout()) == 2 * count_loading_bytes(shape, StateLayout())


def test_layers_are_checked_up_to_the_first_of_the_last_kind() -> None:
    shape = shape_of(ModelConfig("llama"), **LLAMA_8B)
    assert count_layers_of_every_kind(shape) == 2
    shape.config.layer_types = ["sliding_attention"] * 5 + ["full_attention"] * 27
    assert count_layers_of_every_kind(shape) == 6
    dense_first = [
        evolve(each, columns=1) if each.name in ("layers.0", "layers.1", "layers.2") else each for each in shape.parameters
    ]
    shape.config.layer_types = None
    assert count_layers_of_every_kind(evolve(shape, parameters=dense_first)) == 4


def test_ranks_and_stages_hold_their_parts() -> None:
    """Weights of Llama-3-8B by hand: 32 x 218e6 in layers, 128256 x 4096 in embedding and head each, in float32."""
    shape = shape_of(ModelConfig("llama", dtype="bfloat16"), **LLAMA_8B)
    outside, layers = 128256 * 4096, 32 * (218_000_000 // 4096 * 4096)
    work = RankWork(micro_batches=8, tokens=1024, positions=1024)
    whole = count_rank_memory(shape, StateLayout(), Topology(), work, optimizer="adamw")
    assert whole.parts["weights"] == whole.parts["gradients"] == 4 * (layers + 2 * outside)
    assert whole.parts["optimizer"] == 2 * whole.parts["weights"]
    for optimizer, numbers in (("sgd", 0), ("lion", 1)):
        held = count_rank_memory(shape, StateLayout(), Topology(), work, optimizer=optimizer)
        assert held.parts["optimizer"] == numbers * whole.parts["weights"]
    averaged = count_rank_memory(shape, StateLayout(), Topology(), work, optimizer="adamw", ema=True)
    assert averaged.parts["optimizer"] == 3 * whole.parts["weights"]
    staged = count_rank_memory(shape, StateLayout(), Topology(), work, optimizer="adamw", ema=True, stages_saves=True)
    assert staged.host == {STAGED_CHECKPOINT: 4 * whole.parts["weights"]}, "weights, two moments and the average, in host memory"
    assert staged.total == averaged.total
    held = count_rank_memory(shape, StateLayout(), Topology(), work, optimizer="adamw_8bit")
    assert held.parts["optimizer"] == 2 * (layers + layers // 256 * 4) + 2 * 4 * 2 * outside, (
        "a byte and a 64th of float32; 32 bits outside"
    )
    first, last = (
        count_rank_memory(shape, StateLayout(), Topology(tp=2, pp=4), work, optimizer="adamw", stage=stage) for stage in (0, 3)
    )
    assert first.parts["weights"] == last.parts["weights"] == 4 * (layers // 4 + outside) // 2
    assert first.parts["activations"] == 4 * last.parts["activations"], "1F1B begins as many micro-batches as stages follow"
    assert (first.parts["logits"], last.parts["logits"] > 0) == (0, True)


@pytest.mark.parametrize(
    ("freeze", "layers"),
    [((), 4), (("*.embed_tokens.*",), 4), (("model.layers.[0-1].*", "*.embed_tokens.*"), 2), (("model.*",), 0)],
)
def test_layers_before_all_that_learns_keep_nothing(tmp_path: Path, freeze: tuple[str, ...], layers: int) -> None:
    """Autograd saves nothing of a layer that no gradient reaches."""
    write_model(tmp_path, "llama", num_hidden_layers=4, tie_word_embeddings=False)
    model = ModelConfig(str(tmp_path), freeze=freeze)
    shape = ModelShape(AutoConfig.from_pretrained(tmp_path), model, list_parameter_shapes(model))
    work = RankWork(micro_batches=1, tokens=64, positions=64)
    parts = count_rank_memory(shape, StateLayout(), Topology(), work, optimizer="adamw").parts
    sizes = ActivationShape.of(shape.config)
    assert sizes is not None
    assert parts["activations"] == 64 * layers * sizes.count_layer(4, StateLayout())
    trained = sum(each.count for each in shape.parameters if each.is_trained)
    assert (parts["gradients"], parts["optimizer"]) == (4 * trained, 8 * trained)


def test_rows_are_gathered_or_sent_to_experts() -> None:
    """By hand: of two tokens' rows a layer, ranks gather those of three others; or each rank sends 2 copies, three quarters of them away."""
    config = AutoConfig.for_model("mixtral", num_hidden_layers=2, num_experts_per_tok=2)
    experts = [ParameterShape(f"layers.{n}.mlp.experts.down_proj", "layer", 8 * 1000, 10, layer=n) for n in range(2)]
    shape = ModelShape(config, ModelConfig("it"), experts)

    def count(**settings: Any) -> int:
        layout = StateLayout(gathered="layer", spread_experts=4, traffic=(Traffic("weights", 8, master=False),), **settings)
        whole = count_rank_memory(shape, layout, Topology(dp=8), RankWork(1, 1, 1), optimizer="adamw").parts["gathered weights"]
        assert whole == 8 * 1000 * 10 // 4 * 4, "a layer's own experts, in float32"
        return count_sent_bytes(shape, layout, Topology(dp=8), micro_batches=1, tokens=2)

    weights, row = 2 * (80_000 // 4) * 4 // 2, 2 * config.hidden_size * 4
    assert count() == weights + 4 * 2 * 3 * row
    assert count(expert_rows="sent") == weights + 4 * 2 * 2 * row * 3 // 4


def test_copies_sum_the_part_that_each_of_their_ranks_has() -> None:
    shape = shape_of(ModelConfig("llama"), **LLAMA_8B)
    numbers = 32 * (218_000_000 // 4096 * 4096) + 2 * 128256 * 4096
    layout = StateLayout(traffic=(Traffic("gradients", 2, 2, per_step=True, divided=4),))
    assert count_sent_bytes(shape, layout, Topology(dp=8), micro_batches=3, tokens=0) == 4 * numbers // 4


def test_weights_that_are_rounded_at_random_have_no_masters() -> None:
    shape = shape_of(ModelConfig("llama", dtype="bfloat16"), **LLAMA_8B)
    work = RankWork(1, 1024, 1024)
    held, rounded = (
        count_rank_memory(shape, StateLayout(), Topology(), work, optimizer="adamw", stages_saves=True, stochastic_rounding=rounds)
        for rounds in (False, True)
    )
    assert rounded.parts == {**held.parts, "weights": held.parts["weights"] // 2}, "gradients and moments stay float32"
    assert held.host[STAGED_CHECKPOINT] - rounded.host[STAGED_CHECKPOINT] == rounded.parts["weights"]


def test_what_is_sent_is_what_a_ring_sends() -> None:
    shape = shape_of(ModelConfig("llama", dtype="bfloat16"), **LLAMA_8B)
    numbers = 32 * (218_000_000 // 4096 * 4096) + 2 * 128256 * 4096
    layout = StateLayout(traffic=(Traffic("weights", 4, 2, master=False), Traffic("gradients", 4, 2, per_step=True)))
    sent = count_sent_bytes(shape, layout, Topology(dp=4), micro_batches=3, tokens=0)
    assert sent == 3 * 2 * 2 * numbers * 3 // 4 + 2 * 4 * numbers * 3 // 4
    assert compute_bubble_share(4, 1, 1) == 0.75
    assert compute_bubble_share(4, 2, 8) == pytest.approx(3 / 19)
