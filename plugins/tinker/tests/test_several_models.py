"""Several models at once: sets of adapters over one base, each with the bits that it has alone; who has no place, and why."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import attrs
import numpy as np
import pytest
from safetensors.numpy import load

from skyrl_engine_tinker.checkpoints import Address, Facts, delete, write_checkpoint
from skyrl_engine_tinker.fair_lock import FairLock
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.slots import ModelSlots
from skyrl_engine_tinker.wire import CLASSES

SDK = os.environ.get("TINKER_SDK")
STEP = {"adam_params": {"learning_rate": 1e-1}}


def start_sdk_script(script, *arguments):
    """A script of the SDK in a process of its own."""
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-test", **({"PYTHONPATH": SDK} if SDK else {})}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def loss(answer) -> float:
    return CLASSES["ForwardBackwardOutput"].FromString(answer).metrics["loss:sum"]


def read_export(settings, path) -> bytes:
    return (Address.read(path).folder(settings.directory) / "model" / "adapter_model.safetensors").read_bytes()


def request_model(client, rank=0, base="tiny", session=None, number=0):
    """Ask for a model, in a session of its own; the request and the session."""
    session = session or client.post("create_session", {})[1]["session_id"]
    request = {"session_id": session, "model_seq_id": number, "base_model": base, "lora_config": {"rank": rank}}
    return client.post("create_model", request)[1], session


def wait_for_answer(client, request):
    while (answer := client.post("retrieve_future", request)[1]).get("type") == "try_again":
        pass
    return answer


def train(client, message, model, first=1, steps=3) -> list[float]:
    """Losses and gradient norms of steps that begin with the request `first`."""
    numbers = []
    for number in range(first, first + 2 * steps, 2):
        numbers.append(loss(client.complete("forward_backward", message(model, number, tokens=[5, 6, 7, number]))))
        numbers.append(client.complete("optim_step", {"model_id": model, "seq_id": number + 1, **STEP})["metrics"]["grad_norm"])
    return numbers


def test_two_clients_at_once_have_the_bits_of_each_alone(start_server, settings):
    """Samples, losses, gradient norms and exported adapters, by the real SDK: ranks, seeds and rates differ, and requests alternate."""
    with start_server() as both, start_server() as one, start_server() as other:
        process = start_sdk_script("sdk_together.py", both.address, "ab", one.address, "a", other.address, "b")
        output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, output + errors
    together, alone = {}, {}
    for place, line in enumerate(output.splitlines()):
        kind, record = json.loads(line)
        (together if place < 2 else alone)[kind] = record
    assert together.keys() == alone.keys() == {"a", "b"}
    for kind, record in together.items():
        assert record[:-1] == alone[kind][:-1]
        assert record[-1] != alone[kind][-1]
        assert read_export(settings, record[-1]) == read_export(settings, alone[kind][-1])
    assert together["a"][:-1] != together["b"][:-1]


ON_MEGATRON = {"backend": {"use": "megatron", "tensor_parallel": 2}, "run": {"launch": "ray", "ranks": 2}}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("other_client", [{"tables": ON_MEGATRON}], indirect=True, ids=[""])
def test_two_clients_at_once_have_the_bits_of_each_alone_on_megatrons_ranks(without_ray, other_client, settings):
    address = other_client.address
    process = start_sdk_script("sdk_together.py", address, "ab", address, "a", address, "b")
    output, errors = process.communicate(timeout=800)
    assert process.returncode == 0, output + errors
    records = [json.loads(line) for line in output.splitlines()]
    together, alone = dict(records[:2]), dict(records[2:])
    assert together.keys() == alone.keys() == {"a", "b"}
    for kind, (*numbers, path) in together.items():
        assert numbers == alone[kind][:-1]
        assert read_export(settings, path) == read_export(settings, alone[kind][-1])
    assert together["a"][:-1] != together["b"][:-1]


@pytest.mark.parametrize("other_client", [{"session_seconds": 3.0}], indirect=True, ids=[""])
def test_the_model_of_a_killed_client_goes_and_another_keeps_its_bits(other_client, start_server, message, settings):
    process = start_sdk_script("sdk_together.py", other_client.address, "vanish")
    line = process.stdout.readline()
    model, numbers = other_client.open_model(rank=2), []
    session, finished = model.split(":")[0], threading.Event()

    def beat():
        while not finished.wait(0.5):
            other_client.post("session_heartbeat", {"session_id": session})

    beating = threading.Thread(target=beat)
    beating.start()
    numbers += train(other_client, message, model)
    runs = other_client.post("training_runs?limit=1000", None, method="GET")[1]["training_runs"]
    assert [each["lora_rank"] for each in runs[:2]] == [4, 2]
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert line == "under way\n", errors
    numbers += train(other_client, message, model, first=7)
    deadline = time.monotonic() + 60
    while other_client.post("sessions", None, method="GET")[1]["sessions"] != [session] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert other_client.post("get_info", {"model_id": runs[0]["training_run_id"]})[0] == 404
    numbers += train(other_client, message, model, first=13)
    path = other_client.complete("save_weights", {"model_id": model, "seq_id": 19, "path": "end"})["path"]
    finished.set()
    beating.join()
    with start_server() as alone:
        # another server over the same directory has what either of them saved
        listed = alone.post("checkpoints?limit=1000", None, method="GET")[1]["checkpoints"]
        assert path in [each["tinker_path"] for each in listed]
        own = alone.open_model(rank=2)
        assert train(alone, message, own, steps=9) == numbers
        assert read_export(settings, path) == read_export(
            settings, alone.complete("save_weights", {"model_id": own, "seq_id": 19, "path": "end"})["path"]
        )


@pytest.mark.parametrize("other_client", [{"weight_sets": 0}], indirect=True, ids=[""])
def test_without_room_for_copies_a_checkpoint_is_sampled_from_the_model_that_has_its_weights(other_client, message):
    """The one of two sets of adapters that saved it answers, until its next step; the base model is the host's present weights."""
    model, other_model_id = other_client.open_model(rank=4), other_client.open_model(rank=2)
    train(other_client, message, model, steps=1)
    path = other_client.complete("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "now"})["path"]
    session = other_client.post("create_session", {})[1]["session_id"]

    def sample_logprobs(number, **request):
        request = {"session_id": session, "sampling_session_seq_id": number, **request}
        sampler = other_client.post("create_sampling_session", request)[1]["sampling_session_id"]
        return logprobs_by(sampler)

    def logprobs_by(sampler):
        request = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [5, 6, 7, 8]}]}}
        answer = other_client.complete("asample", {**request, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True})
        return answer["error"] if isinstance(answer, dict) else CLASSES["SampleResponse"].FromString(answer).prompt_logprobs

    base = sample_logprobs(0, base_model="tiny")
    assert sample_logprobs(1, model_path=path) == logprobs_by(other_client.sampler(model, 4)) != base
    assert logprobs_by(other_client.sampler(other_model_id, 1)) == base
    train(other_client, message, model, first=5, steps=1)
    assert "needs serve.weight_sets of 1 or more" in sample_logprobs(2, model_path=path)
    for identifier in (model, other_model_id, session):
        other_client.finish(identifier)


@pytest.mark.parametrize("other_client", [{"tables": {"run": {"launch": "ray", "ranks": 2}}}], indirect=True, ids=[""])
def test_models_whose_ranks_ended_are_in_nobodys_way(without_ray, other_client, message):
    """A rank dies, and two sets of adapters with it; the next client has ranks of its own, while the two are still there."""
    others = multiprocessing.active_children()
    broken = [other_client.open_model(rank=2), other_client.open_model(rank=4)]
    ranks = [each for each in multiprocessing.active_children() if each not in others]
    assert len(ranks) == 2
    ranks[-1].kill()
    assert "died" in other_client.complete("forward_backward", message(broken[0], 1))["error"]
    for model in broken:
        answer = other_client.complete("forward_backward", message(model, 2 if model == broken[0] else 1))
        assert "takes no requests any more: all its ranks were ended after a failure" in answer["error"]
        assert answer["category"] == "user"
    model = other_client.open_model(rank=2)
    assert loss(other_client.complete("forward_backward", message(model, 1))) > 0
    for each in (*broken, model):
        other_client.finish(each)


@pytest.mark.parametrize(("left_out", "kept"), [("train_mlp", "self_attn"), ("train_attn", "mlp")])
def test_adapters_sit_where_the_client_wants_them(client, message, settings, left_out, kept):
    """The checkpoint says it, so that a model goes on from it; a model with other adapters does not."""
    session = client.post("create_session", {})[1]["session_id"]
    request = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2, left_out: False}}
    model = client.complete("create_model", request)["model_id"]
    train(client, message, model, steps=1)
    path = client.complete("save_weights", {"model_id": model, "seq_id": 3, "path": "one"})["path"]
    adapter = load(read_export(settings, path))
    assert adapter
    assert all(f".{kept}." in name for name in adapter)
    info = client.post("weights_info", {"tinker_path": path})[1]
    assert {name: value for name, value in info.items() if name.startswith("train_")} == {
        "train_attn": left_out != "train_attn",
        "train_mlp": left_out != "train_mlp",
        "train_unembed": False,
    }
    load_request = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    assert client.complete("load_weights", load_request) == {"type": "load_weights", "path": path}
    losses = [
        loss(client.complete("forward_backward", message(each, number))) for each, number in ((model, 4), (f"{session}:train:1", 1))
    ]
    assert losses[0] == losses[1]
    other = client.open_model(rank=2)
    refused = client.complete("load_weights", {"model_id": other, "seq_id": 1, "path": path, "optimizer": True})
    assert "adapters on" in refused["error"]
    for each in (session, other):
        client.finish(each)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 2, "train_attn": False, "train_mlp": False}, "set train_attn or train_mlp"),
        ({"rank": 0, "train_attn": False}, "full weights (rank 0) are trained in all layers"),
    ],
)
def test_layers_that_cannot_be_trained_alone_are_refused(client, lora, words):
    session = client.post("create_session", {})[1]["session_id"]
    request = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    answer = client.complete("create_model", request)
    assert words in answer["error"]
    assert answer["category"] == "user"
    client.finish(session)


def test_samplers_checkpoints_and_losses_are_a_models_own(client, message):
    """Beside another one: pinned, named and in-flight samplers, a state with its optimizer, and an in-place load."""
    one, other = client.open_model(rank=4), client.open_model(rank=2)
    numbers = {one: iter(range(1, 100)), other: iter(range(1, 100))}

    def logprobs(sampler):
        request = {"sampling_session_id": sampler, "seq_id": next(seq), "prompt": {"chunks": [{"tokens": [5, 6, 7, 8]}]}}
        answer = client.complete("asample", {**request, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True})
        return np.frombuffer(CLASSES["SampleResponse"].FromString(answer).prompt_logprobs, "<f4")[1:]

    def sampler(model, **more):
        request = {"model_id": model, "seq_id": next(numbers[model]), **more}
        return client.complete("save_weights_for_sampler", request)["sampling_session_id"]

    def step(model, **more):
        client.complete("forward_backward", message(model, next(numbers[model]), **more))
        assert (
            client.complete("optim_step", {"model_id": model, "seq_id": next(numbers[model]), **STEP})["metrics"]["grad_norm"] > 0
        )

    seq = iter(range(1000))
    session = client.post("create_session", {})[1]["session_id"]
    session_answer = client.post(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    )[1]
    base = logprobs(session_answer["sampling_session_id"])
    step(one, loss="cross_entropy")
    pinned, flying = sampler(one), {each: sampler(each, kind="inflight") for each in (one, other)}
    before = logprobs(pinned)
    assert np.array_equal(logprobs(flying[one]), before)
    assert np.array_equal(logprobs(flying[other]), base), "adapters that were not stepped change nothing"
    assert not np.array_equal(before, base)
    state = client.complete("save_weights", {"model_id": one, "seq_id": next(numbers[one]), "path": "one"})["path"]
    step(other)
    step(one)
    step(other)
    assert np.array_equal(logprobs(pinned), before)
    assert np.array_equal(logprobs(flying[other]), base), "nobody published since"
    assert np.array_equal(logprobs(session_answer["sampling_session_id"]), base)
    refused = client.complete("load_weights", {"model_id": other, "seq_id": next(numbers[other]), "path": state, "optimizer": True})
    assert "the checkpoint is of tiny with rank 4" in refused["error"]
    other_logprobs = logprobs(sampler(other))
    for optimizer in (True, False):
        loaded = {"model_id": one, "seq_id": next(numbers[one]), "path": state, "optimizer": optimizer}
        assert client.complete("load_weights", loaded)["path"] == state
        assert np.allclose(logprobs(sampler(one)), before, rtol=0, atol=1e-6)
    assert np.array_equal(logprobs(sampler(other)), other_logprobs)
    # a third model goes on from the first one's checkpoint
    load_request = {"session_id": session, "model_seq_id": 0, "path": state, "optimizer": True}
    assert client.complete("load_weights", load_request)["path"] == state
    numbers[f"{session}:train:0"] = iter(range(1, 100))
    assert np.allclose(logprobs(sampler(f"{session}:train:0")), before, rtol=0, atol=1e-6)
    for each in (one, other, session):
        client.finish(each)


def test_a_damaged_checkpoint_is_refused_and_a_whole_one_goes_on_in_its_place(client, message, settings):
    model = client.open_model(rank=2)
    train(client, message, model, steps=1)
    numbers = iter(range(3, 100))
    damaged, whole = (
        client.complete("save_weights", {"model_id": model, "seq_id": next(numbers), "path": name})["path"]
        for name in ("damaged", "whole")
    )
    (Address.read(damaged).folder(settings.directory) / "model" / "adapter_model.safetensors").write_bytes(b"cut off")
    request = {"model_id": model, "path": damaged, "optimizer": False}
    error = client.complete("load_weights", {**request, "seq_id": next(numbers)})["error"]
    assert f"{damaged} cannot be read" in error
    assert client.complete("forward_backward", message(model, next(numbers)))["error"] == f"the model could not be opened: {error}"
    assert client.complete("load_weights", {**request, "path": whole, "seq_id": next(numbers)})["path"] == whole
    assert train(client, message, model, first=next(numbers), steps=1)[1] > 0
    client.finish(model)


@pytest.mark.parametrize("other_client", [{"max_models": 2, "models": "two"}], indirect=True, ids=[""])
def test_who_has_no_place_is_told_why(other_client, message):
    """Two sets of adapters and no third, nothing of full weights with them, and no other base; what ends gives its place away."""
    client = other_client
    first, second = client.open_model(rank=2), client.open_model(rank=4)
    sessions = [each.split(":")[0] for each in (first, second)]
    refusals = [
        (3, "tiny", "2 models are there, and this server trains 2 at once (serve.max_models)"),
        (0, "tiny", "full weights share"),
    ]
    refusals.append((3, "other", "this server has one base model at a time, and trains tiny"))
    for rank, base, words in refusals:
        promise, third = request_model(client, rank, base)
        # it waits for signs of life: of both, for a place; of one, for all of the ranks
        for each in sessions:
            client.post("session_heartbeat", {"session_id": each})
        assert words in wait_for_answer(client, promise)["error"]
        client.finish(third)
    promise, _ = request_model(client, 3, session=sessions[0], number=1)
    waiting, late = request_model(client, 8)
    client.post("session_heartbeat", {"session_id": sessions[0]})
    unload = client.post("unload_model", {"model_id": second})[1]
    assert client.post("unload_model", {"model_id": second})[1] == unload
    assert wait_for_answer(client, unload) == {"type": "unload_model", "model_id": second}
    assert client.post("get_info", {"model_id": second})[0] == 404
    # whoever waits longest has the place; the other waits on
    assert wait_for_answer(client, promise)["model_id"] == f"{sessions[0]}:train:1"
    client.finish(sessions[0])
    assert wait_for_answer(client, waiting)["model_id"] == f"{late}:train:0"
    assert train(client, message, f"{late}:train:0", steps=1)[1] > 0
    client.finish(late)
    promise, session = request_model(client, 0, "other")
    assert "model_id" in wait_for_answer(client, promise)
    promise, fourth = request_model(client, 2)
    client.post("session_heartbeat", {"session_id": session})
    assert "full weights share nothing, so there is one model at a time" in wait_for_answer(client, promise)["error"]
    for each in (session, fourth):
        client.finish(each)


@pytest.mark.parametrize(
    ("backend", "ranks", "words"),
    [
        ({}, (2, 3), None),
        ({}, (0, 2), "full weights share nothing, so there is one model at a time, and one is there"),
        ({}, (2, 0), "full weights share nothing"),
        ({"use": "deepspeed"}, (2, 2), "this backend trains one set of adapters, so there is one model at a time"),
        ({"use": "fsdp", "cpu_offload": True}, (2, 2), "this backend trains one set of adapters"),
    ],
    ids=["two sets", "a set with full weights", "full weights with a set", "no sets", "no sets in this layout"],
)
def test_a_place_depends_on_what_the_backend_declares(settings, backend, ranks, words):
    tables = attrs.evolve(settings, tables={"backend": backend} if backend else {})
    models = [ServedModel(tables, name, "tiny", rank) for name, rank in zip(("one", "other"), ranks, strict=True)]
    reason = ModelSlots(tables)._explain_conflict(models[1], models[:1])
    assert reason is None if words is None else words in reason


def test_turns_are_given_in_the_order_in_which_they_are_asked_for():
    """A thread that asks again at once comes after those that wait."""
    turns, order, waiting = FairLock(), [], []

    def take(name):
        with turns:
            order.append(name)

    with turns:
        for name in "abc":
            waiting.append(threading.Thread(target=take, args=(name,)))
            waiting[-1].start()
            while len(turns._waiting) < len(waiting):
                time.sleep(0.001)
    take("again")
    for thread in waiting:
        thread.join()
    assert order == ["a", "b", "c", "again"]


TEACHER = {"models": "two", "sampling_only": ["other"]}


def sampler_of(client, base, session=None):
    """A sampler of a base model, and its session."""
    session = session or client.post("create_session", {})[1]["session_id"]
    request = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base}
    return client.post("create_sampling_session", request)[1]["sampling_session_id"], session


def score(client, sampler, number=0):
    """Log-probabilities of a prompt by a sampler, as compute_logprobs of the SDK asks for them, and tokens that it samples."""
    request = {
        "sampling_session_id": sampler,
        "seq_id": number,
        "prompt": {"chunks": [{"tokens": [5, 6, 7, 8]}]},
        "prompt_logprobs": True,
    }
    answer = client.complete("asample", {**request, "sampling_params": {"max_tokens": 3, "seed": 1}})
    assert isinstance(answer, bytes), answer
    response = CLASSES["SampleResponse"].FromString(answer)
    return response.prompt_logprobs, response.sequences[0].tokens


@pytest.mark.parametrize("rank", [0, 2], ids=["full weights", "adapters"])
@pytest.mark.parametrize("other_client", [TEACHER], indirect=True, ids=[""])
def test_a_model_for_sampling_alone_scores_beside_one_that_is_trained(
    other_client, start_server, serving_of, message, settings, other_model, rank
):
    """It has the bits that it has alone, and so has the model that is trained; it comes and goes with those who sample from it."""
    alone_settings = attrs.evolve(settings, serve=attrs.evolve(settings.serve, models={"other": str(other_model)}))
    with serving_of(alone_settings) as alone:
        expected = score(alone, sampler_of(alone, "other")[0])
    with start_server() as alone:
        expected_training = train(alone, message, alone.open_model(rank))
    model = other_client.open_model(rank)
    teacher, session = sampler_of(other_client, "other")
    student, _ = sampler_of(other_client, "tiny", model.split(":")[0])
    numbers = []
    for step in range(3):
        assert score(other_client, teacher, step) == expected
        assert score(other_client, student, step) != expected
        numbers += train(other_client, message, model, first=1 + 2 * step, steps=1)
    assert numbers == expected_training
    # both at once, whoever comes first
    promises = [
        other_client.post(
            "asample",
            {
                "sampling_session_id": teacher,
                "seq_id": 100 + each,
                "prompt": {"chunks": [{"tokens": [5]}]},
                "sampling_params": {"max_tokens": 20},
            },
        )[1]
        for each in range(4)
    ]
    numbers += train(other_client, message, model, first=7, steps=1)
    assert all(isinstance(other_client.wait_for(promise), bytes) for promise in promises)
    other_client.finish(session)
    again, session = sampler_of(other_client, "other")
    assert score(other_client, again) == expected
    other_client.finish(model)
    assert score(other_client, again, 1) == expected
    other_client.finish(session)


@pytest.mark.parametrize("other_client", [TEACHER], indirect=True, ids=[""])
def test_a_model_for_sampling_alone_is_listed_and_refused_for_training_by_name(other_client, settings):
    capable = other_client.post("get_server_capabilities", None, method="GET")[1]["supported_models"]
    assert [(each["model_name"], each["trainable"], each["sampleable"]) for each in capable] == [
        ("tiny", True, True),
        ("other", False, True),
    ]
    session = other_client.post("create_session", {})[1]["session_id"]
    words = "other is for sampling alone here (trainable = false in serve.models); models that can be trained: tiny"
    for request in (request_model(other_client, 2, "other"), request_model(other_client, 0, "other")):
        answer = wait_for_answer(other_client, request[0])
        assert (answer["error"], answer["category"]) == (words, "user")
    # a checkpoint of the time when it could be trained
    address = Address(f"{'c' * 32}:train:0", "weights", "old")
    with write_checkpoint(settings.directory, address, Facts("other", 2, 1, 1.0), overwrite=True) as folder:
        (folder / "model").mkdir()
    answer = other_client.complete(
        "load_weights", {"session_id": session, "model_seq_id": 0, "path": address.path, "optimizer": False}
    )
    assert answer["error"] == words
    delete(settings.directory, address)


@pytest.mark.parametrize("other_client", [TEACHER], indirect=True, ids=[""])
def test_a_model_for_sampling_alone_takes_no_slot_and_gives_way_to_nobody(other_client):
    """Models of full weights close what is in their way, and it is not."""
    teacher, session = sampler_of(other_client, "other")
    expected = score(other_client, teacher)
    text = metrics_of(other_client)
    for number, rank in enumerate((2, 0, 2)):
        model = other_client.open_model(rank)
        assert score(other_client, teacher, 1 + number) == expected
        other_client.finish(model)
    opened = [line for line in text.splitlines() if line.startswith("skyrl_engine_tinker_models ")]
    assert opened == ["skyrl_engine_tinker_models 0.0"]
    other_client.finish(session)


@pytest.mark.parametrize("other_client", [{**TEACHER, "tables": {"run": {"launch": "ray"}}}], indirect=True, ids=[""])
def test_a_model_for_sampling_alone_stays_on_ray_when_the_one_that_started_it_ends(without_ray, other_client, message):
    model = other_client.open_model(2)
    teacher, session = sampler_of(other_client, "other")
    expected = score(other_client, teacher)
    train(other_client, message, model, steps=1)
    other_client.finish(model)
    assert score(other_client, teacher, 1) == expected
    other_client.finish(session)


def metrics_of(client) -> str:
    request = urllib.request.Request(f"{client.address}/metrics", headers={"X-API-Key": "tml-test"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def test_a_lock_that_is_released_meanwhile_is_had_by_whoever_waited():
    turns, order = FairLock(), []

    def take():
        with turns:
            order.append("other")

    waiting = threading.Thread(target=take)
    with turns:
        waiting.start()
        while not turns._waiting:
            time.sleep(0.001)
        with turns.release_meanwhile():
            waiting.join(30)
        order.append("own")
    assert order == ["other", "own"]
