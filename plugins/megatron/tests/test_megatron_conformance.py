"""The backend contract, on one rank, on two replicas, and divided over stages and within them; test_megatron_gradients.py has more layouts."""

import pytest

from skyrl_engine.testing.backend import BackendConformance

pytestmark = pytest.mark.proof


class TestMegatron(BackendConformance):
    plugin = "skyrl-engine-megatron:megatron"
    layouts = ("dp1", "dp2", "tp2xpp2")
