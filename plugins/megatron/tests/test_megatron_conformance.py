"""The backend contract, over stages; at night on other layouts, of which test_megatron_gradients.py and the parity matrix have more."""

import pytest

from skyrl_engine.testing import BackendConformance

pytestmark = pytest.mark.proof


class TestMegatron(BackendConformance):
    plugin = "skyrl-engine-megatron:megatron"
    layouts = ("pp2",)


@pytest.mark.nightly
class TestDivided(BackendConformance):
    plugin = "skyrl-engine-megatron:megatron"
    layouts = ("dp1", "dp2", "tp2", "cp2", "tp2xpp2")
