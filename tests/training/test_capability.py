"""What cannot work is refused while planning, in a sentence that says what is missing and what to change."""

import numpy as np
import pytest

from skyrl_engine.contracts.collator import Collator
from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.context import FactoryContext
from skyrl_engine.contracts.loss import FunctionLoss
from skyrl_engine.contracts.ragged import Ragged, offsets_of
from skyrl_engine.contracts.topology import Topology
from skyrl_engine.errors import DataError, UnsupportedError
from skyrl_engine.registry.loader import load
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.training.capability import check_capabilities, check_loss, check_ungrouped, required_capabilities


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


def images() -> Ragged:
    return Ragged(np.array(["a.png"], dtype=object), offsets_of([1, 0]))


def test_a_missing_capability_is_named_with_what_to_change() -> None:
    check_capabilities("fsdp", frozenset({"padded", "packed"}), frozenset({"padded"}))
    with pytest.raises(UnsupportedError, match=r"'packed', which backend fsdp does not declare \(it declares: padded\)") as caught:
        check_capabilities("fsdp", frozenset({"padded"}), frozenset({"packed"}))
    assert "padded" in caught.value.remedy
    assert caught.value.exit_code == 2


def test_a_column_the_loss_needs_must_be_in_the_data() -> None:
    check_loss("mine", a_loss("logprobs", "entropy"), "token_mean", columns())
    check_loss("mine", a_loss("advantages"), "token_mean", columns(columns={"advantages": np.ones(3, dtype=np.float32)}))
    with pytest.raises(DataError, match="loss mine needs the column 'advantages', the data has none"):
        check_loss("mine", a_loss("logprobs", "advantages"), "token_mean", columns())


def test_a_reducer_that_makes_no_sense_for_the_loss_is_refused() -> None:
    loss = a_loss("logprobs", reducers=("sequence_mean", "sum"))
    check_loss("mine", loss, "sum", columns())
    with pytest.raises(UnsupportedError, match="only with the reducers sequence_mean, sum, not with token_mean") as caught:
        check_loss("mine", loss, "token_mean", columns())
    assert 'reducer.use = "sequence_mean"' in caught.value.remedy


@pytest.mark.parametrize("name", ["group_ids", "unit_ids"])
def test_samples_that_belong_together_are_refused(name: str) -> None:
    check_ungrouped(columns())
    with pytest.raises(UnsupportedError, match=name):
        check_ungrouped(columns(**{name: np.array([4, 4])}))
