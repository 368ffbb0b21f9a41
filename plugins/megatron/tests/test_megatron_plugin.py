"""Layouts and models that cannot be are refused in a sentence, before or while the model is built."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_families import LATENT
from megatron_tasks import save_tiny, start

from skyrl_engine import ModelError, UnsupportedError
from skyrl_engine.contracts import ModelConfig, Topology
from skyrl_engine.model_facts.pipeline_layers import divide_layers, place_layers
from skyrl_engine_megatron import attention
from skyrl_engine_megatron.division import Along, Division, Fused, Stacked, VocabularyRows, Whole
from skyrl_engine_megatron.limits import refuse_model
from skyrl_engine_megatron.plugin import MegatronConfig, megatron


def test_the_entry_module_imports_no_torch() -> None:
    script = "import skyrl_engine_megatron.plugin, sys; sys.exit(any(name in sys.modules for name in ('torch', 'megatron')))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


ON_EITHER_DEVICE = """
import sys
from unittest.mock import patch
import torch
from skyrl_engine.contracts import ModelConfig, RankEnvironment
from skyrl_engine.testing.ranks.world import alone
from skyrl_engine.workers.process_group import pick_device
from skyrl_engine_megatron import backend
from skyrl_engine_megatron.plugin import MegatronConfig

def place(self, *_, **__):
    placed.append((self._device.type, "skyrl_engine_megatron.cpu" in sys.modules))

def set_up():
    environment = RankEnvironment(0, 1, pick_device("auto", 0), 0)
    backend.MegatronBackend(MegatronConfig()).setup(ModelConfig("no model"), None, environment)

placed = []
read = patch.object(backend, "read", lambda *_, **__: None)
seeds = patch.object(backend.parallel_random, "model_parallel_cuda_manual_seed", lambda _: None)
with read, seeds, patch.object(backend.MegatronBackend, "_place", place):
    with alone(), patch.multiple(torch.cuda, is_available=lambda: True, set_device=lambda _: None):
        set_up()
    with alone(), patch.object(torch.cuda, "is_available", lambda: False):
        set_up()
assert placed == [("cuda", False), ("cpu", True)], placed
"""


def test_stand_ins_for_cuda_are_imported_where_there_is_none_and_nowhere_else() -> None:
    """A rank of `run.device = "auto"`, up to where its model would be placed: first as if torch saw a CUDA device, then as if it did not."""
    ran = subprocess.run([sys.executable, "-c", ON_EITHER_DEVICE], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_what_is_left_of_the_world_is_data_parallel() -> None:
    sizes = MegatronConfig(tensor_parallel=2, pipeline_parallel=2, context_parallel=2)
    described = megatron.skyrl_engine_describe_backend(sizes, 16)
    assert described.topology == Topology(dp=2, tp=2, pp=2, cp=2)
    assert described.capabilities == {
        *("padded", "packed", "tensor_parallel", "pipeline_parallel", "context_parallel", "vision"),
        *("logits", "logsumexp", "mean_logprob", "log_sum_squares", "logprobs_at", "compile", "attention", "ema"),
        *("second_model", "asynchronous_saves", "value_head", "divergence", "lora", "reference_by_adapters"),
        *("freeze", "parameter_groups", "embedding_noise", "adapter_sets"),
    }


@pytest.mark.parametrize(("options", "ranks"), [({"tensor_parallel": 2}, 3), ({"pipeline_parallel": 4}, 2)])
def test_sizes_that_do_not_divide_the_world_are_refused(options: dict[str, int], ranks: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"{ranks} ranks cannot be laid out as .*Set run.ranks to a multiple of"):
        megatron.skyrl_engine_describe_backend(MegatronConfig(**options), ranks)


def test_interleaving_needs_stages() -> None:
    with pytest.raises(UnsupportedError, match=r"virtual_pipeline = 2 interleaves .* pipeline_parallel is 1"):
        megatron.skyrl_engine_describe_backend(MegatronConfig(virtual_pipeline=2), 2)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"tensor_parallel": 2, "expert_parallel": 2}, "expert_parallel = 2, and"),
        ({"tensor_parallel": 16}, "tensor_parallel = 16 does not divide num_attention_heads = 8"),
        ({"tensor_parallel": 3}, "tensor_parallel = 3 does not divide num_attention_heads = 8"),
        ({"pipeline_parallel": 5}, "pipeline_parallel = 5 leaves pieces without a layer: num_hidden_layers = 4 of"),
        (
            {"pipeline_parallel": 2, "virtual_pipeline": 3},
            "pipeline_parallel x backend.virtual_pipeline = 6 leaves pieces without a layer: num_hidden_layers = 4 of",
        ),
    ],
)
def test_models_that_cannot_be_divided_are_refused(models: dict[str, str], options: dict[str, int], cause: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(UnsupportedError, match=f"{cause}.* the model"):
        refuse_model(MegatronConfig(**options), AutoConfig.from_pretrained(models["qwen3-tied"]), ModelConfig("the model"))


@pytest.mark.parametrize(
    ("family", "cause"), [("qwen3_moe", "is a mixture of experts"), ("qwen3_vl", "takes images"), ("mistral", "is a mistral model")]
)
def test_experts_and_images_are_not_compiled(family: str, cause: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family)
    refuse_model(MegatronConfig(), config, ModelConfig("the model"))
    with pytest.raises(UnsupportedError, match=f"the model {cause}, and no test shows that compiled such models") as caught:
        refuse_model(MegatronConfig(), config, ModelConfig("the model", compile=True))
    assert caught.value.remedy == "Set model.compile = false"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("family", "options", "cause"),
    [
        ("cohere", {}, "is a cohere model; the megatron backend knows llama, arcee, .*, qwen3_moe"),
        ("llama", {"hidden_act": "gelu"}, "has the activation gelu"),
    ],
)
def test_models_that_would_lose_something_are_refused(tmp_path: Path, family: str, options: dict[str, Any], cause: str) -> None:
    with pytest.raises(UnsupportedError, match=cause) as caught:
        start(save_tiny(tmp_path, family, tied=False, **options))
    assert caught.value.remedy == "Use the fsdp backend, or another model"


@pytest.mark.usefixtures("alone")
def test_a_model_that_computes_something_else_is_refused(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a configuration hides, a wrong log-probability shows when the model is loaded."""
    right = attention._attend
    monkeypatch.setattr(attention, "_attend", lambda query, *rest, **options: right(1.5 * query, *rest, **options))
    with pytest.raises(ModelError, match=r"computes log-probabilities of .* that differ from transformers' by"):
        start(models["qwen3-tied"])


@pytest.mark.usefixtures("alone")
def test_numbers_that_do_not_fit_each_other_are_named_with_their_model(tmp_path: Path) -> None:
    """Rotary angles of a whole head, for the part of it that is rotated."""
    with pytest.raises(ModelError, match=r"the forward pass of .* \(DeepseekV3ForCausalLM\) fails: The size of tensor") as caught:
        start(save_tiny(tmp_path, "deepseek_v3", tied=False, **{**LATENT, "head_dim": 6}))
    assert "config.json" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("family", "sizes", "cause"),
    [
        (
            "qwen3",
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            "tensor_parallel = 4 does not divide num_key_value_heads = 3",
        ),
        (
            "olmo2",
            {"num_key_value_heads": 2},
            "the model normalises keys over all of its 2 key heads, and backend.tensor_parallel = 4",
        ),
    ],
)
def test_key_heads_that_ranks_can_neither_divide_nor_share_are_refused(family: str, sizes: dict[str, int], cause: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{"num_attention_heads": 8, **sizes})
    with pytest.raises(UnsupportedError, match=cause):
        refuse_model(MegatronConfig(tensor_parallel=4), config, ModelConfig("the model"))


@given(st.integers(1, 200), st.integers(1, 32))
def test_pieces_of_a_pipeline_differ_by_one_layer_at_most(layers: int, pieces: int) -> None:
    counts = divide_layers(layers, pieces)
    assert (len(counts), sum(counts)) == (pieces, layers)
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)
    assert place_layers(layers, pieces) == tuple(sorted(place_layers(layers, pieces)))


DIVISIONS: list[tuple[Division, list[tuple[int, ...]]]] = [
    (Whole(), [(8,)]),
    (VocabularyRows(10), [(10, 3)]),
    (Along(1), [(3, 8)]),
    (Along(0), [(4, 6, 3)]),
    (Along(1, blocks=2), [(3, 8, 2)]),
    (Along(2), [(3, 2, 8)]),
    (Stacked((16, 8, 8), 4), [(16, 3), (8, 3), (8, 3)]),
    (Stacked((16, 8, 8), 4), [(16,), (8,), (8,)]),
    (Stacked((12, 12)), [(12, 3), (12, 3)]),
    (Stacked((16, 4, 4), 2), [(16, 3), (4, 3), (4, 3)]),
    (Fused(Stacked((16, 8, 8), 4)), [(32, 3)]),
    (Fused(Stacked((12, 12))), [(24, 3)]),
]


@given(st.sampled_from(DIVISIONS), st.sampled_from([1, 2, 4]))
def test_joining_undoes_splitting(division_and_shapes: tuple[Division, list[tuple[int, ...]]], ranks: int) -> None:
    division, shapes = division_and_shapes
    whole = [torch.randn(shape) for shape in shapes]
    shares = [division.split(whole, ranks, rank) for rank in range(ranks)]
    assert len({share.shape for share in shares}) == 1
    for tensor, again in zip(whole, division.join(shares), strict=True):
        assert torch.equal(tensor, again)
