"""Requests that a client has no business to send: each is refused in words, and the server goes on."""

import json
import os
import urllib.error
import urllib.request

import pytest
import zstandard

from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.lane import Lane
from skyrl_engine_tinker.wire import CLASSES

KEY = "tml-test"
SESSION = "0" * 32


def post(address: str, call: str, body: object, *, key: str = KEY, **headers: str) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/api/v1/{call}", data, {"X-API-Key": key, **headers}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize("key", ["", "tml-tes", "tml-test2"])
@pytest.mark.parametrize("call", ["client/config", "create_session", "sessions/x/finish", "retrieve_future"])
def test_every_call_wants_the_key(address, call, key):
    assert post(address, call, {}, key=key)[0] == 401


@pytest.mark.parametrize("model", ["/etc", "../model", "model", "tiny/../model", "hf-internal/whatever"])
def test_only_listed_models_are_opened(address, model):
    made = post(address, "create_session", {})[1]["session_id"]
    asked = post(address, "create_model", {"session_id": made, "model_seq_id": 0, "base_model": model})[1]
    answer = post(address, "retrieve_future", asked)[1]
    assert answer["category"] == "user"
    assert "there are tiny" in answer["error"]
    _finish(address, made)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "../../x", "/tmp/x", "a\0b", "", "x" * 200, "a b", "é"])
def test_names_of_checkpoints_never_leave_their_folder(settings, name):
    with pytest.raises(RequestError, match="no name of a checkpoint"):
        settings.checkpoint(f"{SESSION}:train:0", "weights", name)


@pytest.mark.parametrize(
    "path",
    [f"tinker://{SESSION}:train:0/weights/../x", "tinker://../weights/x", "/etc/passwd", "tinker://a/b/c", "file:///etc/weights/x"],
)
def test_paths_of_checkpoints_are_addresses(settings, path):
    with pytest.raises(RequestError):
        settings.addressed(path)


def test_a_large_body_is_refused(address):
    assert post(address, "telemetry", os.urandom(1_000_001))[0] == 413


def test_a_small_body_that_grows_is_refused(address):
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    assert len(bomb) < 10_000
    assert post(address, "forward_backward", bomb, **{"Content-Encoding": "zstd"})[0] == 413


@pytest.mark.parametrize("body", [b"\xff\xff", b"{", b"[]", b"null"])
@pytest.mark.parametrize("call", ["create_model", "optim_step", "asample", "retrieve_future", "forward_backward"])
def test_nonsense_is_the_senders_mistake(address, call, body):
    assert post(address, call, body)[0] in (404, 410, 422)


def test_a_session_that_is_not_there_opens_no_model(address):
    assert post(address, "create_model", {"session_id": SESSION, "model_seq_id": 0, "base_model": "tiny"})[0] == 410


def test_a_second_model_is_refused_with_the_reason(address):
    first, second = (post(address, "create_session", {})[1]["session_id"] for _ in range(2))
    asked = {"model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 0}}
    post(address, "create_model", {"session_id": first, **asked})
    refused = post(address, "create_model", {"session_id": second, **asked})[1]
    answer = post(address, "retrieve_future", refused)[1]
    assert answer["category"] == "user"
    assert "one model at a time" in answer["error"]
    _finish(address, first)


def _finish(address: str, session: str) -> None:
    request = urllib.request.Request(f"{address}/api/v1/sessions/{session}/finish", b"{}", {"X-API-Key": KEY}, method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 204


def fb(model: str, number: int, **changes: object) -> bytes:
    """A forward_backward of one datum of three tokens."""
    import numpy as np

    request = CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn=str(changes.get("loss", "cross_entropy")))
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(changes.get("tokens", [5, 6, 7]), "<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.asarray(changes.get("targets", [6, 7, 8]), "<i8").tobytes(), 2
    return request.SerializeToString()


def test_order_duplicates_and_mistakes_of_a_model(address):
    made = post(address, "create_session", {})[1]["session_id"]
    model = f"{made}:train:0"
    asked = {"session_id": made, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 0}}
    assert post(address, "create_model", asked)[1] == post(address, "create_model", asked)[1]
    step = {"model_id": model, "seq_id": 4, "adam_params": {"learning_rate": 0.0}}
    later = post(address, "optim_step", step)[1]
    mistakes = {3: {"targets": [6, 9, 8]}, 2: {"loss": "stable_reinforce"}}
    answers = {number: post(address, "forward_backward", fb(model, number, **wrong))[1] for number, wrong in mistakes.items()}
    first = post(address, "forward_backward", fb(model, 1))[1]
    assert post(address, "forward_backward", fb(model, 1))[1] == first
    assert post(address, "optim_step", step)[1] == later
    done = post(address, "retrieve_future", later)[1]
    assert done["metrics"]["grad_norm"] > 0, "request 4 came before request 1, and was done behind it"
    assert "stable_reinforce" in post(address, "retrieve_future", answers[2])[1]["error"]
    assert "target 1 of datum 0 is the token 9" in post(address, "retrieve_future", answers[3])[1]["error"]
    # a number that never comes is waited for, not for ever
    behind = post(address, "optim_step", {**step, "seq_id": 7})[1]
    assert "error" in post(address, "retrieve_future", behind)[1]
    _finish(address, made)
    assert post(address, "forward_backward", fb(model, 9))[0] == 404


def test_a_lane_does_a_number_once_and_in_turn():
    import asyncio

    async def run() -> list[int]:
        order: list[int] = []
        lane = Lane(asyncio.get_running_loop(), hole_seconds=0.05, pump=lambda: False, end=lambda: order.append(-1))
        promises = [lane.submit(number, lambda number=number: order.append(number) or {}) for number in (2, 3, 1, 2, 6)]
        assert promises[0] is promises[3]
        for promise in promises:
            assert await promise.wait(20)
        assert "comes after" in lane.submit(4, dict).answer["error"]
        await asyncio.to_thread(lane.close)
        return order

    assert asyncio.run(run()) == [1, 2, 3, 6, -1]
