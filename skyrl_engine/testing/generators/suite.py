"""A pytest suite of the promises to generators; used as `LossConformance` is.

    class TestMyGenerator(GeneratorConformance):
        plugin = "acme-generators:mine"

The generator samples from a tiny model that the kit makes. What it does not declare among its capabilities, and all that needs weights where
it accepts neither a module nor tensors, is not claimed.
"""

from skyrl_engine.contracts.kinds.generator import Generator, GeneratorDescription
from skyrl_engine.testing.conformance import Conformance
from skyrl_engine.testing.generators.promises import GENERATOR_PROMISES


class GeneratorConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`, or return the generator under test from `generator` and its `description`."""

    kind = "generator"
    promises = GENERATOR_PROMISES
    offers = ("description",)

    def generator(self) -> Generator:
        """Make the generator under test, a new one in every call."""
        raise NotImplementedError("set `plugin`, or override `generator`")

    def description(self) -> GeneratorDescription:
        """Return what the generator under test declares; a plugin does it by its hook."""
        raise NotImplementedError("set `plugin`, or override `description`")
