"""If a product returns nothing, the message says what it returned, and from which method; its author sees no line of the kit's own code."""

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_engine.contracts.kinds.advantage import AdvantageClaims
from skyrl_engine.contracts.kinds.environment import EnvironmentClaims, Task
from skyrl_engine.testing.kit import promises_of
from skyrl_engine.testing.subject import Subject


class ReturnsNone:
    """A product of every kind; what it is called for, it does not give."""

    rows, needs, empty_sequence, batch_local = "padded", (), "count", False
    reducers = advised_reducers = None
    homogeneous = False
    claims: Any = AdvantageClaims()

    def __call__(self, *_: object) -> None: ...

    def plan(self, lengths: object, layout: object) -> None: ...

    def weights(self, structure: object) -> None: ...

    def merge(self, outputs: object, plan: object) -> None: ...


class BuildsNone(ReturnsNone):
    def __init__(self) -> None:
        from skyrl_engine_collators.padded.collator import PaddedCollator

        self.plan = PaddedCollator().plan  # type: ignore[method-assign]

    def build(self, columns: object, micro_batch: object, *, fields: object = None) -> None: ...


class Environment(ReturnsNone):
    claims = EnvironmentClaims()

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split} {number}", prompt_ids=(number,)) for number in range(3)]

    def open(self, task: Task, seed: int) -> Any:
        return SimpleNamespace(begin=tuple, step=lambda _action: None, close=lambda: None)


WRONG: list[tuple[str, type, str]] = [
    ("collator", ReturnsNone, "returned None from plan"),
    ("collator", BuildsNone, "returned None from build"),
    ("loss", ReturnsNone, "returned None"),
    ("correction", ReturnsNone, "returned a NoneType for"),
    ("reducer", ReturnsNone, "returned None, not float64"),
    ("merger", ReturnsNone, "returned None from merge"),
    ("advantage", ReturnsNone, "returned advantages as None"),
    ("environment", Environment, "step returns None"),
]
ELSEWHERE = (
    "another_rank",
    "another_process",
    "same_in_another_process",
    "process_settings",
    "process_state",
    "pickling",
    "light_import",
)


@pytest.mark.parametrize(("kind", "product", "words"), WRONG)
def test_the_kit_tells_what_was_returned_from_which_method(kind: str, product: type, words: str) -> None:
    causes = []
    for promise in promises_of(kind):
        if promise.name not in ELSEWHERE:
            finding = promise.hold(Subject("mine", product), examples=3, shrink=False)
            causes += [finding.cause] if finding.status == "broken" else []
    assert any(words in cause for cause in causes if cause), causes
    assert not [cause for cause in causes if cause and ("cannot be read" in cause or "promises.py" in cause)]
