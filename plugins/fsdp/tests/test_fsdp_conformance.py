"""The backend contract, on one rank and on two; on tensor-parallel and context-parallel ones at night."""

import pytest

from skyrl_engine.testing import BackendConformance


class TestFsdp(BackendConformance):
    plugin = "skyrl-engine-fsdp:fsdp"


@pytest.mark.nightly
class TestTensorParallel(BackendConformance):
    plugin = "skyrl-engine-fsdp:fsdp"
    layouts = ("tp2",)


@pytest.mark.nightly
class TestContextParallel(BackendConformance):
    plugin = "skyrl-engine-fsdp:fsdp"
    layouts = ("cp2",)
