"""A pytest suite of the promises to reducers; used as `LossConformance` is.

    class TestMyReducer(ReducerConformance):
        plugin = "acme-reducers:mine"

Add `oracle(self, structure)`, which returns the weights due, to be held to a definition of your own, and
`sample_values(self)`, which returns the choices of values of samples by name, such as {"domain": ("news", "fiction")}, where the reducer knows
no others.
"""

from skyrl_engine.contracts.kinds.reducer import Reducer
from skyrl_engine.testing.conformance import Conformance
from skyrl_engine.testing.reducers.promises import REDUCER_PROMISES


class ReducerConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`, or return the reducer under test from `reducer`."""

    kind = "reducer"
    promises = REDUCER_PROMISES
    offers = ("oracle", "sample_values")

    def reducer(self) -> Reducer:
        """Make the reducer under test, a new one in every call."""
        raise NotImplementedError("set `plugin`, or override `reducer`")
