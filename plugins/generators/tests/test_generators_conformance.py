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
