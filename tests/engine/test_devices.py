"""A device that this machine lacks is refused while planning, unless ranks may be on other machines."""

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_engine.config.schema import RunConfig
from skyrl_engine.engine.devices import refuse_absent_devices
from skyrl_engine.errors import UnsupportedError


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set how many CUDA devices torch finds; no Ray is joined."""

    def find(count: int) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    monkeypatch.delitem(__import__("sys").modules, "ray", raising=False)
    return find


@pytest.mark.parametrize("where", [{}, {"launch": "ray", "ranks": 2}])
def test_no_device_here(devices: Any, where: dict[str, Any]) -> None:
    devices(0)
    with pytest.raises(UnsupportedError, match=r'run\.device = "cuda", and torch finds no CUDA device on this machine') as caught:
        refuse_absent_devices(RunConfig(device="cuda", **where))
    assert "run.device" in caught.value.remedy
    for device in ("auto", "cpu"):
        refuse_absent_devices(RunConfig(device=device, **where))  # type: ignore[arg-type] # one of its values


def test_fewer_devices_than_ranks(devices: Any) -> None:
    devices(1)
    refuse_absent_devices(RunConfig(device="cuda"))
    with pytest.raises(UnsupportedError, match=r"run\.ranks = 2 needs 2 CPU and 2 GPU, the Ray cluster has 2 CPU and 1 GPU"):
        refuse_absent_devices(RunConfig(device="cuda", launch="ray", ranks=2))


def test_a_cluster_may_have_what_the_controller_s_machine_lacks(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(0)
    refuse_absent_devices(RunConfig(device="cuda", launch="ray", ranks=2, ray_address="10.0.0.1:6379"))
    monkeypatch.setitem(__import__("sys").modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    refuse_absent_devices(RunConfig(device="cuda", launch="ray", ranks=2))
