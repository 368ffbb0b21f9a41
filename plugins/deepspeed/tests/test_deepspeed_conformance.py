"""Every promise of the backend contract, for every ZeRO stage on two ranks, and for stage 3 on one; no parameter is kept whole between uses."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from skyrl_engine.testing import BackendConformance

pytestmark = pytest.mark.proof


class OfStage(BackendConformance):
    """The promises of one stage."""

    plugin = "deepspeed"
    examples = 4


@pytest.mark.nightly
class TestStage0(OfStage):
    options: ClassVar[Mapping[str, Any]] = {"zero_stage": 0}
    layouts = ("dp2",)


@pytest.mark.nightly
class TestStage1(OfStage):
    options: ClassVar[Mapping[str, Any]] = {"zero_stage": 1}
    layouts = ("dp2",)


@pytest.mark.nightly
class TestStage2(OfStage):
    options: ClassVar[Mapping[str, Any]] = {"zero_stage": 2}
    layouts = ("dp2",)


class TestStage3(OfStage):
    options: ClassVar[Mapping[str, Any]] = {"zero_stage": 3, "persistence_threshold": 0}
    layouts = ("dp2",)


@pytest.mark.nightly
class TestStage3Alone(OfStage):
    options: ClassVar[Mapping[str, Any]] = {"zero_stage": 3, "persistence_threshold": 0}
    layouts = ("dp1",)
