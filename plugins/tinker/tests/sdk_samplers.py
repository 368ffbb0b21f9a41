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
from sdk_versions import finish, settled
from tinker import types

address = sys.argv[1]
ids = [5, 6, 7, 8, 9, 10, 11]


def refusal(work: Any) -> str:
    try:
        work()
    except tinker.TinkerError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def seen_by(sampler: Any) -> np.ndarray:
    return np.array(sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:])


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() < 1e-4)


inputs = {"target_tokens": np.array(ids[1:]), "weights": np.ones(6, np.float32)}
tensors = {name: types.TensorData.from_numpy(value) for name, value in inputs.items()}
datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=tensors)


def trained_now() -> np.ndarray:
    output = training.forward([datum], "cross_entropy").result()
    return np.array(output.loss_fn_outputs[0]["logprobs"].tolist())


def step() -> None:
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()


# a base model is sampled from before anything is trained, and while one is
service = tinker.ServiceClient(base_url=address)
base = settled(service.create_sampling_client(base_model="tiny"))
fresh = seen_by(base)
training = settled(service.create_lora_training_client(base_model="tiny", rank=4, user_metadata={"recipe": "by hand"}))
assert close(trained_now(), fresh)
for _ in range(2):
    step()
assert not close(trained_now(), fresh)
assert close(seen_by(base), fresh)
assert "there is no model 'other' here" in refusal(lambda: settled(service.create_sampling_client(base_model="other")))

# named weights lie on the disk: other sessions sample from them, whatever is trained since
named = training.save_weights_for_sampler("two").result().path
state = training.save_state("two", ttl_seconds=7200).result().path
two = trained_now()
step()
elsewhere = tinker.ServiceClient(base_url=address)
for path in (named, state):
    sampler = settled(elsewhere.create_sampling_client(model_path=path))
    assert close(seen_by(sampler), two), path
    assert sampler.get_base_model() == "tiny"
assert "there is no checkpoint" in refusal(lambda: settled(elsewhere.create_sampling_client(model_path=f"{named}x")))

# in-flight samplers have what was published last
if "kind" in inspect.signature(training.save_weights_and_get_sampling_client).parameters:
    first, published = settled(training.save_weights_and_get_sampling_client(kind="inflight")), trained_now()
    step()
    assert close(seen_by(first), published)
    second = settled(training.save_weights_and_get_sampling_client(kind="inflight"))
    assert not close(trained_now(), published)
    assert close(seen_by(first), trained_now())
    assert close(seen_by(second), trained_now())

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
found = rest.get_training_run_by_tinker_path(state).result()
assert (found.training_run_id, found.base_model, found.lora_rank) == (run, "tiny", 4), found
assert found.user_metadata == {"recipe": "by hand"}, found
assert found.last_checkpoint.tinker_path == state
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
    told = refusal(lambda: training.save_weights_external("secret", age_encryption_recipients=["age1x"]).result())
    assert "encrypts nothing" in told, told
else:
    url = rest.get_checkpoint_archive_url_from_tinker_path(state).result().url
    with tarfile.open(fileobj=io.BytesIO(urllib.request.urlopen(url, timeout=60).read())) as archive:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(archive.getnames()), archive.getnames()
finish(address, service)
# the model is closed, and what lies on the disk is sampled from all the same
assert close(seen_by(settled(elsewhere.create_sampling_client(model_path=named))), two)
finish(address, elsewhere)
print("done")
