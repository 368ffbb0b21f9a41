"""Several models at once: sets of adapters over one base, each with the bits that it has alone; who has no place, and why."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import numpy as np
import pytest
from safetensors.numpy import load

from skyrl_engine_tinker.checkpoints import Address
from skyrl_engine_tinker.fair_lock import FairLock
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.slots import ModelSlots
from skyrl_engine_tinker.wire import CLASSES

SDK = os.environ.get("TINKER_SDK")
STEP = {"adam_params": {"learning_rate": 1e-1}}


def of_the_sdk(script, *arguments):
    """A script of the SDK in a process of its own."""
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-test", **({"PYTHONPATH": SDK} if SDK else {})}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def loss(answer) -> float:
    return CLASSES["ForwardBackwardOutput"].FromString(answer).metrics["loss:sum"]


def exported(settings, path) -> bytes:
    return (Address.read(path).folder(settings.directory) / "model" / "adapter_model.safetensors").read_bytes()


def created(client, rank=0, base="tiny", session=None, number=0):
    """Ask for a model, in a session of its own; the request and the session."""
    session = session or client.post("create_session", {})[1]["session_id"]
    asked = {"session_id": session, "model_seq_id": number, "base_model": base, "lora_config": {"rank": rank}}
    return client.post("create_model", asked)[1], session


def answer_of(client, request):
    while (answer := client.post("retrieve_future", request)[1]).get("type") == "try_again":
        pass
    return answer


def trained(client, message, model, first=1, steps=3) -> list[float]:
    """Losses and gradient norms of steps that begin with the request `first`."""
    found = []
    for number in range(first, first + 2 * steps, 2):
        found.append(loss(client.done("forward_backward", message(model, number, tokens=[5, 6, 7, number]))))
        found.append(client.done("optim_step", {"model_id": model, "seq_id": number + 1, **STEP})["metrics"]["grad_norm"])
    return found


def test_two_clients_at_once_have_the_bits_of_each_alone(started, settings):
    """Samples, losses, gradient norms and exported adapters, by the real SDK: ranks, seeds and rates differ, and requests alternate."""
    with started() as both, started() as one, started() as other:
        process = of_the_sdk("sdk_together.py", both.address, "ab", one.address, "a", other.address, "b")
        output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, output + errors
    together, alone = {}, {}
    for place, line in enumerate(output.splitlines()):
        kind, told = json.loads(line)
        (together if place < 2 else alone)[kind] = told
    assert together.keys() == alone.keys() == {"a", "b"}
    for kind, told in together.items():
        assert told[:-1] == alone[kind][:-1]
        assert told[-1] != alone[kind][-1]
        assert exported(settings, told[-1]) == exported(settings, alone[kind][-1])
    assert together["a"][:-1] != together["b"][:-1]


@pytest.mark.parametrize("other_client", [{"session_seconds": 3.0}], indirect=True, ids=[""])
def test_the_model_of_a_killed_client_goes_and_another_keeps_its_bits(other_client, started, message, settings):
    process = of_the_sdk("sdk_together.py", other_client.address, "vanish")
    line = process.stdout.readline()
    model, kept = other_client.opened(rank=2), []
    session, done = model.split(":")[0], threading.Event()

    def beat():
        while not done.wait(0.5):
            other_client.post("session_heartbeat", {"session_id": session})

    beating = threading.Thread(target=beat)
    beating.start()
    kept += trained(other_client, message, model)
    found = other_client.post("training_runs?limit=1000", None, method="GET")[1]["training_runs"]
    assert [each["lora_rank"] for each in found[:2]] == [4, 2]
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert line == "under way\n", errors
    kept += trained(other_client, message, model, first=7)
    deadline = time.monotonic() + 60
    while other_client.post("sessions", None, method="GET")[1]["sessions"] != [session] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert other_client.post("get_info", {"model_id": found[0]["training_run_id"]})[0] == 404
    kept += trained(other_client, message, model, first=13)
    path = other_client.done("save_weights", {"model_id": model, "seq_id": 19, "path": "end"})["path"]
    done.set()
    beating.join()
    with started() as alone:
        # another server over the same directory has what either of them saved
        listed = alone.post("checkpoints?limit=1000", None, method="GET")[1]["checkpoints"]
        assert path in [each["tinker_path"] for each in listed]
        own = alone.opened(rank=2)
        assert trained(alone, message, own, steps=9) == kept
        assert exported(settings, path) == exported(
            settings, alone.done("save_weights", {"model_id": own, "seq_id": 19, "path": "end"})["path"]
        )


@pytest.mark.parametrize("other_client", [{"weight_sets": 0}], indirect=True, ids=[""])
def test_without_room_for_copies_a_checkpoint_is_sampled_from_the_model_that_has_its_weights(other_client, message):
    """The one of two sets of adapters that saved it answers, until its next step; the base model is the host's present weights."""
    model, other_model_id = other_client.opened(rank=4), other_client.opened(rank=2)
    trained(other_client, message, model, steps=1)
    path = other_client.done("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "now"})["path"]
    session = other_client.post("create_session", {})[1]["session_id"]

    def answered(number, **asked):
        asked = {"session_id": session, "sampling_session_seq_id": number, **asked}
        sampler = other_client.post("create_sampling_session", asked)[1]["sampling_session_id"]
        return logprobs_by(sampler)

    def logprobs_by(sampler):
        asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [5, 6, 7, 8]}]}}
        answer = other_client.done("asample", {**asked, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True})
        return answer["error"] if isinstance(answer, dict) else CLASSES["SampleResponse"].FromString(answer).prompt_logprobs

    base = answered(0, base_model="tiny")
    assert answered(1, model_path=path) == logprobs_by(other_client.sampler(model, 4)) != base
    assert logprobs_by(other_client.sampler(other_model_id, 1)) == base
    trained(other_client, message, model, first=5, steps=1)
    assert "needs serve.weight_sets of 1 or more" in answered(2, model_path=path)
    for each in (model, other_model_id, session):
        other_client.finish(each)


@pytest.mark.parametrize("other_client", [{"tables": {"run": {"launch": "ray", "ranks": 2}}}], indirect=True, ids=[""])
def test_models_whose_ranks_ended_are_in_nobodys_way(without_ray, other_client, message):
    """A rank dies, and two sets of adapters with it; the next client has ranks of its own, while the two are still there."""
    others = multiprocessing.active_children()
    lost = [other_client.opened(rank=2), other_client.opened(rank=4)]
    ranks = [each for each in multiprocessing.active_children() if each not in others]
    assert len(ranks) == 2
    ranks[-1].kill()
    assert "died" in other_client.done("forward_backward", message(lost[0], 1))["error"]
    for model in lost:
        told = other_client.done("forward_backward", message(model, 2 if model == lost[0] else 1))
        assert "takes no requests any more: all its ranks were ended after a failure" in told["error"]
        assert told["category"] == "user"
    model = other_client.opened(rank=2)
    assert loss(other_client.done("forward_backward", message(model, 1))) > 0
    for each in (*lost, model):
        other_client.finish(each)


@pytest.mark.parametrize(("left_out", "kept"), [("train_mlp", "self_attn"), ("train_attn", "mlp")])
def test_adapters_sit_where_the_client_wants_them(client, message, settings, left_out, kept):
    """The checkpoint says it, so that a model goes on from it; a model with other adapters does not."""
    session = client.post("create_session", {})[1]["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2, left_out: False}}
    model = client.done("create_model", asked)["model_id"]
    trained(client, message, model, steps=1)
    path = client.done("save_weights", {"model_id": model, "seq_id": 3, "path": "one"})["path"]
    adapter = load(exported(settings, path))
    assert adapter
    assert all(f".{kept}." in name for name in adapter)
    info = client.post("weights_info", {"tinker_path": path})[1]
    assert {name: value for name, value in info.items() if name.startswith("train_")} == {
        "train_attn": left_out != "train_attn",
        "train_mlp": left_out != "train_mlp",
        "train_unembed": False,
    }
    again = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    assert client.done("load_weights", again) == {"type": "load_weights", "path": path}
    losses = [
        loss(client.done("forward_backward", message(each, number))) for each, number in ((model, 4), (f"{session}:train:1", 1))
    ]
    assert losses[0] == losses[1]
    other = client.opened(rank=2)
    refused = client.done("load_weights", {"model_id": other, "seq_id": 1, "path": path, "optimizer": True})
    assert "adapters on" in refused["error"]
    for each in (session, other):
        client.finish(each)


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"rank": 2, "train_attn": False, "train_mlp": False}, "set train_attn or train_mlp"),
        ({"rank": 2, "train_mlp": "no"}, "train_mlp is 'no'; it must be true or false"),
        ({"rank": 0, "train_attn": False}, "full weights (rank 0) are trained in all layers"),
    ],
)
def test_layers_that_cannot_be_trained_alone_are_refused(client, lora, told):
    session = client.post("create_session", {})[1]["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    answer = client.done("create_model", asked)
    assert told in answer["error"]
    assert answer["category"] == "user"
    client.finish(session)


def test_samplers_checkpoints_and_losses_are_a_models_own(client, message):
    """Beside another one: pinned, named and in-flight samplers, a state with its optimizer, and an in-place load."""
    one, other = client.opened(rank=4), client.opened(rank=2)
    numbers = {one: iter(range(1, 100)), other: iter(range(1, 100))}

    def logprobs(sampler):
        asked = {"sampling_session_id": sampler, "seq_id": next(seq), "prompt": {"chunks": [{"tokens": [5, 6, 7, 8]}]}}
        answer = client.done("asample", {**asked, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True})
        return np.frombuffer(CLASSES["SampleResponse"].FromString(answer).prompt_logprobs, "<f4")[1:]

    def sampler(model, **more):
        asked = {"model_id": model, "seq_id": next(numbers[model]), **more}
        return client.done("save_weights_for_sampler", asked)["sampling_session_id"]

    def step(model, **more):
        client.done("forward_backward", message(model, next(numbers[model]), **more))
        assert client.done("optim_step", {"model_id": model, "seq_id": next(numbers[model]), **STEP})["metrics"]["grad_norm"] > 0

    seq = iter(range(1000))
    session = client.post("create_session", {})[1]["session_id"]
    made = client.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"})[1]
    base = logprobs(made["sampling_session_id"])
    step(one, loss="cross_entropy")
    pinned, flying = sampler(one), {each: sampler(each, kind="inflight") for each in (one, other)}
    before = logprobs(pinned)
    assert np.array_equal(logprobs(flying[one]), before)
    assert np.array_equal(logprobs(flying[other]), base), "adapters that were not stepped change nothing"
    assert not np.array_equal(before, base)
    state = client.done("save_weights", {"model_id": one, "seq_id": next(numbers[one]), "path": "one"})["path"]
    step(other)
    step(one)
    step(other)
    assert np.array_equal(logprobs(pinned), before)
    assert np.array_equal(logprobs(flying[other]), base), "nobody published since"
    assert np.array_equal(logprobs(made["sampling_session_id"]), base)
    refused = client.done("load_weights", {"model_id": other, "seq_id": next(numbers[other]), "path": state, "optimizer": True})
    assert "the checkpoint is of tiny with rank 4" in refused["error"]
    kept = logprobs(sampler(other))
    for optimizer in (True, False):
        loaded = {"model_id": one, "seq_id": next(numbers[one]), "path": state, "optimizer": optimizer}
        assert client.done("load_weights", loaded)["path"] == state
        assert np.allclose(logprobs(sampler(one)), before, rtol=0, atol=1e-6)
    assert np.array_equal(logprobs(sampler(other)), kept)
    # a third model goes on from the first one's checkpoint
    again = {"session_id": session, "model_seq_id": 0, "path": state, "optimizer": True}
    assert client.done("load_weights", again)["path"] == state
    numbers[f"{session}:train:0"] = iter(range(1, 100))
    assert np.allclose(logprobs(sampler(f"{session}:train:0")), before, rtol=0, atol=1e-6)
    for each in (one, other, session):
        client.finish(each)


def test_a_damaged_checkpoint_is_refused_and_a_whole_one_goes_on_in_its_place(client, message, settings):
    model = client.opened(rank=2)
    trained(client, message, model, steps=1)
    numbers = iter(range(3, 100))
    damaged, whole = (
        client.done("save_weights", {"model_id": model, "seq_id": next(numbers), "path": name})["path"]
        for name in ("damaged", "whole")
    )
    (Address.read(damaged).folder(settings.directory) / "model" / "adapter_model.safetensors").write_bytes(b"cut off")
    asked = {"model_id": model, "path": damaged, "optimizer": False}
    told = client.done("load_weights", {**asked, "seq_id": next(numbers)})["error"]
    assert f"{damaged} cannot be read" in told
    assert client.done("forward_backward", message(model, next(numbers)))["error"] == f"the model could not be opened: {told}"
    assert client.done("load_weights", {**asked, "path": whole, "seq_id": next(numbers)})["path"] == whole
    assert trained(client, message, model, first=next(numbers), steps=1)[1] > 0
    client.finish(model)


@pytest.mark.parametrize("other_client", [{"max_models": 2, "models": "two"}], indirect=True, ids=[""])
def test_who_has_no_place_is_told_why(other_client, message):
    """Two sets of adapters and no third, nothing of full weights with them, and no other base; what ends gives its place away."""
    client = other_client
    first, second = client.opened(rank=2), client.opened(rank=4)
    sessions = [each.split(":")[0] for each in (first, second)]
    refusals = [
        (3, "tiny", "2 models are there, and this server trains 2 at once (serve.max_models)"),
        (0, "tiny", "full weights share"),
    ]
    refusals.append((3, "other", "this server has one base model at a time, and trains tiny"))
    for rank, base, told in refusals:
        asked, third = created(client, rank, base)
        # it waits for signs of life: of both, for a place; of one, for all of the ranks
        for each in sessions:
            client.post("session_heartbeat", {"session_id": each})
        assert told in answer_of(client, asked)["error"]
        client.finish(third)
    asked, _ = created(client, 3, session=sessions[0], number=1)
    waiting, late = created(client, 8)
    client.post("session_heartbeat", {"session_id": sessions[0]})
    unload = client.post("unload_model", {"model_id": second})[1]
    assert client.post("unload_model", {"model_id": second})[1] == unload
    assert answer_of(client, unload) == {"type": "unload_model", "model_id": second}
    assert client.post("get_info", {"model_id": second})[0] == 404
    # whoever waits longest has the place; the other waits on
    assert answer_of(client, asked)["model_id"] == f"{sessions[0]}:train:1"
    client.finish(sessions[0])
    assert answer_of(client, waiting)["model_id"] == f"{late}:train:0"
    assert trained(client, message, f"{late}:train:0", steps=1)[1] > 0
    client.finish(late)
    asked, session = created(client, 0, "other")
    assert "model_id" in answer_of(client, asked)
    asked, fourth = created(client, 2)
    client.post("session_heartbeat", {"session_id": session})
    assert "full weights share nothing, so there is one model at a time" in answer_of(client, asked)["error"]
    for each in (session, fourth):
        client.finish(each)


@pytest.mark.parametrize(
    ("backend", "ranks", "told"),
    [
        ({}, (2, 3), None),
        ({}, (0, 2), "full weights share nothing, so there is one model at a time, and one is there"),
        ({}, (2, 0), "full weights share nothing"),
        ({"use": "deepspeed"}, (2, 2), "this backend trains one set of adapters, so there is one model at a time"),
        ({"use": "fsdp", "cpu_offload": True}, (2, 2), "this backend trains one set of adapters"),
    ],
    ids=["two sets", "a set with full weights", "full weights with a set", "no sets", "no sets in this layout"],
)
def test_a_place_depends_on_what_the_backend_declares(settings, backend, ranks, told):
    tables = attrs.evolve(settings, tables={"backend": backend} if backend else {})
    models = [ServedModel(tables, name, "tiny", rank) for name, rank in zip(("one", "other"), ranks, strict=True)]
    reason = ModelSlots(tables)._explain_conflict(models[1], models[:1])
    assert reason is None if told is None else told in reason


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
    for each in waiting:
        each.join()
    assert order == ["a", "b", "c", "again"]
