"""The base of the suites of all kinds: one test per promise that the subject claims."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
from hypothesis import settings

from skyrl_engine.testing.promise import EXAMPLES, Promise
from skyrl_engine.testing.subject import Subject, select_plugin


class Conformance:
    """Base of the suites. A subclass names a plugin, with options if it likes, or overrides the method that returns the product.

    `plugin` is a reference as a configuration takes it (a name, "distribution:name" or "./file.py:name"), or the plugin itself: a decorated
    function, or an object with hook implementations, under a name of its module. `examples` are cases per promise;
    None: the kit's own number, and a share of it under a Hypothesis profile of fewer than 50 examples.
    """

    kind: ClassVar[str]
    promises: ClassVar[tuple[Promise[Any, Any], ...]]
    plugin: ClassVar[object] = None
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    examples: ClassVar[int | None] = None
    offers: ClassVar[tuple[str, ...]] = ()
    """Methods that a subclass may add, such as `oracle`; a promise that needs one is claimed where the subclass has it."""
    flags: ClassVar[tuple[str, ...]] = ()
    """Attributes that a subclass may set to True, such as `surrogate_gradient`."""

    def product(self) -> Any:
        """Make the product under test, a new one in every call."""
        return self.subject().make()

    def subject(self) -> Subject[Any]:
        """Return the subject that the promises are checked on."""
        more: dict[str, Any] = {
            "hooks": {name: getattr(self, name) for name in self.offers if hasattr(self, name)},
            "flags": frozenset(name for name in self.flags if getattr(self, name, False)),
        }
        maker = getattr(self, self.kind)
        if self.plugin is None or getattr(maker, "__func__", None) is not vars(self._suite())[self.kind]:
            return Subject(type(self).__name__, maker, **more)
        return Subject.of_plugin(select_plugin(self.kind, self.plugin, self.options), **more)

    @classmethod
    def _suite(cls) -> type["Conformance"]:
        """Return the class of the kit that this class derives from."""
        return next(base for base in cls.__mro__ if "kind" in vars(base))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test per claimed promise; one that is not claimed makes none, unless only a run of the product says so."""
        subject = self.subject()
        claimed = [promise for promise in self.promises if promise.exempt_runs or promise.exempt(subject) is None]
        metafunc.parametrize("promise", claimed, ids=[promise.name for promise in claimed])

    def test_promise(self, promise: Promise[Any, Any]) -> None:
        """Fails with the smallest case that breaks the promise."""
        profile = settings()
        examples = self.examples or max(1, EXAMPLES * min(profile.max_examples, 50) // 50)
        finding = promise.hold(self.subject(), examples=examples, derandomize=profile.derandomize)
        if finding.status == "not claimed":
            pytest.skip(str(finding.cause))
        if finding.status != "kept":
            pytest.fail("\n".join([f"{finding.promise}: {finding.sentence}", *finding.lines]), pytrace=False)
