"""Every generator of this distribution keeps every promise that it claims."""

from typing import ClassVar

import pytest

from skyrl_engine.testing import GeneratorConformance


class TestHf(GeneratorConformance):
    plugin = "hf"


@pytest.mark.nightly
class TestHfOfFewSlots(GeneratorConformance):
    plugin = "hf"
    options: ClassVar = {"slots": 3, "prefill_tokens": 24}


@pytest.mark.nightly
class TestHfOfFewTokens(GeneratorConformance):
    """The longest rows of the kit fill all the memory that it may hold, so that others wait and nothing is kept beside them."""

    plugin = "hf"
    options: ClassVar = {"cache_tokens": 640}
