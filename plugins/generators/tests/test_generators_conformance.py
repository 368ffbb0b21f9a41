"""Every generator of this distribution keeps every promise that it claims."""

from typing import ClassVar

import pytest

from skyrl_engine.testing import GeneratorConformance

ON_THE_WAY = {"exactly_once", "aborts", "updates", "updates_keep_requests", "targets", "missing_weights", "vocabulary"}


class TestHf(GeneratorConformance):
    plugin = "hf"


class TestHfInAProcess(GeneratorConformance):
    """By day, the promises that its place may break: requests, weights and refusals on their way."""

    plugin = "hf"
    placement = "process"
    promises = tuple(promise for promise in GeneratorConformance.promises if promise.name in ON_THE_WAY)


@pytest.mark.nightly
class TestAllOfHfInAProcess(GeneratorConformance):
    plugin = "hf"
    placement = "process"


@pytest.mark.nightly
class TestHfOfFewSlots(GeneratorConformance):
    plugin = "hf"
    options: ClassVar = {"slots": 3, "prefill_tokens": 24}


@pytest.mark.nightly
class TestHfOfFewTokens(GeneratorConformance):
    """The longest rows of the kit fill all the memory that it may hold, so that others wait and nothing is kept beside them."""

    plugin = "hf"
    options: ClassVar = {"cache_tokens": 640}
