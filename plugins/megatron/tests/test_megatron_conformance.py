"""The backend contract, on two replicas and over stages; test_megatron_gradients.py and the parity matrix have more layouts."""

import pytest

from skyrl_engine.testing import BackendConformance

pytestmark = pytest.mark.proof


class TestMegatron(BackendConformance):
    plugin = "skyrl-engine-megatron:megatron"
    layouts = ("dp2", "pp2")


@pytest.mark.nightly
class TestDivided(BackendConformance):
    plugin = "skyrl-engine-megatron:megatron"
    layouts = ("dp1", "tp2", "tp2xpp2")
