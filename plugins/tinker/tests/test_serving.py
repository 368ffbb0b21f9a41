"""The server over time: heartbeats under load, sessions that fall silent, another process on the same directory, the command itself."""

import http.client
import json
import signal
import threading
import time
import urllib.request

import pytest
import zstandard

from skyrl_engine_tinker import bodies, calls
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.wire import CLASSES

STEP = {"adam_params": {"learning_rate": 1e-2}}


@pytest.mark.parametrize("held", ["decompression", "parsing", "step"])
@pytest.mark.parametrize("other_client", [{}], indirect=True, ids=[""])
def test_heartbeats_are_answered_whatever_else_goes_on(other_client, message, monkeypatch, held):
    """The real work is held until a heartbeat was answered: on the event loop it would hold that for ever."""
    begun, beat = threading.Event(), threading.Event()
    where, name = {
        "decompression": (bodies, "decompress"),
        "parsing": (calls, "parse_message"),
        "step": (ServedModel, "forward_backward"),
    }[held]
    real = getattr(where, name)

    def wait_for_heartbeat(*arguments):
        begun.set()
        assert beat.wait(20), "no heartbeat was answered meanwhile"
        return real(*arguments)

    model = other_client.open_model()
    monkeypatch.setattr(where, name, wait_for_heartbeat)
    body = zstandard.ZstdCompressor().compress(message(model, 1, count=50))
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(other_client.post("forward_backward", body, **{"Content-Encoding": "zstd"}))
    )
    asking.start()
    assert begun.wait(20)
    assert other_client.post("session_heartbeat", {"session_id": model.split(":")[0]})[0] == 200
    beat.set()
    asking.join()
    assert isinstance(other_client.post("retrieve_future", answers[0][1])[1], bytes)


@pytest.mark.parametrize("other_client", [{"session_seconds": 2.0}], indirect=True, ids=[""])
def test_a_session_without_heartbeats_ends_and_frees_its_model(other_client, message):
    session, silent = other_client.post("create_session", {})[1]["session_id"], threading.Event()
    beats = []

    def beat() -> None:
        while not silent.wait(0.2):
            beats.append(other_client.post("session_heartbeat", {"session_id": session})[0])

    beating, began = threading.Thread(target=beat), time.monotonic()
    beating.start()
    request = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 0}}
    model = other_client.complete("create_model", request)["model_id"]
    sampler = other_client.sampler(model, 1)
    while time.monotonic() < began + 2.5:
        time.sleep(0.1)
    assert isinstance(other_client.complete("forward_backward", message(model, 2)), bytes), "heartbeats keep it"
    silent.set()
    beating.join()
    assert set(beats) == {200}
    deadline = time.monotonic() + 60
    while other_client.post(f"sessions/{session}", None, method="GET")[0] == 200 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert other_client.post("forward_backward", message(model, 3))[0] == 404
    assert other_client.post("session_heartbeat", {"session_id": session})[0] == 410
    assert other_client.post("asample", {"sampling_session_id": sampler, "seq_id": 0})[0] == 404
    other_client.open_model()


@pytest.mark.parametrize("other_client", [{}], indirect=True, ids=[""])
def test_a_model_that_could_not_be_opened_is_in_nobodys_way(other_client):
    session = other_client.post("create_session", {})[1]["session_id"]
    request = {"session_id": session, "model_seq_id": 0, "base_model": "tine", "lora_config": {"rank": 0}}
    assert "there are tiny" in other_client.complete("create_model", request)["error"]
    assert "model_id" in other_client.complete("create_model", {**request, "model_seq_id": 1, "base_model": "tiny"})


@pytest.mark.parametrize("rank", [0, 4], ids=["full weights", "adapters"])
@pytest.mark.parametrize("other_client", [{}], indirect=True, ids=[""])
def test_a_model_goes_back_to_its_checkpoint_in_place(other_client, message, rank):
    model, numbers = other_client.open_model(rank), iter(range(1, 100))

    def loss_now() -> float:
        return loss(other_client.complete("forward_backward", message(model, next(numbers), forward_only=True)))

    def step() -> None:
        other_client.post("forward_backward", message(model, next(numbers)))
        assert "metrics" in other_client.complete("optim_step", {"model_id": model, "seq_id": next(numbers), **STEP})

    step()
    sampler, saved = other_client.sampler(model, next(numbers)), loss_now()
    path = other_client.complete("save_weights", {"model_id": model, "seq_id": next(numbers), "path": "one"})["path"]
    second_save = other_client.complete("save_weights", {"model_id": model, "seq_id": next(numbers), "path": "one"})
    assert "there is a checkpoint 'one' already" in second_save["error"]
    for optimizer in (True, False):
        step()
        assert loss_now() != saved
        request = {"model_id": model, "seq_id": next(numbers), "path": path, "optimizer": optimizer}
        assert other_client.complete("load_weights", request) == {"type": "load_weights", "path": path}
        assert abs(loss_now() - saved) < (1e-12 if optimizer else 1e-4)
    prompt = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 2}}
    refused = other_client.complete("asample", {"sampling_session_id": sampler, "seq_id": 0, **prompt})
    assert "no longer kept" in refused["error"] or "closed" in refused["error"]
    later_sampler = other_client.sampler(model, next(numbers))
    assert isinstance(other_client.complete("asample", {"sampling_session_id": later_sampler, "seq_id": 0, **prompt}), bytes)


@pytest.fixture
def process(settings, serve, tmp_path):
    """Start the server in a process of its own, on the same directory each time; the client, and the process."""
    (tmp_path / "serve.toml").write_text(f'[serve]\n[serve.models]\ntiny = "{settings.serve.models["tiny"]}"\n')

    def start(like):
        address, running = serve(tmp_path)
        return type(like)(address), running

    return start


def test_a_process_ends_behind_its_step_and_the_next_one_has_its_checkpoints(client, message, process):
    first, running = process(client)
    assert first.post("get_server_capabilities", {}, key="wrong", method="GET")[0] == 401
    model = first.open_model()
    assert isinstance(first.complete("forward_backward", message(model, 1)), bytes)
    assert first.complete("optim_step", {"model_id": model, "seq_id": 2, **STEP})["metrics"]["grad_norm"] > 0
    path = first.complete("save_weights", {"model_id": model, "seq_id": 3, "path": "one"})["path"]
    saved = loss(first.complete("forward_backward", message(model, 4, forward_only=True)))
    # a pass is under way when the end is asked for: it is finished, and its answer still comes
    asked = first.post("forward_backward", message(model, 5, count=5, tokens=list(range(5, 60)), targets=[*range(6, 60), 8]))[1]
    polling = http.client.HTTPConnection(first.address.removeprefix("http://"), timeout=60)
    polling.request("POST", "/api/v1/retrieve_future", json.dumps(asked), {"X-API-Key": "tml-test"})
    # a call after the poll is answered, so the server has the poll
    assert first.post("session_heartbeat", {"session_id": model.split(":")[0]})[0] == 200
    running.send_signal(signal.SIGTERM)
    assert loss(polling.getresponse().read()) > 0
    polling.close()
    assert running.wait(60) == 0

    second, running = process(client)
    (checkpoint,) = second.post("checkpoints", None, method="GET")[1]["checkpoints"]
    assert checkpoint["tinker_path"] == path
    assert checkpoint["size_bytes"] > 1000
    session = second.post("create_session", {})[1]["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    assert second.complete("load_weights", asked) == {"type": "load_weights", "path": path}
    assert loss(second.complete("forward_backward", message(f"{session}:train:0", 1, forward_only=True))) == saved
    checkpoints = f"training_runs/{model}/checkpoints"
    assert second.post(f"{checkpoints}/weights/one", None, method="DELETE")[0] == 204
    assert second.post(f"{checkpoints}/weights/one", None, method="DELETE")[0] == 404
    assert second.post(f"{checkpoints}/weights/..", None, method="DELETE")[0] == 404
    assert second.post(checkpoints, None, method="GET")[1] == {"checkpoints": []}
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 0


def test_a_process_ends_within_seconds_whatever_runs(client, message, process, tmp_path):
    """A pass of minutes is under way, and a poll waits for it; the checkpoint that was answered before is whole, and nothing else is lost."""
    first, running = process(client)
    model = first.open_model()
    first.complete("forward_backward", message(model, 1))
    first.complete("optim_step", {"model_id": model, "seq_id": 2, **STEP})
    path = first.complete("save_weights", {"model_id": model, "seq_id": 3, "path": "one"})["path"]
    saved = loss(first.complete("forward_backward", message(model, 4, forward_only=True)))
    tokens = [5 + place % 90 for place in range(150)]
    asked = first.post("forward_backward", message(model, 5, count=20_000, tokens=tokens, targets=tokens))[1]
    queued = first.post("save_weights", {"model_id": model, "seq_id": 6, "path": "two"})[1]
    polling = http.client.HTTPConnection(first.address.removeprefix("http://"), timeout=60)
    polling.request("POST", "/api/v1/retrieve_future", json.dumps(queued), {"X-API-Key": "tml-test"})
    metrics = urllib.request.Request(f"{first.address}/metrics", headers={"X-API-Key": "tml-test"})
    deadline = time.monotonic() + 60
    # it waited for its turn and has it
    begun = b""
    while b'wait_seconds_count{call="forward_backward"} 3.0' not in begun:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        with urllib.request.urlopen(metrics, timeout=60) as answer:
            begun = answer.read()
    running.send_signal(signal.SIGTERM)
    assert json.loads(polling.getresponse().read())["type"] == "try_again"
    polling.close()
    # the pass takes minutes, and the process that it is in is gone
    assert running.wait(30) == 0
    log = (tmp_path / "server.log").read_text()
    assert "a step that ran was abandoned" in log
    assert "Traceback" not in log

    second, running = process(client)
    (checkpoint,) = second.post("checkpoints", None, method="GET")[1]["checkpoints"]
    assert checkpoint["tinker_path"] == path
    session = second.post("create_session", {})[1]["session_id"]
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    assert second.complete("load_weights", load) == {"type": "load_weights", "path": path}
    assert loss(second.complete("forward_backward", message(f"{session}:train:0", 1, forward_only=True))) == saved
    assert second.post("retrieve_future", asked)[0] == 410
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0


def loss(answer: bytes) -> float:
    return CLASSES["ForwardBackwardOutput"].FromString(answer).metrics["loss:sum"]


def fail_to_end():
    raise ValueError("the ranks cannot be ended")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("end", [lambda: None, fail_to_end], ids=["ends", "fails to end"])
def test_a_worker_that_closes_answers_what_waits(end):
    import asyncio

    from skyrl_engine_tinker.model_worker import ModelWorker, PendingAnswer

    async def run() -> list[dict]:
        loop, begun, release = asyncio.get_running_loop(), threading.Event(), threading.Event()
        worker = ModelWorker(loop, gap_timeout_s=1, pump=lambda: False, end=end)
        worker.submit(1, lambda: begun.set() or (release.wait(20) and {}))
        assert await asyncio.to_thread(begun.wait, 20)
        waiting, late = PendingAnswer(loop), PendingAnswer(loop)
        second = worker.submit(3, dict)
        worker.submit_unordered(lambda: waiting.set({}), waiting, "a")
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        await asyncio.sleep(0.1)
        # `close` has been called, and waits for the request
        release.set()
        await closing
        worker.submit_unordered(lambda: late.set({}), late, "a")
        assert await waiting.wait(20)
        assert await late.wait(20)
        assert await second.wait(20)
        return [waiting.answer, late.answer, second.answer]

    assert ["closed" in json.dumps(answer) for answer in asyncio.run(run())] == [True, True, True]


@pytest.mark.parametrize("other_client", [{"tables": {"collator": {"use": "tree"}}}], indirect=True, ids=[""])
def test_data_that_begin_alike_may_share_their_prefixes(other_client, client, message):
    """A server with rows of trees answers as one with padded rows does, before a step and after it."""
    answers = []
    for server in (client, other_client):
        model = server.open_model()
        body = {"count": 4, "tokens": list(range(5, 60)), "targets": [*range(6, 60), 8]}
        before = loss(server.complete("forward_backward", message(model, 1, **body)))
        assert "metrics" in server.complete("optim_step", {"model_id": model, "seq_id": 2, **STEP})
        answers.append((before, loss(server.complete("forward_backward", message(model, 3, forward_only=True, **body)))))
    assert answers[1] == pytest.approx(answers[0], rel=1e-4)
    assert answers[0][0] != answers[0][1]
