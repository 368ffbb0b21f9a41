"""The collator contract as an executable suite; used as `testing.losses.suite` is.

    class TestMine(CollatorConformance):
        plugin = "acme-collators:mine"

Add `reference(self, columns, micro_batch)`, which returns every field of these rows by a plain definition, to be held to it bit for bit, and
`layouts(self, lengths)`, a strategy of the layouts that the collator must be able to make, where it refuses some by design. Samples have
expert routes and images where the collator declares to carry them.
"""

from skyrl_engine.contracts.kinds.collator import Collator
from skyrl_engine.testing.collators.promises import COLLATOR_PROMISES
from skyrl_engine.testing.conformance import Conformance


class CollatorConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`, or return the collator under test from `collator`."""

    kind = "collator"
    promises = COLLATOR_PROMISES
    offers = ("reference", "layouts")

    def collator(self) -> Collator:
        """Make a collator that accepts samples of any length, a new one in every call."""
        raise NotImplementedError("set `plugin`, or override `collator`")
