"""The real SDK against a real server: create, forward_backward, optim_step, sample, save, resume."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SDK = os.environ.get("TINKER_SDK")
"""A folder with another SDK than the installed one (`pip install --target`); `nox -s tinker` makes one."""

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(("sdk_client.py", "0"), id="full weights", marks=pytest.mark.nightly),
        pytest.param(("sdk_client.py", "4"), id="adapters"),
        pytest.param(("sdk_samplers.py",), id="samplers and checkpoints"),
    ],
)
def test_a_client_gets_what_the_api_promises(address, script):
    run(script[0], address, *script[1:])


def test_a_client_trains_on_every_loss_as_its_formula_says(address, settings):
    """Log-probabilities are those of local transformers within 1e-4, and a built-in loss is the custom one of its formula."""
    run("sdk_losses.py", address, settings.serve.models["tiny"])


MEGATRON = {
    "one rank": {"tables": {"backend": {"use": "megatron"}}},
    "tp2": {"tables": {"backend": {"use": "megatron", "tensor_parallel": 2}, "run": {"launch": "ray", "ranks": 2}}},
}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", [("sdk_client.py", "0"), ("sdk_client.py", "4"), ("sdk_samplers.py",)], ids=" ".join)
@pytest.mark.parametrize("other_client", MEGATRON.values(), indirect=True, ids=MEGATRON.keys())
def test_a_client_gets_what_the_api_promises_of_models_on_megatron(without_ray, other_client, script):
    """Trained, saved, resumed and sampled from on one rank, and on two tensor-parallel ones, which sample together."""
    run(script[0], other_client.address, *script[1:])


def run(script, *arguments):
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-test"}
    if SDK is not None:
        environment["PYTHONPATH"] = SDK
    command = [sys.executable, str(HERE / script), *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "done" in process.stdout
