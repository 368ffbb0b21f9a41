"""Requests that a client has no business to send: each is refused in words, and the server goes on."""

import os
import re

import pytest
import torch
import zstandard

from skyrl_engine import UnsupportedError
from skyrl_engine_tinker.checkpoints import Address
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.model_worker import ModelWorker
from skyrl_engine_tinker.requests import AdamParams
from skyrl_engine_tinker.settings import Settings
from skyrl_engine_tinker.wire import CLASSES

SESSION = "0" * 32


@pytest.mark.parametrize("key", ["", "tml-tes", "tml-test2"])
@pytest.mark.parametrize("call", ["client/config", "create_session", "sessions/x/finish", "retrieve_future"])
def test_every_call_wants_the_key(client, call, key):
    assert client.post(call, {}, key=key)[0] == 401


@pytest.mark.parametrize("model", ["/etc", "../model", "model", "tiny/../model", "hf-internal/whatever"])
def test_only_listed_models_are_opened(client, model):
    session = client.post("create_session", {})[1]["session_id"]
    promise = client.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": model})[1]
    answer = client.post("retrieve_future", promise)[1]
    assert answer["category"] == "user"
    assert "there are tiny" in answer["error"]
    client.finish(session)


@pytest.mark.parametrize(("rank", "seed", "words"), [(-3, 1, "rank is -3"), (10**7, 1, "rank is 10000000"), (2, -1, "seed")])
def test_ranks_and_seeds_have_bounds(client, rank, seed, words):
    """A rank below zero is no full model, and one beyond all bounds would take the memory of everybody's models."""
    session = client.post("create_session", {})[1]["session_id"]
    request = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": rank, "seed": seed}}
    answer = client.complete("create_model", request)
    assert answer["category"] == "user"
    assert words in answer["error"]
    client.finish(session)


def test_a_pass_without_memory_costs_its_step_and_no_later_one(settings, message):
    model = ServedModel(settings, f"{SESSION}:train:0", "tiny", 2)
    model.open()
    request = CLASSES["ForwardBackwardRequest"].FromString(message(model.model_id, 1))
    decoder = model.engine.group._transport._worker.backend._model

    def exhaust_memory(*_):
        raise torch.OutOfMemoryError("out of memory")

    hooks = [
        module.register_forward_hook(exhaust_memory) for name, module in decoder.named_modules() if name.endswith("layers.1.mlp")
    ]
    with pytest.raises(torch.OutOfMemoryError):
        model.forward_backward(request)
    for hook in hooks:
        hook.remove()
    with pytest.raises(RequestError, match="its gradient was dropped"):
        model.optim_step(AdamParams())
    model.forward_backward(request)
    assert model.optim_step(AdamParams())["metrics"]["grad_norm"] > 0
    model.close()


@pytest.mark.parametrize("name", ["..", ".", "a/b", "../../x", "/tmp/x", "a\0b", "", "x" * 200, "a b", "é", "x.partial"])
def test_names_of_checkpoints_never_leave_their_folder(name):
    with pytest.raises(RequestError, match="no name of a checkpoint"):
        Address(f"{SESSION}:train:0", "weights", name)


@pytest.mark.parametrize(
    "path",
    [
        f"tinker://{SESSION}:train:0/weights/../x",
        "tinker://../weights/x",
        "tinker://x:train:0/weights/x",
        "/etc/passwd",
        "tinker://a/b/c",
        "file:///etc/weights/x",
    ],
)
def test_paths_of_checkpoints_are_addresses(path):
    with pytest.raises(RequestError):
        Address.read(path)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "serve.models names no model"),
        ("[serve]\nlongest = 0\n[serve.models]\na = 'b'", "serve: 'longest' must be >= 1: 0"),
        ("[serve]\nsamples = 'many'\n[serve.models]\na = 'b'", "serve: 'samples' must be <class 'int'>"),
        ("[serve]\nport = 1\n[serve.models]\na = 'b'", "serve has no key 'port'"),
        ("[serve.models]\na = 1", "serve.models.a is no text"),
        ("[serve.models]\na = { path = 'b', trainable = 1 }", "serve.models.a.trainable is neither true nor false"),
        ("[serve.models]\na = { path = 'b', train = true }", "serve.models.a has no key 'train'"),
        ("[loss]\n[serve.models]\na = 'b'", "is the client's to choose"),
        ("[optimizer]\nuse = 'sgd'\n[serve.models]\na = 'b'", "optimizer.use is the client's to choose"),
        ("[serve", "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_served_from_is_refused_with_the_place(tmp_path, lines, words):
    (tmp_path / "serve.toml").write_text(lines)
    with pytest.raises(UnsupportedError, match=re.escape(words)):
        Settings.read(tmp_path / "serve.toml")


def test_models_that_are_not_trained_are_named_in_the_configuration(tmp_path):
    (tmp_path / "serve.toml").write_text("[serve.models]\na = 'b'\nc = { path = 'd', trainable = false }\ne = { path = 'f' }\n")
    settings = Settings.read(tmp_path / "serve.toml")
    assert settings.serve.models == {"a": "b", "c": "d", "e": "f"}
    assert settings.sampling_only == {"c"}
    with pytest.raises(RequestError, match=r"c is for sampling alone here .* models that can be trained: a, e"):
        settings.require_trainable("c")


def test_a_large_body_is_refused(client):
    assert client.post("telemetry", os.urandom(1_000_001))[0] == 413


def test_a_small_body_that_grows_is_refused(client):
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    assert len(bomb) < 10_000
    assert client.post("forward_backward", bomb, **{"Content-Encoding": "zstd"})[0] == 413


@pytest.mark.parametrize("body", [b"\xff\xff", b"{", b"[]", b"null"])
@pytest.mark.parametrize("call", ["create_model", "optim_step", "asample", "retrieve_future", "forward_backward"])
def test_nonsense_is_the_senders_mistake(client, call, body):
    assert client.post(call, body)[0] in (404, 410, 422)


def test_a_session_that_is_not_there_opens_no_model(client):
    assert client.post("create_model", {"session_id": SESSION, "model_seq_id": 0, "base_model": "tiny"})[0] == 410


def test_a_second_model_is_refused_with_the_reason(client):
    first, second = (client.post("create_session", {})[1]["session_id"] for _ in range(2))
    request = {"model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 0}}
    client.post("create_model", {"session_id": first, **request})
    refused = client.post("create_model", {"session_id": second, **request})[1]
    assert client.post("create_model", {"session_id": second, **request})[1] == refused
    # it waits for a sign of life of the first
    client.post("session_heartbeat", {"session_id": first})
    answer = client.post("retrieve_future", refused)[1]
    assert answer["category"] == "user"
    assert "one model at a time" in answer["error"]
    # the second model of one session is refused at once
    answer = client.complete("create_model", {"session_id": first, **request, "model_seq_id": 1})
    assert "one model at a time" in answer["error"]
    client.finish(first)


def test_a_model_is_opened_when_the_one_before_ends(client):
    first, second = (client.post("create_session", {})[1]["session_id"] for _ in range(2))
    request = {"model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 0}}
    client.complete("create_model", {"session_id": first, **request})
    waiting = client.post("create_model", {"session_id": second, **request})[1]
    client.finish(first)
    assert client.post("retrieve_future", waiting)[1]["model_id"] == f"{second}:train:0"
    client.finish(second)


def test_order_duplicates_and_mistakes_of_a_model(client, message):
    session = client.post("create_session", {})[1]["session_id"]
    model = f"{session}:train:0"
    request = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 0}}
    assert client.post("create_model", request)[1] == client.post("create_model", request)[1]
    step = {"model_id": model, "seq_id": 4, "adam_params": {"learning_rate": 0.0}}
    later = client.post("optim_step", step)[1]
    mistakes = {3: {"targets": [6, 900, 8]}, 2: {"loss": "stable_reinforce"}}
    answers = {number: client.post("forward_backward", message(model, number, **wrong))[1] for number, wrong in mistakes.items()}
    first = client.post("forward_backward", message(model, 1))[1]
    assert client.post("forward_backward", message(model, 1))[1] == first
    assert client.post("optim_step", step)[1] == later
    answer = client.post("retrieve_future", later)[1]
    assert "no step was taken" in answer["error"], "request 4 arrived before request 1, and ran after it"
    assert "stable_reinforce" in answer["error"], "the first of the step's two mistakes"
    assert "stable_reinforce" in client.post("retrieve_future", answers[2])[1]["error"]
    # sent 3, 2, 1: as the SDK sends the parts of one list, whose third datum this is
    assert "target 1 of datum 2 is 900; the model knows" in client.post("retrieve_future", answers[3])[1]["error"]
    # a number that never comes is waited for, but not for ever
    gap = client.post("optim_step", {**step, "seq_id": 7})[1]
    assert "error" in client.post("retrieve_future", gap)[1]
    client.finish(session)
    assert client.post("forward_backward", message(model, 9))[0] == 404


def test_a_worker_runs_a_request_once_and_in_the_order_of_numbers():
    import asyncio

    async def run() -> list[int]:
        order: list[int] = []
        worker = ModelWorker(asyncio.get_running_loop(), gap_timeout_s=0.05, pump=lambda: False, end=lambda: order.append(-1))
        promises = [worker.submit(number, lambda number=number: order.append(number) or {}) for number in (2, 3, 1, 2, 6)]
        assert promises[0] is promises[3]
        for promise in promises:
            assert await promise.wait(20)
        assert "request 4 arrived too late: later requests already ran" in worker.submit(4, dict).answer["error"]
        await asyncio.to_thread(worker.close)
        return order

    assert asyncio.run(run()) == [1, 2, 3, 6, -1]
