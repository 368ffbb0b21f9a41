"""Several mistakes of one run in one error: every line is told, and what helps with all of them once."""

import pytest

from skyrl_engine.errors import DataError, EngineError, ModelError, Refusals


def raise_together(*errors: EngineError) -> EngineError:
    refusals = Refusals()
    for error in errors:
        with refusals.collect():
            raise error
    with pytest.raises(EngineError) as caught:
        refusals.raise_all()
    return caught.value


def test_a_remedy_that_several_mistakes_share_is_printed_once() -> None:
    error = raise_together(
        DataError("row 1 has no prompt", remedy="Give it one"), DataError("row 2 has none", remedy="Give it one")
    )
    assert str(error).splitlines() == ["row 1 has no prompt", "row 2 has none", "the run has 2 mistakes. Give it one"]


def test_remedies_that_differ_stand_with_their_mistakes() -> None:
    error = raise_together(
        DataError("row 1 has no prompt", remedy="Give it one"), ModelError("it is too large", remedy="Shrink it")
    )
    assert str(error).splitlines() == [
        "row 1 has no prompt. Give it one",
        "it is too large. Shrink it",
        "the run has 2 mistakes. Correct each line above",
    ]
