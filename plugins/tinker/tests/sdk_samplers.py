"""Samplers and checkpoints by the real SDK, run in a process of its own: ADDRESS."""

import datetime as dt
import inspect
import io
import sys
import tarfile
import urllib.request
from typing import Any

import numpy as np
import tinker
from sdk_versions import finish, settle
from tinker import types

address = sys.argv[1]
ids = [5, 6, 7, 8, 9, 10, 11]


def refusal(work: Any) -> str:
    try:
        work()
    except tinker.TinkerError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def read_sampler_logprobs(sampler: Any) -> np.ndarray:
    return np.array(sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:])


def is_close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() < 1e-4)


inputs = {"target_tokens": np.array(ids[1:]), "weights": np.ones(6, np.float32)}
tensors = {name: types.TensorData.from_numpy(value) for name, value in inputs.items()}
datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=tensors)


def read_trained_logprobs() -> np.ndarray:
    output = training.forward([datum], "cross_entropy").result()
    return np.array(output.loss_fn_outputs[0]["logprobs"].tolist())


def step() -> None:
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()


# a base model is sampled from before anything is trained, and while one is
service = tinker.ServiceClient(base_url=address)
base = settle(service.create_sampling_client(base_model="tiny"))
fresh = read_sampler_logprobs(base)
training = settle(service.create_lora_training_client(base_model="tiny", rank=4, user_metadata={"recipe": "by hand"}))
assert is_close(read_trained_logprobs(), fresh)
for _ in range(2):
    step()
assert not is_close(read_trained_logprobs(), fresh)
assert is_close(read_sampler_logprobs(base), fresh)
assert "there is no model 'other' here" in refusal(lambda: settle(service.create_sampling_client(base_model="other")))

# named weights are on the disk: other sessions sample from them, whatever is trained since
named = training.save_weights_for_sampler("two").result().path
state = training.save_state("two", ttl_seconds=7200).result().path
two = read_trained_logprobs()
step()
other_service = tinker.ServiceClient(base_url=address)
for path in (named, state):
    sampler = settle(other_service.create_sampling_client(model_path=path))
    assert is_close(read_sampler_logprobs(sampler), two), path
    assert sampler.get_base_model() == "tiny"
assert "there is no checkpoint" in refusal(lambda: settle(other_service.create_sampling_client(model_path=f"{named}x")))

# in-flight samplers have what was published last
if "kind" in inspect.signature(training.save_weights_and_get_sampling_client).parameters:
    first, published = settle(training.save_weights_and_get_sampling_client(kind="inflight")), read_trained_logprobs()
    step()
    assert is_close(read_sampler_logprobs(first), published)
    second = settle(training.save_weights_and_get_sampling_client(kind="inflight"))
    assert not is_close(read_trained_logprobs(), published)
    assert is_close(read_sampler_logprobs(first), read_trained_logprobs())
    assert is_close(read_sampler_logprobs(second), read_trained_logprobs())

# checkpoints, runs, sessions
rest, run = service.create_rest_client(), state.split("/")[2]
checkpoints = {each.tinker_path: each for each in rest.list_checkpoints(run).result().checkpoints}
assert checkpoints[named].checkpoint_type == "sampler"
left = checkpoints[state].expires_at - dt.datetime.now(dt.UTC)
assert 7000 < left.total_seconds() <= 7200, left
rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
rest.set_checkpoint_ttl_from_tinker_path(named, 3600).result()
checkpoints = {each.tinker_path: each for each in rest.list_checkpoints(run).result().checkpoints}
assert checkpoints[state].expires_at is None
assert checkpoints[named].expires_at is not None
assert "ttl_seconds is 10" in refusal(lambda: rest.set_checkpoint_ttl_from_tinker_path(state, 10).result())
run_info = rest.get_training_run_by_tinker_path(state).result()
assert (run_info.training_run_id, run_info.base_model, run_info.lora_rank) == (run, "tiny", 4), run_info
assert run_info.user_metadata == {"recipe": "by hand"}, run_info
assert run_info.last_checkpoint.tinker_path == state
assert run in [each.training_run_id for each in rest.list_training_runs().result().training_runs]
session = service.holder._session_id
assert session in rest.list_sessions().result().sessions
assert rest.get_session(session).result().training_run_ids == [run]

# downloads: files one by one, or as an archive
if hasattr(training, "save_weights_external"):
    external = training.save_weights_external("out").result().path
    urls = rest.get_external_weights_urls(external).result().urls
    assert {"adapter_config.json", "adapter_model.safetensors"} <= urls.keys(), urls
    assert len(urllib.request.urlopen(urls["adapter_model.safetensors"], timeout=60).read()) > 1000
    message = refusal(lambda: training.save_weights_external("secret", age_encryption_recipients=["age1x"]).result())
    assert "encrypts nothing" in message, message
else:
    url = rest.get_checkpoint_archive_url_from_tinker_path(state).result().url
    with tarfile.open(fileobj=io.BytesIO(urllib.request.urlopen(url, timeout=60).read())) as archive:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(archive.getnames()), archive.getnames()
finish(address, service)
# the model is closed, and what is on the disk is sampled from all the same
assert is_close(read_sampler_logprobs(settle(other_service.create_sampling_client(model_path=named))), two)
finish(address, other_service)
print("done")
