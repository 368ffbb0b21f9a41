"""The backend contract, on one rank and on two; tensor-parallel ones in proofs."""

import pytest

from skyrl_engine.testing import BackendConformance


class TestFsdp(BackendConformance):
    plugin = "skyrl-engine-fsdp:fsdp"


@pytest.mark.proof
class TestTensorParallel(BackendConformance):
    plugin = "skyrl-engine-fsdp:fsdp"
    layouts = ("tp2",)
