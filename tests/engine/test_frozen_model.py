"""The choice of a frozen model follows from what is trained and what the backend declares; contradictions are refused by table."""

from typing import Any

import pytest

from skyrl_engine.contracts.kinds.backend import BackendDescription
from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.errors import UnsupportedError

BOTH = ("second_model", "reference_by_adapters")
WHOLE = ModelConfig("m", revision="r", value_head=True, activation_checkpointing=True)
FRESH = ModelConfig("m", lora=LoraConfig(rank=2))
CONTINUED = ModelConfig("m", lora=LoraConfig(rank=2, path="adapters"))


def plan_frozen(trained: ModelConfig, *capabilities: Any, **settings: Any) -> FrozenModel:
    description = BackendDescription(Topology(), frozenset(capabilities))
    return FrozenModel.choose("reference", trained, description, table="reference", **settings)


def test_all_weights_need_a_second_model_as_it_was() -> None:
    model = plan_frozen(WHOLE, *BOTH).model
    assert model is not None
    assert (model.path, model.revision, model.lora, model.value_head, model.activation_checkpointing) == (
        "m",
        "r",
        None,
        False,
        False,
    )


def test_fresh_adapters_are_switched_off_where_the_backend_can() -> None:
    assert plan_frozen(FRESH, *BOTH).model is None
    second = plan_frozen(FRESH, "second_model").model
    assert second is not None
    assert second.lora is None
    assert plan_frozen(FRESH, *BOTH, adapters_off=False).model == second


def test_adapters_that_were_trained_before_are_part_of_the_model_as_it_was() -> None:
    model = plan_frozen(CONTINUED, *BOTH).model
    assert model is not None
    assert model.lora == CONTINUED.lora
    assert plan_frozen(CONTINUED, *BOTH, adapters_off=True).model is None


def test_another_model_is_taken_by_its_path_and_revision() -> None:
    model = plan_frozen(FRESH, *BOTH, path="other", revision="s").model
    assert model is not None
    assert (model.path, model.revision, model.lora) == ("other", "s", None)


@pytest.mark.parametrize(
    ("trained", "capabilities", "settings", "words"),
    [
        (WHOLE, BOTH, {"adapters_off": True}, "reference.adapters_off is true, and the run trains no adapters"),
        (FRESH, BOTH, {"adapters_off": True, "path": "other"}, "reference.path names another model"),
        (WHOLE, ("reference_by_adapters",), {}, "does not declare 'second_model': it has no second model on its ranks"),
        (FRESH, ("second_model",), {"adapters_off": True}, "does not declare 'reference_by_adapters'"),
        (FRESH, (), {}, "does not declare 'second_model'"),
    ],
)
def test_contradictions_are_refused(trained: ModelConfig, capabilities: tuple[str, ...], settings: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        plan_frozen(trained, *capabilities, **settings)
    assert caught.value.remedy
