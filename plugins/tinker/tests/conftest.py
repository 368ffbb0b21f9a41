"""Servers with a tiny model, each on a port of its own, and a client without an SDK."""

import contextlib
import json
import re
import socket
import string
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import uvicorn

from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine_tinker.app import application
from skyrl_engine_tinker.settings import Settings
from skyrl_engine_tinker.wire import CLASSES

KEY = "tml-test"


@attrs.frozen
class Client:
    """Send requests to the server at `address` as they are, right or wrong."""

    address: str

    def post(self, call: str, body: object, *, key: str = KEY, method: str = "POST", **headers: str) -> tuple[int, Any]:
        """Return the status, and what the server answered: JSON, or the bytes of a message."""
        data = None if method == "GET" else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}/api/v1/{call}", data, {"X-API-Key": key, **headers}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                content = answer.read()
                return answer.status, content if "protobuf" in answer.headers.get("Content-Type", "") else json.loads(
                    content or b"{}"
                )
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complete(self, call: str, body: object) -> Any:
        """Send a request and wait for what it promises."""
        return self.wait_for(self.post(call, body)[1])

    def wait_for(self, promise: object) -> Any:
        """Wait for what was promised."""
        while isinstance(answer := self.post("retrieve_future", promise)[1], dict) and answer.get("type") == "try_again":
            pass
        return answer

    def open_model(self, rank: int = 0) -> str:
        """Open the tiny model in a session of its own, and return its id."""
        session = self.post("create_session", {})[1]["session_id"]
        request = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": rank}}
        assert "model_id" in self.complete("create_model", request)
        return f"{session}:train:0"

    def finish(self, session: str) -> None:
        """End a session, given by its id or by that of its model."""
        assert self.post(f"sessions/{session.split(':', maxsplit=1)[0]}/finish", {})[0] == 204

    def sampler(self, model: str, number: int) -> str:
        """Make a sampler of the model's present weights, by its request `number`."""
        return self.complete("save_weights_for_sampler", {"model_id": model, "seq_id": number})["sampling_session_id"]


def forward_backward(model: str, number: int, **changes: Any) -> bytes:
    """A forward_backward of one datum, of the tokens 5, 6, 7 with the target 8 after them unless `changes` say otherwise."""
    request = CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn=str(changes.get("loss", "cross_entropy")))
    request.forward_only = changes.get("forward_only", False)
    for _ in range(changes.get("count", 1)):
        datum = request.data.add()
        tokens = np.asarray(changes.get("tokens", [5, 6, 7]))
        datum.model_input.add().encoded_text.tokens = tokens.astype("<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = np.asarray(changes.get("targets", [*tokens[1:], 8]), "<i8").tobytes(), 2
    return request.SerializeToString()


@contextlib.contextmanager
def run_server(settings: Settings, *, key: str | None = KEY, **options: Any) -> Iterator[Client]:
    """A server of its own in a thread, from its start to its end; `options` are those of `application`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(application(settings, key, **options), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Client(f"http://127.0.0.1:{port}")
    server.should_exit = True
    thread.join(30)


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A configuration file with one tiny model, `tiny`."""
    folder = tmp_path_factory.mktemp("served")
    write_model(folder / "model")
    write_tokenizer(folder / "model", [string.printable], size=128)
    (folder / "serve.toml").write_text(
        '[serve]\nlosses = ["skyrl-engine-losses:ppo"]\ngap_timeout_s = 0.5\nlongest = 160\nbody_bytes = 1000000\n\n'
        '[serve.models]\ntiny = "model"\n'
    )
    return Settings.read(folder / "serve.toml")


@pytest.fixture(scope="session")
def client(settings: Settings) -> Iterator[Client]:
    with run_server(settings) as running_client:
        yield running_client


@pytest.fixture(scope="session")
def address(client: Client) -> str:
    return client.address


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    write_model(folder, initializer_range=0.2)
    write_tokenizer(folder, [string.printable], size=128)
    return folder


@pytest.fixture
def other_client(settings: Settings, other_model: Path, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A server with the test's parameters in `[serve]` and in `tables` next to it; models of `sampling_only` are not trained."""
    changes = dict(request.param)
    settings = attrs.evolve(settings, sampling_only=frozenset(changes.pop("sampling_only", ())))
    if changes.get("models") == "two":
        # another model of the same architecture
        changes["models"] = {**settings.serve.models, "other": str(other_model)}
    settings = attrs.evolve(settings, tables={**settings.tables, **changes.pop("tables", {})})
    with run_server(attrs.evolve(settings, serve=attrs.evolve(settings.serve, **changes))) as running_client:
        yield running_client


@pytest.fixture(scope="session")
def serving_of() -> Any:
    """`serving`: a context manager over settings."""
    return run_server


@pytest.fixture
def start_server(settings: Settings) -> Any:
    """`serving` over the usual configuration: a context manager with options of `application`."""
    return lambda **options: run_server(settings, **options)


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[Path], tuple[str, subprocess.Popen[str]]]]:
    """Start `skyrl-engine serve` in a process of its own, in a folder with `serve.toml` and the key; the address, and the process.

    What it says of errors is in the folder's `server.log`.
    """
    processes: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> tuple[str, subprocess.Popen[str]]:
        (folder / "key.txt").write_text(f"{KEY}\n")
        command = [
            str(Path(sys.executable).with_name("skyrl-engine")),
            "serve",
            "serve.toml",
            "--port",
            "0",
            "--api-key-file",
            "key.txt",
        ]
        with (folder / "server.log").open("a") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.fullmatch(r"Serving \S+ on http://127\.0\.0\.1:\d+\n", line), line + (folder / "server.log").read_text()
        return line.split()[-1], process

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="session")
def message() -> Any:
    """`forward_backward` as a fixture, since tests cannot import modules next to them."""
    return forward_backward
