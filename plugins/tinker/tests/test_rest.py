"""Checkpoints on the disk, samplers across servers, downloads, metrics and the request log, without an SDK."""

import io
import json
import tarfile
import urllib.error
import urllib.request

import attrs
import numpy as np
import pytest
import torch

from skyrl_engine import ModelError
from skyrl_engine_tinker import checkpoints
from skyrl_engine_tinker.checkpoints import FACTS, Address, SavedWeights
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.settings import ServeTable
from skyrl_engine_tinker.wire import CLASSES

PROMPT = {"prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "sampling_params": {"max_tokens": 4, "seed": 3}, "num_samples": 1}


@pytest.fixture(scope="module")
def saved(client, message):
    """Addresses of a state and of a sampler's weights after one step, the model's id, and what a sampler of that step drew."""
    model = client.open_model(rank=4)
    client.post("forward_backward", message(model, 1))
    client.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-1}})
    state = client.complete("save_weights", {"model_id": model, "seq_id": 3, "path": "one"})["path"]
    named = client.complete("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "path": "one"})["path"]
    sampler = client.sampler(model, 5)
    drawn = client.complete("asample", {"sampling_session_id": sampler, "seq_id": 0, **PROMPT})
    client.finish(model)
    return state, named, model, drawn


def sample(client, **request) -> bytes | dict:
    session = client.post("create_session", {})[1]["session_id"]
    answer = client.post("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, **request})[1]
    try:
        return client.complete("asample", {"sampling_session_id": answer["sampling_session_id"], "seq_id": 0, **PROMPT})
    finally:
        client.finish(session)


def logprobs(answer: bytes) -> np.ndarray:
    return np.frombuffer(CLASSES["SampleResponse"].FromString(answer).sequences[0].logprobs, "<f4")


def tokens(answer: bytes) -> bytes:
    return CLASSES["SampleResponse"].FromString(answer).sequences[0].tokens


def test_another_server_samples_from_what_lies_on_the_disk(client, saved, start_server):
    """By either address, and without a training model; a base model gives something else."""
    state, named, _, drawn = saved
    with start_server() as other:
        for path in (state, named):
            assert tokens(answer := sample(other, model_path=path)) == tokens(drawn)
            # adapters are merged in another order of operations
            assert np.allclose(logprobs(answer), logprobs(drawn), rtol=0, atol=1e-5)
        assert not np.allclose(logprobs(sample(other, base_model="tiny")), logprobs(drawn), rtol=0, atol=1e-2)


def test_two_samplers_of_one_path_number_their_requests_each(client, saved):
    session = client.post("create_session", {})[1]["session_id"]
    request = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved[1]}
    one, other = (client.post("create_sampling_session", request)[1]["sampling_session_id"] for _ in range(2))
    assert one != other
    first = client.complete("asample", {"sampling_session_id": one, "seq_id": 0, **PROMPT})
    longer = {**PROMPT, "sampling_params": {"max_tokens": 9, "seed": 4, "stop": []}}
    second = client.complete("asample", {"sampling_session_id": other, "seq_id": 0, **longer})
    assert len(tokens(second)) == 36 != len(tokens(first))
    client.finish(session)


def test_a_sampler_has_what_lies_under_its_path_when_it_is_made(client, message):
    """Beside the model that writes over it, whose base keeps the weights that were read from there before."""
    model = client.open_model(rank=2)
    session = client.post("create_session", {})[1]["session_id"]
    rows = []
    for number in (1, 4):
        client.complete("forward_backward", message(model, number))
        client.complete("optim_step", {"model_id": model, "seq_id": number + 1, "adam_params": {"learning_rate": 1e-1}})
        save_request = {"model_id": model, "seq_id": number + 2, "path": "again", "overwrite": True}
        path = client.complete("save_weights", save_request)["path"]
        sampler_request = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
        sampler = client.post("create_sampling_session", sampler_request)[1]["sampling_session_id"]
        rows.append(logprobs(client.complete("asample", {"sampling_session_id": sampler, "seq_id": 0, **PROMPT})))
    now = client.complete("asample", {"sampling_session_id": client.sampler(model, 7), "seq_id": 0, **PROMPT})
    assert np.allclose(rows[1], logprobs(now), rtol=0, atol=1e-5)
    assert not np.allclose(rows[0], rows[1], rtol=0, atol=1e-2)
    client.finish(session)
    client.finish(model)


@pytest.mark.parametrize("other_client", [{"models": "two"}], indirect=True, ids=[""])
def test_samplers_of_another_base_model_wait_for_their_turn_or_are_refused(other_client):
    """Bases are sampled from one after the other; while a model is in training there is one."""
    answers = [sample(other_client, base_model=name) for name in ("tiny", "other", "tiny")]
    assert answers[0] == answers[2] != answers[1]
    model = other_client.open_model()
    assert "one base model at a time" in sample(other_client, base_model="other")["error"]
    assert isinstance(sample(other_client, base_model="tiny"), bytes)
    other_client.finish(model)


def test_samples_of_another_session_outlive_the_model_that_answers_them(client):
    """Full weights answer samplers of their base model; the calls that are there when their session ends are answered first."""
    model = client.open_model()
    session = client.post("create_session", {})[1]["session_id"]
    request = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = client.post("create_sampling_session", request)[1]["sampling_session_id"]
    longer = {**PROMPT, "sampling_params": {"max_tokens": 60, "seed": 4, "stop": []}}
    promises = [client.post("asample", {"sampling_session_id": sampler, "seq_id": number, **longer})[1] for number in range(20)]
    client.finish(model)
    answers = [client.wait_for(promise) for promise in promises]
    assert {len(tokens(answer)) for answer in answers} == {4 * 60}
    assert len({tokens(answer) for answer in answers}) == 1
    client.finish(session)


@pytest.mark.parametrize("other_client", [{"weight_sets": 0}], indirect=True, ids=[""])
def test_without_weight_sets_other_weights_are_refused(other_client, saved):
    assert "needs serve.weight_sets of 1" in sample(other_client, model_path=saved[1])["error"]
    assert isinstance(sample(other_client, base_model="tiny"), bytes)


def test_where_memory_is_short_fewer_weight_sets_are_kept_and_every_sampler_is_answered(settings, caplog):
    """A device with room for three copies, though the configuration allows eight; from the first refusal on there are two."""
    assert attrs.fields(ServeTable).weight_sets.default == 8
    model = ServedModel(attrs.evolve(settings, serve=attrs.evolve(settings.serve, weight_sets=8)), f"{'0' * 32}:train:0", "tiny", 2)
    model.open()
    samplers, stored = model.samplers, [SavedWeights(settings.serve.models["tiny"], None, str(each), 1.0) for each in range(7)]
    samplers._start_generator()
    sampler, held = model.engine.sampler, set()
    real_load, real_release = sampler.load, sampler.release

    def load(spec, target):
        if target not in held and len(held) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        held.add(target)
        real_load(spec, target)

    sampler.load, sampler.release = load, lambda target: held.discard(target) or real_release(target)
    targets = [samplers._read(each) for each in stored[:3]]
    assert len({*targets}) == len(held) == 3
    for each in (stored[0], *stored[3:]):
        assert samplers._read(each) in held
    assert len(held) == 2
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "memory has room for 3 copies of the model's weights"
    ]
    # another failure is its request's answer, and costs no set
    with pytest.raises(ModelError):
        samplers._read(SavedWeights(str(settings.directory / "no-model"), None, "none", 1.0))
    model.close()


def test_a_checkpoint_whose_time_is_over_is_gone_and_then_deleted(client, message, settings):
    model = client.open_model()
    path = client.complete("save_weights", {"model_id": model, "seq_id": 1, "path": "short", "ttl_seconds": 3600})["path"]
    refused = client.complete("save_weights", {"model_id": model, "seq_id": 2, "path": "shorter", "ttl_seconds": 1})
    assert "ttl_seconds is 1; it must be 3,600 to" in refused["error"]
    client.finish(model)
    folder = Address.read(path).folder(settings.directory)
    facts = json.loads((folder / FACTS).read_text())
    assert 3590 < facts["expires_at"] - facts["time"] < 3610
    (folder / FACTS).write_text(json.dumps({**facts, "expires_at": facts["time"] - 1}))
    listed = client.post("checkpoints?limit=1000", None, method="GET")[1]["checkpoints"]
    assert path not in [checkpoint["tinker_path"] for checkpoint in listed]
    assert client.post("weights_info", {"tinker_path": path})[0] == 422
    assert client.post(f"training_runs/{model}/checkpoints/weights/short", None, method="DELETE")[0] == 404
    assert folder.exists()
    checkpoints.sweep(settings.directory)
    assert not folder.exists()
    assert listed


def test_a_download_is_a_tar_file_of_the_model_and_its_address_a_secret(client, saved, settings):
    state, _, model, _ = saved
    status, answer = client.post(f"training_runs/{model}/checkpoints/weights/one/archive", None, method="GET")
    assert status == 200
    with urllib.request.urlopen(answer["url"], timeout=60) as response:
        downloaded = io.BytesIO(response.read())
    folder = Address.read(state).folder(settings.directory) / "model"
    expected = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with tarfile.open(fileobj=downloaded) as archive:
        assert {name: archive.extractfile(name).read() for name in archive.getnames()} == expected
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(answer["url"][:-1], timeout=60)
    for wrong in ("weights/two/archive", "weights/../archive", "etc/passwd/archive"):
        assert client.post(f"training_runs/{model}/checkpoints/{wrong}", None, method="GET")[0] == 404
    assert client.post(f"training_runs/{model}/checkpoints/weights/one/archive", None, method="GET", key="wrong")[0] == 401


def test_metrics_and_the_log_count_requests_and_hold_nothing_of_them(start_server, message):
    log = io.StringIO()
    passes = ((1, {}), (2, {"loss": "no-such-loss"}), (4, {"count": 2}), (5, {"forward_only": True}))
    with start_server(request_log=log) as client:
        model = client.open_model()
        client.complete("forward_backward", message(model, 1))
        client.complete("forward_backward", message(model, 2, loss="no-such-loss"))
        # the refused pass costs the step
        client.complete("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}})
        output = client.complete("forward_backward", message(model, 4, count=2))
        loss = CLASSES["ForwardBackwardOutput"].FromString(output).metrics["loss:sum"]
        client.complete("forward_backward", message(model, 5, forward_only=True))
        assert "metrics" in client.complete("optim_step", {"model_id": model, "seq_id": 6, "adam_params": {}})
        client.complete("asample", {"sampling_session_id": client.sampler(model, 7), "seq_id": 0, **PROMPT})
        client.post("made-up-call", {})
        client.post("create_session", {}, key="tml-wrong")
        request = urllib.request.Request(f"{client.address}/metrics", headers={"Authorization": "Bearer tml-test"})
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{client.address}/metrics", timeout=60)
        client.finish(model)
        with urllib.request.urlopen(request, timeout=60) as response:
            after = response.read().decode()
    numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    name = "skyrl_engine_tinker"
    assert float(numbers[f'{name}_loss{{slot="0"}}']) == loss
    step_seconds = float(numbers[f"{name}_step_seconds_sum"])
    assert step_seconds > 0
    assert float(numbers[f'{name}_tokens_per_second{{slot="0"}}']) == pytest.approx(6 / step_seconds)
    assert 'slot="0"' not in after, "a model that is gone has no numbers"
    for line in (
        'skyrl_engine_tinker_requests_total{call="forward_backward",status="200"} 4.0',
        'skyrl_engine_tinker_wait_seconds_count{call="forward_backward"} 4.0',
        'skyrl_engine_tinker_wait_seconds_count{call="asample"} 1.0',
        'skyrl_engine_tinker_work_seconds_count{call="optim_step"} 2.0',
        "skyrl_engine_tinker_step_seconds_count 1.0",
        'skyrl_engine_tinker_tokens_total{work="forward_backward"} 9.0',
        'skyrl_engine_tinker_tokens_total{work="forward"} 3.0',
        'skyrl_engine_tinker_tokens_total{work="sample"} 4.0',
        'skyrl_engine_tinker_requests_total{call="unknown",status="404"} 1.0',
        'skyrl_engine_tinker_requests_total{call="create_session",status="401"} 1.0',
        "skyrl_engine_tinker_sessions 1.0",
        "skyrl_engine_tinker_models 1.0",
        "skyrl_engine_tinker_samples_under_way 0.0",
    ):
        assert line in text, text
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert all(line.keys() == {"time", "call", "status", "seconds", "received", "sent"} for line in lines)
    assert [line["call"] for line in lines][:2] == ["create_session", "create_model"]
    assert sum(line["received"] for line in lines if line["call"] == "forward_backward") == sum(
        len(message(model, number, **more)) for number, more in passes
    )
    for secret in (model, "made-up-call", "tml-", "no-such-loss"):
        assert secret not in log.getvalue() + text


def test_health_is_told_without_the_key(client):
    """Under the address that the SDK asks, and under the usual one."""
    assert client.post("healthz", None, method="GET", key="") == (200, {"status": "ok"})
    with urllib.request.urlopen(f"{client.address}/healthz", timeout=60) as response:
        assert json.loads(response.read()) == {"status": "ok"}
