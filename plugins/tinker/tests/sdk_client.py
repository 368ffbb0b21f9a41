"""A client of the real SDK, run in a process of its own: ADDRESS RANK."""

import sys
from typing import Any

import numpy as np
import tinker
import torch
from sdk_versions import finish, settle
from tinker import types

address, rank = sys.argv[1], int(sys.argv[2])
service = tinker.ServiceClient(base_url=address)
training = settle(service.create_lora_training_client(base_model="tiny", rank=rank, seed=1))
ids = [5, 6, 7, 8, 9, 10, 11]
target = np.array(ids[1:])


def datum(loss: str, logprobs: np.ndarray | None = None) -> types.Datum:
    inputs = {"target_tokens": target}
    if loss == "cross_entropy":
        inputs["weights"] = np.ones(6, np.float32)
    else:
        inputs |= {"logprobs": np.asarray(logprobs, np.float32), "advantages": np.ones(6, np.float32)}
    tensors = {name: types.TensorData.from_numpy(value) for name, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=tensors)


def step(loss: str, data: list[types.Datum], rate: float = 1e-2) -> float:
    first = training.forward_backward(data, loss)
    second = training.optim_step(types.AdamParams(learning_rate=rate, grad_clip_norm=1.0))
    second.result()
    return first.result().metrics["loss:sum"]


curve = [step("cross_entropy", [datum("cross_entropy")] * 3) for _ in range(6)]
assert curve[-1] < curve[0], curve
output = training.forward([datum("cross_entropy")], "cross_entropy").result()
logprobs = np.array(output.loss_fn_outputs[0]["logprobs"].tolist())
assert abs(output.metrics["loss:sum"] + logprobs.sum()) < 1e-4
for loss in ("importance_sampling", "ppo", "cispo", "dro"):
    before = training.forward_backward([datum(loss, logprobs)], loss).result()
    assert np.isfinite(before.metrics["loss:sum"]), loss
training.optim_step(types.AdamParams(learning_rate=0.0)).result()


def refused(promise: Any) -> str:
    """Wait for what is refused, and return why."""
    try:
        promise.result()
    except tinker.RequestFailedError as error:
        return str(error)
    raise AssertionError("nothing was refused")


message = refused(training.forward_backward([datum("cross_entropy")], "stable_reinforce"))
assert "there is no loss 'stable_reinforce' here" in message, message
message = refused(training.optim_step(types.AdamParams(learning_rate=1.0)))
assert "no step was taken" in message, message
assert "there is no loss 'stable_reinforce' here" in message, message
# the SDK cuts this list into two requests, and the first one is right
wrong = types.Datum(
    model_input=types.ModelInput.from_ints([5, 999]),
    loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([6, 7]))},
)
message = refused(training.forward_backward([datum("cross_entropy")] * 1500 + [wrong], "cross_entropy"))
assert "token 1 of datum 1500 is 999" in message, message
message = refused(training.optim_step(types.AdamParams(learning_rate=1.0)))
assert "no step was taken" in message, message
assert "datum 1500" in message, message
again = np.array(training.forward([datum("cross_entropy")], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist())
assert (again == logprobs).all(), (again, logprobs)


def custom(data: list[types.Datum], scored: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """The formula of importance_sampling, differentiated by the client."""
    return -(scored[0] - torch.tensor(logprobs)).exp().sum(), {}


built_in = training.forward_backward([datum("importance_sampling", logprobs)], "importance_sampling").result().metrics["loss:sum"]
norm = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
own_loss = training.forward_backward_custom([datum("cross_entropy")], custom).result()
own_norm = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
assert abs(norm / own_norm - 1) < 1e-4, (norm, own_norm)
# SDKs before this metric report the surrogate's sum as the loss
if "surrogate_loss:sum" in own_loss.metrics:
    assert abs(own_loss.metrics["loss:sum"] - built_in) < 1e-4, (own_loss.metrics, built_in)

sampler = settle(training.save_weights_and_get_sampling_client())
prompt = types.ModelInput.from_ints([5, 6, 7])
params = types.SamplingParams(max_tokens=5, seed=7, temperature=1.0)
first = sampler.sample(prompt, 2, params).result().sequences
again = sampler.sample(prompt, 2, params).result().sequences
assert [each.tokens for each in first] == [each.tokens for each in again]
own = np.array(sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:])
assert np.abs(own - logprobs).max() < 1e-4, (own, logprobs)
step("cross_entropy", [datum("cross_entropy")])
later = np.array(sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()[1:])
assert np.abs(later - own).max() < 1e-6, "a sampler keeps its weights"

path = training.save_state("first").result().path
expected = training.forward([datum("cross_entropy")], "cross_entropy").result().metrics["loss:sum"]
step("cross_entropy", [datum("cross_entropy")])
after = training.forward([datum("cross_entropy")], "cross_entropy").result().metrics["loss:sum"]
finish(address, service)
service = tinker.ServiceClient(base_url=address)
training = settle(service.create_training_client_from_state_with_optimizer(path))
resumed = training.forward([datum("cross_entropy")], "cross_entropy").result().metrics["loss:sum"]
assert resumed == expected, (resumed, expected)
step("cross_entropy", [datum("cross_entropy")])
assert training.forward([datum("cross_entropy")], "cross_entropy").result().metrics["loss:sum"] == after
finish(address, service)

service = tinker.ServiceClient(base_url=address)
training = settle(service.create_training_client_from_state(path))
only_weights = training.forward([datum("cross_entropy")], "cross_entropy").result().metrics["loss:sum"]
assert abs(only_weights - expected) < 1e-4, (only_weights, expected)
# Adam's first step has the size of the learning rate, whatever was trained before: the optimizer is a new one
step("cross_entropy", [datum("cross_entropy")])
fresh = training.forward([datum("cross_entropy")], "cross_entropy").result().metrics["loss:sum"]
assert fresh != expected
assert abs(fresh - after) > 1e-4, (fresh, after)

image = types.ModelInput(
    chunks=[types.EncodedTextChunk(tokens=ids[:-1]), types.ImageChunk(data=b"no", format="png", expected_tokens=1)]
)
inputs = {"target_tokens": types.TensorData.from_numpy(np.array(ids))}
for refused in (
    lambda: training.forward_backward([types.Datum(model_input=image, loss_fn_inputs=inputs)], "cross_entropy").result(),
    lambda: settle(training.save_weights_and_get_sampling_client()).sample(image, 1, params).result(),
):
    try:
        message = ""
        refused()
    except tinker.RequestFailedError as error:
        message = str(error)
    assert "a chunk that is no text" in message, message

rest, run = service.create_rest_client(), path.split("/")[2]
training.save_state("second").result()
assert [each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints] == [path]
rest.delete_checkpoint_from_tinker_path(path).result()
assert not rest.list_checkpoints(run).result().checkpoints
assert path not in [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints]
finish(address, service)
print("done")
