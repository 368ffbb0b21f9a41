"""The backend contract, on two replicas, divided within layers, and over stages; test_megatron_gradients.py has more layouts."""

import pytest

from skyrl_engine.testing.backend import BackendConformance

pytestmark = pytest.mark.proof


class TestMegatron(BackendConformance):
    plugin = "skyrl-engine-megatron:megatron"
    layouts = ("dp2", "tp2", "pp2")


@pytest.mark.exhaustive
class TestTwiceDivided(BackendConformance):
    plugin = "skyrl-engine-megatron:megatron"
    layouts = ("dp1", "tp2xpp2")
