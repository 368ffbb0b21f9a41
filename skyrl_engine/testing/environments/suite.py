"""A pytest suite of the promises to environments; used as `LossConformance` is.

    class TestMyEnvironment(EnvironmentConformance):
        plugin = "acme-environments:mine"

An environment with a method `solve(task)`, which returns the text that solves a task (or one text per turn, or None), is held to pay for it
and not for an echo of the prompt; where it has none, the suite may have that method.
"""

from skyrl_engine.contracts.kinds.environment import Environment
from skyrl_engine.testing.conformance import Conformance
from skyrl_engine.testing.environments.promises import ENVIRONMENT_PROMISES


class EnvironmentConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`, or return the environment under test from `environment`."""

    kind = "environment"
    promises = ENVIRONMENT_PROMISES
    offers = ("solve",)

    def environment(self) -> Environment:
        """Make the environment under test, a new one in every call."""
        raise NotImplementedError("set `plugin`, or override `environment`")
