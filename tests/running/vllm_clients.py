"""Servers of `vllm_routes.py` as forks of one process, and clients of theirs: what tests of the generator `vllm` share."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skyrl_engine.contracts import Completion, GenerationRequest, GeneratorStart, ModelConfig
from skyrl_engine.testing.generators.bench import POSITIONS, TinyWeights, model_folder
from skyrl_engine_vllm.generator import VllmGenerator
from skyrl_engine_vllm.transfer import free_port

ROUTES = Path(__file__).with_name("forked_servers.py")
"""It stands for a server of vllm_routes.py."""
COMMAND = (sys.executable, str(ROUTES))
FLAGS = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--weight-transfer-config", '{"backend": "gloo"}')

Running = tuple[VllmGenerator, TinyWeights]
Opens = Callable[..., Running]


def post(url: str, path: str, body: object) -> None:
    data = json.dumps(body).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"}), timeout=10).close()


def serve(*flags: str, port: int | None = None, **environment: str) -> tuple[str, "subprocess.Popen[bytes]"]:
    """Start a server, and return its address when it answers."""
    url = f"http://127.0.0.1:{(port := port or free_port())}"
    words = [*COMMAND, "--model", str(model_folder()), "--port", str(port), *(flags or FLAGS)]
    process = subprocess.Popen(words, env={**os.environ, **environment})
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            assert process.poll() is None, "it ended"
            time.sleep(0.02)
        else:
            return url, process


def start_of(weights: TinyWeights, **more: Any) -> GeneratorStart:
    return GeneratorStart(ModelConfig(str(model_folder())), "cpu", (), weights, longest=POSITIONS, **more)


def collect(generator: VllmGenerator, requests: Sequence[GenerationRequest], seconds: float = 60.0) -> list[Completion]:
    done: dict[int, Completion] = {}
    until = time.monotonic() + seconds
    while len(done) < len(requests):
        assert time.monotonic() < until, f"{len(requests) - len(done)} requests never came back"
        for completion in generator.poll(0.5):
            assert completion.request_id not in done
            done[completion.request_id] = completion
    return [done[request.request_id] for request in requests]


def sample(generator: VllmGenerator, requests: Sequence[GenerationRequest]) -> list[Completion]:
    generator.submit(requests)
    return collect(generator, requests)
