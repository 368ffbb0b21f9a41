"""Planning refuses what cannot work, in a sentence that says what is missing and what to change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from safetensors.torch import save_file
from transformers import AutoConfig

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.contracts.kinds.backend import BackendDescription
from skyrl_engine.contracts.kinds.collator import Collator
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.loss import FunctionLoss
from skyrl_engine.contracts.kinds.needs import Divergence
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import LoraConfig
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.engine.capability import (
    check_capabilities,
    check_layout,
    check_model,
    check_reducer,
    check_scores,
    collect_needed_columns,
    collect_required_capabilities,
)
from skyrl_engine.errors import ModelError, PluginBrokenError, UnsupportedError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.model_facts.vision_language import refuse_unequal_parts
from skyrl_engine.registry.loader import load
from skyrl_engine.registry.owner import Owner
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.training.sft.trainer import plan_sft


def columns(**more: object) -> SampleColumns:
    return SampleColumns.create(
        input_ids=np.arange(1, 7, dtype=np.int32),
        token_offsets=offsets_of([3, 3]),
        action_offsets=offsets_of([1, 2]),
        **more,  # type: ignore[arg-type] # each test passes what create takes
    )


def collator(name: str) -> Collator:
    product: Collator = load(Registry.discover().resolve("collator", name)).make(None, FactoryContext())
    return product


def a_loss(*needs: str, reducers: tuple[str, ...] | None = None) -> FunctionLoss:
    return FunctionLoss("mine", lambda tokens, _: tokens.logprobs, None, needs, reducers)


def test_what_a_run_requires() -> None:
    assert collect_required_capabilities(Topology(), collator("padded"), [columns(), columns()]) == {"padded"}
    with_images = columns(extras={"images": images()})
    everything = collect_required_capabilities(Topology(dp=1, tp=2, cp=2, pp=2), collator("packed"), [columns(), with_images])
    assert everything == {"packed", "tensor_parallel", "context_parallel", "pipeline_parallel", "vision"}
    assert collect_required_capabilities(Topology(), collator("padded"), [columns()], ModelConfig("m", value_head=True)) == {
        "padded",
        "value_head",
    }
    assert collect_required_capabilities(Topology(), collator("padded"), [columns()], ModelConfig("m", lora=LoraConfig())) == {
        "padded",
        "lora",
    }


def images() -> Ragged:
    return Ragged(np.array(["a.png"], dtype=object), offsets_of([1, 0]))


def test_a_missing_capability_is_named_with_what_to_change() -> None:
    check_capabilities("fsdp", frozenset({"padded", "packed"}), frozenset({"padded"}))
    with pytest.raises(UnsupportedError, match=r"'packed', which backend fsdp does not declare \(it declares: padded\)") as caught:
        check_capabilities("fsdp", frozenset({"padded"}), frozenset({"packed"}))
    assert "padded" in caught.value.remedy
    assert caught.value.exit_code == 2


def test_vision_language_models_are_refused_before_a_rank_starts(tmp_path: Path) -> None:
    """A backend's layout must declare 'vision'; experts are refused anywhere."""

    def facts(kind: str) -> ModelFacts:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        return ModelFacts(ModelConfig(path=str(tmp_path)))

    with_vision = BackendDescription(Topology(), frozenset({"padded", "vision"}))
    without = BackendDescription(Topology(), frozenset({"padded", "packed"}))
    check_model(facts("qwen3_vl"), with_vision)
    check_model(facts("qwen3"), without)
    with pytest.raises(ModelError, match="there is no model directory"):
        check_model(ModelFacts(ModelConfig(path=str(tmp_path / "nowhere"))), without)
    with pytest.raises(UnsupportedError, match="is a vision-language model, and the backend in this layout does not") as caught:
        check_model(facts("qwen3_vl"), without)
    assert "such as fsdp" in caught.value.remedy
    with pytest.raises(UnsupportedError, match="is a mixture of experts that takes images, which is not supported"):
        check_model(facts("ernie4_5_vl_moe"), with_vision)


def test_a_backend_refuses_models_before_a_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_key_value_heads": 2, "num_hidden_layers": 6}))
    model = ModelFacts(ModelConfig(path=str(tmp_path), dtype="bfloat16"))
    mine = Owner.of_unrecorded("mine", "backend")

    def describe(refuse_model: Callable[[Any, ModelConfig], None]) -> BackendDescription:
        return BackendDescription(Topology(), frozenset({"padded"}), refuse_model)

    def divide(config: Any, spec: ModelConfig) -> None:
        assert spec.dtype == "bfloat16"
        refuse_unequal_parts(config, spec.path, "num_key_value_heads", parts=2, options="backend.tensor_parallel")
        refuse_unequal_parts(config, spec.path, "num_of_nothing", parts=7, options="backend.none")
        refuse_unequal_parts(config, spec.path, "num_hidden_layers", parts=4, options="backend.pipeline_parallel")

    check_layout(mine, model, BackendDescription(Topology(), frozenset({"padded"})))
    check_layout(mine, ModelFacts(ModelConfig(path=str(tmp_path / "nowhere"))), describe(divide))  # which the ranks report
    with pytest.raises(
        UnsupportedError, match=r"backend.pipeline_parallel = 4 does not divide num_hidden_layers = 6 of "
    ) as caught:
        check_layout(mine, model, describe(divide))
    assert caught.value.remedy.startswith("Set backend.pipeline_parallel to a divisor of 6")
    with pytest.raises(PluginBrokenError, match=r"mine failed in refuse_model: AttributeError"):
        check_layout(mine, model, describe(lambda config, _: config.number_of_nothing))


@pytest.fixture
def other_model(material: Path, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The table `model` with the material's tokenizer, and a configuration of another family: what planning reads of a model.

    The file of its weights is there and holds none.
    """

    def make(family: str, **options: object) -> dict[str, str]:
        sizes = {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "vocab_size": 80,
        }
        directory = tmp_path / "other"
        AutoConfig.for_model(family, **{**sizes, **options}).save_pretrained(directory)
        save_file({}, directory / "model.safetensors", metadata={"format": "pt"})
        return {"path": str(directory), "tokenizer": str(material / "model")}

    return make


MIXTURE = {"num_experts": 6, "moe_intermediate_size": 48}
TWO = {"tensor_parallel": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("backend", "family", "options", "what"),
    [
        ("fsdp", "gpt2", TWO, "transformers has no tensor-parallel plan for gpt2 models"),
        ("fsdp", "stablelm", TWO, "transformers has no tensor-parallel plan for stablelm models"),
        (
            "fsdp",
            "phimoe",
            TWO,
            "the routers of phimoe models such as .* draw experts at random, and no test shows that ranks draw the same",
        ),
        ("fsdp", ("llama", {"num_key_value_heads": 1}), TWO, "backend.tensor_parallel = 2 does not divide num_key_value_heads = 1"),
        ("fsdp", ("llama", {"intermediate_size": 97}), TWO, "backend.tensor_parallel = 2 does not divide intermediate_size = 97"),
        ("megatron", "gpt2", {}, "is a gpt2 model; the megatron backend knows llama, arcee, .*, smollm3"),
        (
            "megatron",
            ("llama", {"intermediate_size": 97}),
            TWO,
            "backend.tensor_parallel = 2 does not divide intermediate_size = 97",
        ),
        (
            "megatron",
            ("qwen3_moe", {"moe_intermediate_size": 49}),
            TWO,
            "backend.tensor_parallel = 2 does not divide moe_intermediate_size = 49",
        ),
        (
            "megatron",
            ("qwen3_moe", {"num_experts": 5}),
            {**TWO, "expert_parallel": 2},
            "backend.expert_parallel = 2 does not divide num_experts = 5",
        ),
        ("megatron", "llama", {**TWO, "expert_parallel": 2}, "backend.expert_parallel = 2, and .* has no experts"),
        ("megatron", "llama", {"router_z_coefficient": 0.1}, "backend.router_z_coefficient = 0.1, and .* has no experts"),
        ("megatron", "qwen3_moe", {"router_bias_rate": 0.1}, "backend.router_bias_rate = 0.1, and routers of .* choose by no bias"),
        ("megatron", ("llama", {"hidden_act": "gelu"}), {}, "has the activation gelu"),
        ("megatron", ("qwen3", {"attention_dropout": 0.1}), {}, r"has dropout of 0.1 \(attention_dropout\)"),
        ("deepspeed", ("llama", {"dtype": "float64"}), {}, "float64 would be rounded on the way"),
        ("megatron", ("qwen3_moe", {"dtype": "float64"}), {}, "mixture of experts, which transformers does not compute in float64"),
        ("deepspeed", ("llama", {"dtype": "bfloat16"}), {"zero_stage": 0}, "ZeRO stage 0 sums bfloat16 gradients in bfloat16"),
    ],
)
def test_models_that_a_backend_cannot_train_are_refused_while_planning(
    configure: Callable[..., ResolvedConfig],
    other_model: Callable[..., dict[str, str]],
    backend: str,
    family: str | tuple[str, dict[str, object]],
    options: dict[str, object],
    what: str,
) -> None:
    """Nothing of each model but its configuration exists: what loads weights would fail in another way."""
    pytest.importorskip(f"skyrl_engine_{backend}", reason=f"NOT PROVED HERE: this needs skyrl-engine-{backend}")
    name, changes = (family, {}) if isinstance(family, str) else family
    dtype = {"dtype": changes["dtype"]} if "dtype" in changes else {}
    numbers = {key: value for key, value in changes.items() if key != "dtype"}
    model = other_model(name, **{**(MIXTURE if name == "qwen3_moe" else {}), **numbers}) | dtype
    with pytest.raises(UnsupportedError, match=what) as caught:
        plan_sft(configure(model=model, backend={"use": backend, **options}, run={"launch": "ray", "ranks": 2}))
    assert caught.value.exit_code == 2
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("backend", "family", "options"),
    [
        ("fsdp", "llama", TWO),
        ("fsdp", "gpt2", {}),
        ("megatron", "llama", {**TWO, "pipeline_parallel": 2}),
        ("megatron", "qwen3_moe", {**TWO, "expert_parallel": 2, "router_z_coefficient": 0.1}),
        ("deepspeed", "gpt2", {}),
    ],
)
def test_models_that_a_backend_can_train_are_planned(
    configure: Callable[..., ResolvedConfig],
    other_model: Callable[..., dict[str, str]],
    backend: str,
    family: str,
    options: dict[str, object],
) -> None:
    pytest.importorskip(f"skyrl_engine_{backend}", reason=f"NOT PROVED HERE: this needs skyrl-engine-{backend}")
    model = other_model(family, **(MIXTURE if family == "qwen3_moe" else {}))
    assert plan_sft(configure(model=model, backend={"use": backend, **options}, run={"launch": "ray", "ranks": 4})) is not None


def test_adapters_under_tensor_parallelism_are_planned_but_for_codes_of_4_bits(
    configure: Callable[..., ResolvedConfig], other_model: Callable[..., dict[str, str]]
) -> None:
    """Codes of 4 bits are refused with the capability's name."""
    pytest.importorskip("skyrl_engine_fsdp", reason="NOT PROVED HERE: this needs skyrl-engine-fsdp")
    model, run = {**other_model("llama"), "lora": {"rank": 2}}, {"launch": "ray", "ranks": 2}
    for lora in ({"rank": 2}, {"rank": 2, "dora": True}):
        plan_sft(configure(model={**model, "lora": lora}, backend={"use": "fsdp", **TWO}, run=run))
    model["lora"] = {"rank": 2, "load_in_4bit": True}
    with pytest.raises(
        UnsupportedError, match="needs the capability 'load_in_4bit', which backend fsdp does not declare"
    ) as caught:
        plan_sft(configure(model=model, backend={"use": "fsdp", **TWO}, run=run))
    assert "fsdp without tensor parallelism" in caught.value.remedy


@pytest.mark.parametrize(
    ("backend", "ranks", "what"),
    [
        ({"use": "fsdp", "tensor_parallel": 2}, 2, "backend.tensor_parallel = 2 does not divide num_key_value_heads = 1"),
        ({"use": "megatron", "tensor_parallel": 8}, 8, "backend.tensor_parallel = 8 does not divide num_attention_heads = "),
        (
            {"use": "megatron", "pipeline_parallel": 4},
            4,
            "backend.pipeline_parallel = 4 leaves pieces without a layer: num_hidden_layers = 2",
        ),
        (
            {"use": "megatron", "pipeline_parallel": 2, "virtual_pipeline": 2},
            2,
            "backend.pipeline_parallel x backend.virtual_pipeline = 4 leaves pieces without a layer: num_hidden_layers = 2",
        ),
    ],
)
def test_layouts_that_the_model_cannot_have_are_refused_while_planning(
    configure: Callable[..., ResolvedConfig], backend: dict[str, object], ranks: int, what: str
) -> None:
    pytest.importorskip(f"skyrl_engine_{backend['use']}", reason=f"NOT PROVED HERE: this needs skyrl-engine-{backend['use']}")
    with pytest.raises(UnsupportedError, match=what) as caught:
        plan_sft(configure(backend=backend, run={"launch": "ray", "ranks": ranks}))
    assert caught.value.exit_code == 2


def test_needs_are_scores_of_the_model_or_columns_of_the_data() -> None:
    needs = ("logprobs", "values", "advantages", "returns")
    assert collect_needed_columns({"loss mine": needs}) == {"advantages": "loss mine needs", "returns": "loss mine needs"}
    both = collect_needed_columns({"loss mine": needs, "correction tis": ("returns", "rollout_logprobs")})
    assert both == {"advantages": "loss mine needs", "returns": "loss mine needs", "rollout_logprobs": "correction tis needs"}


def test_values_need_a_head() -> None:
    check_scores("loss mine", ("values",), value_head=True)
    check_scores("loss mine", ("logprobs", "old_values"), value_head=False)
    with pytest.raises(
        UnsupportedError, match="loss mine needs the model's score 'values', and the model has no value head"
    ) as caught:
        check_scores("loss mine", ("values",), value_head=False)
    assert caught.value.remedy == "Set model.value_head = true"


def test_a_reducer_that_makes_no_sense_for_the_loss_is_refused() -> None:
    loss = a_loss("logprobs", reducers=("sequence_mean", "sum"))
    check_reducer("mine", loss, "sum")
    with pytest.raises(UnsupportedError, match="only with the reducers sequence_mean, sum, not with token_mean") as caught:
        check_reducer("mine", loss, "token_mean")
    assert 'reducer.use = "sequence_mean"' in caught.value.remedy


def test_a_reducer_the_loss_was_not_made_for_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loss = attrs.evolve(a_loss("logprobs"), advised_reducers=("sequence_mean",))
    check_reducer("loss mine", loss, "sequence_mean")
    assert caplog.messages == []
    check_reducer("loss mine", loss, "token_mean")
    assert caplog.messages == ["loss mine was made for the reducers sequence_mean, and runs with token_mean"]


def test_a_divergence_is_refused_where_it_is_not_declared() -> None:
    needs = (Divergence("reverse").need,)
    check_scores("loss divergence", needs, value_head=False, backend="mine", declared=frozenset({"divergence"}))
    with pytest.raises(
        UnsupportedError, match="compares the model with a teacher over the whole vocabulary, and backend mine"
    ) as caught:
        check_scores("loss divergence", needs, value_head=False, backend="mine", declared=frozenset())
    assert caught.value.remedy == "Choose a backend that does: fsdp, deepspeed or megatron"
