"""The end of ranks in words: a transport that ended them tells every later call why."""

from typing import Final

from skyrl_engine.errors import EngineError

CLOSED: Final = "it was closed"


def describe_ending(error: EngineError) -> str:
    """Return the clause about ranks that were ended because one of them met `error`; every rank gets the same clause."""
    error.details = (*error.details, "all ranks were ended: those that did not fail may have waited for one that did")
    return f"all its ranks were ended after a failure ({error.cause})"
