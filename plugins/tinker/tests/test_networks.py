"""A network that loses replies and repeats requests, four hundred samples at once, and clients that vanish: nothing is done twice or lost."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine_tinker.checkpoints import Address
from skyrl_engine_tinker.samplers import Samplers

SDK = os.environ.get("TINKER_SDK")
LOST, TWICE = 10, 3
"""Every tenth of all replies is lost, and every third request of a call is sent twice."""


def start_sdk_script(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A script of the SDK in a process of its own."""
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-test", **({"PYTHONPATH": SDK} if SDK else {})}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def run_lossy_proxy(address: str) -> Iterator[tuple[str, dict[str, Counter[str]]]]:
    """A proxy before `address`: its own address, and what it lost and sent twice, counted by call."""
    upstream, lock = address.removeprefix("http://"), threading.Lock()
    counts: Counter[str] = Counter()
    faults: dict[str, Counter[str]] = {"lost": Counter(), "twice": Counter()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self, body: bytes) -> tuple[int, str, bytes]:
            connection = http.client.HTTPConnection(upstream, timeout=120)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            reply = answer.status, answer.headers.get("Content-Type", ""), answer.read()
            connection.close()
            return reply

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            call = self.path.rsplit("/", maxsplit=1)[-1]
            with lock:
                counts[call] += 1
                is_repeated, is_lost = counts[call] % TWICE == 0, counts.total() % LOST == 0
                faults["twice"][call] += is_repeated
                faults["lost"][call] += is_lost
            status, kind, answer = self.forward(body)
            if is_repeated:
                status, kind, answer = self.forward(body)
            if is_lost:
                self.close_connection = True
                return
            self.send_response(status)
            if kind:
                self.send_header("Content-Type", kind)
            if status != 204:
                self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Say nothing: what happened is counted."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", faults
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_loop_behind_a_lossy_network_gives_the_same_bits(address, settings):
    """Samples, log-probabilities, losses, gradient norms and trained weights equal those of the same loop without the proxy."""
    with run_lossy_proxy(address) as (proxy, faults):
        process = start_sdk_script("sdk_loop.py", address, proxy)
        output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, output + errors
    (plain_path, plain), (lossy_path, through_proxy) = (json.loads(line) for line in output.splitlines())
    assert plain_path != lossy_path

    def folder(path: str) -> Path:
        return Address.read(path).folder(settings.directory)

    assert through_proxy == plain
    one, other = (sorted((folder(path) / "model").glob("*.safetensors")) for path in (plain_path, lossy_path))
    assert one
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in other]
    assert faults["lost"].total() >= 5, faults
    assert {"forward_backward", "optim_step", "asample", "save_weights_for_sampler"} <= (+faults["twice"]).keys(), faults


@pytest.mark.parametrize("other_client", [{}], indirect=True, ids=[""])
def test_four_hundred_samples_at_once_and_a_heartbeat_meanwhile(other_client, monkeypatch):
    """All samples wait until a heartbeat was answered; then each is the one that its seed draws when it is alone."""
    real, all_there, beat = Samplers.pump, threading.Event(), threading.Event()

    def hold(samplers: Samplers) -> bool:
        if samplers._waiting and not all_there.is_set():
            if len(samplers._waiting) < 400:
                # the worker takes the next one between two calls of this
                time.sleep(0.001)
                return True
            all_there.set()
            assert beat.wait(60), "no heartbeat was answered while 400 samples waited"
        return real(samplers)

    monkeypatch.setattr(Samplers, "pump", hold)
    session = other_client.post("create_session", {})[1]["session_id"]
    process = start_sdk_script("sdk_storm.py", other_client.address)
    try:
        assert all_there.wait(200), "400 samples never came"
        assert other_client.post("session_heartbeat", {"session_id": session})[0] == 200
    finally:
        all_there.set()
        beat.set()
        output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, output + errors
    assert "done" in output


@pytest.mark.parametrize("other_client", [{"session_seconds": 12.0}], indirect=True, ids=[""])
def test_the_session_of_a_killed_client_ends_and_the_next_one_is_served(other_client, message):
    process = start_sdk_script("sdk_storm.py", other_client.address, "vanish")
    line = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert line == "under way\n", errors
    session, finished = other_client.post("create_session", {})[1]["session_id"], threading.Event()

    def beat() -> None:
        while not finished.wait(1.0):
            other_client.post("session_heartbeat", {"session_id": session})

    beating = threading.Thread(target=beat)
    beating.start()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 0}}
    request = other_client.post("create_model", body)[1]
    # this waits until the silent session is ended
    while "try_again" in (answer := other_client.post("retrieve_future", request)[1]).values():
        pass
    model = answer["model_id"]
    assert isinstance(other_client.complete("forward_backward", message(model, 1)), bytes)
    assert other_client.complete("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})["metrics"]["grad_norm"] > 0
    finished.set()
    beating.join()
