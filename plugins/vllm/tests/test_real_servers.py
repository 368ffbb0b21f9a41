"""Servers that the generator starts with real vLLM, weights as adapters, and servers that end or stop amid requests."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from vllm_checks import TOLERANCE, Adapters, collect, require_right, sample

from skyrl_engine.contracts import GeneratorStart, LoraConfig
from skyrl_engine.testing.generators.bench import due_logprobs, requests_of
from skyrl_engine_vllm.generator import VllmGenerator
from skyrl_engine_vllm.options import VllmOptions

OF_PEFT = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900), pytest.mark.filterwarnings(OF_PEFT)]

OwnServers = Callable[..., VllmOptions]
Starts = Callable[..., GeneratorStart]
Opens = Callable[..., VllmGenerator]


@pytest.fixture
def opens() -> Iterator[Opens]:
    """`opens(options, start)`: a started generator, closed in the end."""
    opened: list[VllmGenerator] = []

    def open_one(options: VllmOptions, start: GeneratorStart) -> VllmGenerator:
        opened.append(generator := VllmGenerator(options))
        generator.start(start)
        return generator

    yield open_one
    for generator in opened:
        generator.close()


def test_adapters_are_loaded_in_the_place_of_the_last_ones(
    opens: Opens, own_servers: OwnServers, starts: Starts, tmp_path: Path
) -> None:
    weights = Adapters(tmp_path)
    plain = starts("tensors", folder=tmp_path)
    start = evolve(plain, weights=weights, model=evolve(plain.model, lora=LoraConfig(rank=4, alpha=8)))
    generator = opens(own_servers(), start)
    for version in (0, 1, 2):
        if version:
            weights.renew()
            generator.update(weights, version)
        requests = requests_of(6, first=10 * version)
        require_right(weights, requests, sample(generator, requests), version)
    long = requests_of(3, first=100, max_tokens=500)
    generator.submit(long)
    time.sleep(0.5)
    weights.renew()
    generator.update(weights, 3)
    for request, done in zip(long, collect(generator, long), strict=True):
        own = done.versions.per_token(len(done.token_ids)) == 3
        due = due_logprobs(weights, request, done)[np.arange(len(own)), done.token_ids]
        assert own.any()
        assert np.abs(due - done.logprobs)[own].max() < TOLERANCE


def test_a_server_that_computes_in_bfloat16_is_within_its_tolerance(
    opens: Opens, own_servers: OwnServers, starts: Starts, tmp_path: Path
) -> None:
    plain = starts("tensors", folder=tmp_path)
    weights: Any = plain.weights
    generator = opens(own_servers(), evolve(plain, model=evolve(plain.model, dtype="bfloat16")))
    weights.change(1)
    generator.update(weights, 1)
    requests = requests_of(12, max_tokens=20)
    gaps = []
    for request, done in zip(requests, sample(generator, requests), strict=True):
        due = due_logprobs(weights, request, done)[np.arange(len(done.token_ids)), done.token_ids]
        gaps.append(np.abs(due - done.logprobs))
        assert done.versions.versions.tolist() == [1]
    # of the weights in float32: rounding of weights and of sums; the proof compares with the same weights in bfloat16
    assert 1e-4 < np.concatenate(gaps).mean() < 0.3


def children_of(pid: int) -> list[int]:
    told = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    own = [int(each) for each in told]
    return [*own, *(below for each in own for below in children_of(each))]


@pytest.mark.parametrize("which", ["the server", "its engine", "stopped"])
def test_a_server_that_ends_or_stops_amid_requests_comes_back(
    opens: Opens, own_servers: OwnServers, starts: Starts, tmp_path: Path, which: str
) -> None:
    start = starts("tensors", folder=tmp_path)
    weights: Any = start.weights
    generator = opens(own_servers(), start)
    weights.change(1)
    generator.update(weights, 1)
    requests = requests_of(8, max_tokens=400)
    due = sample(generator, [evolve(request, request_id=100 + request.request_id) for request in requests])
    (server,) = generator._servers.all  # type: ignore[union-attr]
    assert server.process is not None
    assert server.process._process is not None
    pid = server.process._process.pid
    before = children_of(pid)
    engine = next(each for each in before if "EngineCore" in Path(f"/proc/{each}/cmdline").read_text())
    generator.submit(requests)
    time.sleep(0.05)
    os.kill(engine if which == "its engine" else pid, signal.SIGSTOP if which == "stopped" else signal.SIGKILL)
    done = collect(generator, requests)
    require_right(weights, requests, done, 1)
    assert [each.token_ids.tolist() for each in done] == [each.token_ids.tolist() for each in due]
    assert server.restarts >= 1
    assert not [
        each for each in (pid, *before) if Path(f"/proc/{each}").exists() and "vllm" in Path(f"/proc/{each}/cmdline").read_text()
    ]
    weights.change(2)
    generator.update(weights, 2)
    again = requests_of(4, first=50)
    require_right(weights, again, sample(generator, again), 2)
