"""What cannot work is refused while planning, in a sentence that says what is missing and what to change."""

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import pytest

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.contracts.backend import BackendDescription, EqualParts
from skyrl_engine.contracts.collator import Collator
from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.context import FactoryContext
from skyrl_engine.contracts.loss import FunctionLoss
from skyrl_engine.contracts.ragged import Ragged, offsets_of
from skyrl_engine.contracts.topology import Topology
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.registry.loader import load
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.training.capability import (
    check_capabilities,
    check_layout,
    check_model,
    check_reducer,
    check_scores,
    needed_columns,
    required_capabilities,
)
from skyrl_engine.training.sft import plan_sft


def columns(**more: object) -> SampleColumns:
    return SampleColumns.create(
        input_ids=np.arange(1, 7, dtype=np.int32),
        token_offsets=offsets_of([3, 3]),
        action_offsets=offsets_of([1, 2]),
        **more,  # type: ignore[arg-type] # each test passes what create takes
    )


def collator(name: str) -> Collator:
    made: Collator = load(Registry.discover().resolve("collator", name)).make(None, FactoryContext())
    return made


def a_loss(*needs: str, reducers: tuple[str, ...] | None = None) -> FunctionLoss:
    return FunctionLoss("mine", lambda tokens, _: tokens.logprobs, None, needs, reducers)


def test_what_a_run_requires() -> None:
    assert required_capabilities(Topology(), collator("padded"), [columns(), columns()]) == {"padded"}
    with_images = columns(extras={"images": images()})
    everything = required_capabilities(Topology(dp=1, tp=2, cp=2, pp=2), collator("packed"), [columns(), with_images])
    assert everything == {"packed", "tensor_parallel", "context_parallel", "pipeline_parallel", "vision"}
    assert required_capabilities(Topology(), collator("padded"), [columns()], value_head=True) == {"padded", "value_head"}
    assert required_capabilities(Topology(), collator("padded"), [columns()], lora=True) == {"padded", "lora"}


def images() -> Ragged:
    return Ragged(np.array(["a.png"], dtype=object), offsets_of([1, 0]))


def test_a_missing_capability_is_named_with_what_to_change() -> None:
    check_capabilities("fsdp", frozenset({"padded", "packed"}), frozenset({"padded"}))
    with pytest.raises(UnsupportedError, match=r"'packed', which backend fsdp does not declare \(it declares: padded\)") as caught:
        check_capabilities("fsdp", frozenset({"padded"}), frozenset({"packed"}))
    assert "padded" in caught.value.remedy
    assert caught.value.exit_code == 2


def test_vision_language_models_are_refused_before_a_rank_starts(tmp_path: Path) -> None:
    """Where the backend in its layout does not declare 'vision' (deepspeed; tensor parallelism on fsdp), and with experts anywhere."""

    def model(kind: str) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        return ModelConfig(path=str(tmp_path))

    with_vision = BackendDescription(Topology(), frozenset({"padded", "vision"}))
    without = BackendDescription(Topology(), frozenset({"padded", "packed"}))
    check_model(model("qwen3_vl"), with_vision)
    check_model(model("qwen3"), without)
    check_model(ModelConfig(path=str(tmp_path / "nowhere")), without)  # which the ranks report
    with pytest.raises(UnsupportedError, match="is a vision-language model, and the backend in this layout does not") as caught:
        check_model(model("qwen3_vl"), without)
    assert "fsdp without tensor parallelism" in caught.value.remedy
    with pytest.raises(UnsupportedError, match="is a mixture of experts that takes images, which is not supported"):
        check_model(model("qwen3_vl_moe"), with_vision)


def test_a_model_that_the_backend_or_its_layout_cannot_have_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_key_value_heads": 2, "num_hidden_layers": 6}))
    model, able = ModelConfig(path=str(tmp_path)), frozenset({"padded"})
    cuts = (EqualParts("num_key_value_heads", 2, "backend.tensor_parallel"), EqualParts("num_of_nothing", 7, "backend.none"))
    check_layout("mine", model, BackendDescription(Topology(), able, equal_parts=cuts, model_types=("llama", "qwen3")))
    check_layout("mine", ModelConfig(path=str(tmp_path / "nowhere")), BackendDescription(Topology(), able, model_types=()))
    four = BackendDescription(
        Topology(), able, equal_parts=(*cuts, EqualParts("num_hidden_layers", 4, "backend.pipeline_parallel"))
    )
    with pytest.raises(
        UnsupportedError, match=r"backend.pipeline_parallel = 4 does not divide num_hidden_layers = 6 of "
    ) as caught:
        check_layout("mine", model, four)
    assert caught.value.remedy.startswith("Set backend.pipeline_parallel to a divisor of 6")
    with pytest.raises(UnsupportedError, match=r"is a qwen3 model; backend mine knows llama, gpt2"):
        check_layout("mine", model, BackendDescription(Topology(), able, model_types=("llama", "gpt2")))


@pytest.mark.parametrize(
    ("backend", "ranks", "what"),
    [
        ({"use": "fsdp", "tensor_parallel": 2}, 2, "backend.tensor_parallel = 2 does not divide num_key_value_heads = 1"),
        ({"use": "megatron", "tensor_parallel": 2}, 2, "backend.tensor_parallel = 2 does not divide num_key_value_heads = 1"),
        ({"use": "megatron", "pipeline_parallel": 4}, 4, "backend.pipeline_parallel = 4 does not divide num_hidden_layers = 2"),
        (
            {"use": "megatron", "pipeline_parallel": 2, "virtual_pipeline": 2},
            2,
            "backend.pipeline_parallel x backend.virtual_pipeline = 4 does not divide num_hidden_layers = 2",
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
    assert needed_columns({"loss mine": needs}) == {"advantages": "loss mine needs", "returns": "loss mine needs"}
    both = needed_columns({"loss mine": needs, "correction tis": ("returns", "rollout_logprobs")})
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
