"""The tests of `CollatorConformance` as promises, for those who hold a collator to them without pytest."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.registry.host import describe
from skyrl_engine.testing.collators.suite import CollatorConformance
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.promise import Broken, Promise, Undecidable, claimed
from skyrl_engine.testing.subject import Subject

REMEDY = "Compare with the contract: docs/reference/hooks.md, and docs/how-to/write-a-collator.md"


class Draws:
    """Hypothesis's data as the suite draws from it, remembering what was drawn."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._drawn: list[Any] = []

    def draw(self, strategy: "st.SearchStrategy[Any]") -> Any:
        value = self._data.draw(strategy)
        self._drawn.append(value)
        return value

    def __str__(self) -> str:
        return "\n".join(_short(value) for value in self._drawn)


def _short(value: object) -> str:
    lengths = getattr(value, "lengths", value)
    if hasattr(lengths, "tokens") and hasattr(lengths, "actions"):
        return f"samples of {_listed(lengths.tokens)} tokens, of which the last {_listed(lengths.actions)} are actions"
    return " ".join(str(value).split())


def _listed(numbers: Any) -> str:
    return ", ".join(map(str, numbers.tolist()))


def _promise(name: str) -> Promise[Any, Any]:
    test = getattr(CollatorConformance, name).hypothesis.inner_test

    def check(subject: Subject[Any], data: Any) -> None:
        draws = Draws(data)

        class Suite(CollatorConformance):
            def collator(self) -> Any:
                return subject.make()

        try:
            test(Suite(), draws)
        except HypothesisException:
            raise
        except UnsupportedError as refused:
            raise Undecidable(refused.cause) from refused
        except AssertionError as failed:
            raise Broken(str(failed).partition("\nassert")[0] or "an assertion fails", REMEDY, case=draws) from failed
        except EngineError as failed:
            raise Broken(failed.cause, failed.remedy, case=draws) from failed
        except Exception as failed:
            raise Broken(f"fails: {describe(failed)}", REMEDY, case=draws) from failed

    words = name.removeprefix("test_").replace("_", " ")
    return Promise(name.removeprefix("test_"), words[0].upper() + words[1:], check, lambda _: st.data(), claimed)


def _held_to_a_reference(name: str) -> bool:
    return name.endswith("equal_the_reference")


COLLATOR_PROMISES: tuple[Promise[Any, Any], ...] = (
    *(_promise(name) for name in vars(CollatorConformance) if name.startswith("test_") and not _held_to_a_reference(name)),
    *PLUGIN_PROMISES,
)
