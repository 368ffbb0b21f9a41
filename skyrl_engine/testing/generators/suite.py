"""A pytest suite of the promises to generators; used as `LossConformance` is.

    class TestMyGenerator(GeneratorConformance):
        plugin = "acme-generators:mine"

The generator samples from a tiny model that the kit makes. What it does not declare among its capabilities, and all that needs weights where
it accepts none that its place can be given, is not claimed.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from skyrl_engine.config.schema import GeneratorPlacement
from skyrl_engine.contracts.kinds.generator import Generator, GeneratorDescription
from skyrl_engine.testing.conformance import Conformance
from skyrl_engine.testing.generators.places import place_subject, share_starts
from skyrl_engine.testing.generators.promises import GENERATOR_PROMISES
from skyrl_engine.testing.subject import Subject


class GeneratorConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`, or return the generator under test from `generator` and its `description`.

    `placement` is the place in which it is held to them, as `generator.placement` of a run: "rank" calls it in this process, "process" gives it
    one of its own, with weights in folders. "auto": where its description says.
    """

    kind = "generator"
    promises = GENERATOR_PROMISES
    offers = ("description",)
    placement: ClassVar[GeneratorPlacement] = "auto"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _starts(cls) -> Iterator[None]:
        with share_starts():
            yield

    def subject(self) -> Subject[Any]:
        """Return the generator in its place. Raises UnsupportedError for a place where it cannot be."""
        return place_subject(super().subject(), self.placement)

    def generator(self) -> Generator:
        """Make the generator under test, a new one in every call."""
        raise NotImplementedError("set `plugin`, or override `generator`")

    def description(self) -> GeneratorDescription:
        """Return what the generator under test declares; a plugin does it by its hook."""
        raise NotImplementedError("set `plugin`, or override `description`")
