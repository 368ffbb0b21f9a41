"""Check that an error of the engine or of a plugin says what to do."""

from skyrl_engine.errors import EngineError


def check_says_what_to_do(error: EngineError) -> None:
    """Assert that the cause is a sentence without final stop, and the remedy one action with a capital letter and without a stop."""
    assert error.cause, "an error says what happened"
    assert not error.cause.endswith("."), f"the cause ends with a stop, which the message adds: {error.cause!r}"
    assert error.remedy[0].isupper(), f"a remedy begins as a sentence does: {error.remedy!r}"
    assert error.remedy[1].islower(), f"a remedy is no shouting: {error.remedy!r}"
    assert not error.remedy.endswith("."), f"the remedy ends with a stop: {error.remedy!r}"
