"""The backend contract as an executable suite.

    class TestMyBackend(BackendConformance):
        plugin = "acme-backends:mine"
        layouts = ("dp1", "dp2", "tp2")

and pytest runs every promise that the backend claims, on one rank in this process and on several in processes of their own.
"""

from collections.abc import Iterator
from typing import ClassVar

import pytest

from skyrl_engine.testing.backends.bench import Bench
from skyrl_engine.testing.backends.promises import BACKEND_PROMISES
from skyrl_engine.testing.backends.subject import LAYOUTS, BackendSubject
from skyrl_engine.testing.conformance import Conformance
from skyrl_engine.testing.subject import select_plugin


class BackendConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`; `layouts` are the parallel sizes that the backend claims.

    A size is written as in `skyrl-engine diff-backends`, "tp2xpp2", and given to the backend by the options tensor_parallel,
    pipeline_parallel and context_parallel. Ranks are started once per world size for all suites of a session.
    """

    kind = "backend"
    promises = BACKEND_PROMISES
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS
    bench: ClassVar[Bench] = Bench()

    @pytest.fixture(scope="session", autouse=True)
    @classmethod
    def _bench(cls) -> Iterator[None]:
        with cls.bench:
            yield

    def subject(self) -> BackendSubject:  # type: ignore[override] # what promises about backends are held against
        """The backend under test."""
        if self.plugin is None:
            raise NotImplementedError("set `plugin`")
        return BackendSubject(select_plugin("backend", self.plugin, self.options), self.bench, self.layouts)
