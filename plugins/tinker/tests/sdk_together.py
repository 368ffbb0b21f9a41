"""Clients of the real SDK that train at once, run in a process of their own: ADDRESS CLIENTS..., or ADDRESS vanish.

CLIENTS are letters of `KINDS`, such as `ab`: each has a session and a model of its own, and their requests alternate. For each client it
prints what the server answered and where its checkpoint is, as a JSON line. `vanish` trains until it is killed, and says so at every step.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tinker
from attrs import define, field
from sdk_versions import finish, settle
from tinker import types

KINDS = {"a": (4, 1, 1e-2), "b": (2, 2, 3e-2)}
"""Rank, seed and learning rate."""


@define
class Client:
    """A client with a session, a model and samplers of its own."""

    address: str
    kind: str
    records: list[Any] = field(factory=list)

    def train(self, steps: int) -> Iterator[None]:
        """Sample, learn and step; pause whenever a request is under way."""
        rank, seed, rate = KINDS[self.kind]
        service = tinker.ServiceClient(base_url=self.address)
        training = settle(service.create_lora_training_client(base_model="tiny", rank=rank, seed=seed))
        for step in range(steps):
            sampler = settle(training.save_weights_and_get_sampling_client())
            promise = sampler.sample(
                types.ModelInput.from_ints([5, 6, 7]), 2, types.SamplingParams(max_tokens=5, seed=10 * step + rank, stop=[])
            )
            yield
            samples = [list(each.tokens) for each in promise.result().sequences]
            passes = [training.forward_backward([datum(tokens, seed)], "cross_entropy") for tokens in samples]
            yield
            step_promise = training.optim_step(types.AdamParams(learning_rate=rate, grad_clip_norm=1.0))
            yield
            losses = [each.result().metrics["loss:sum"] for each in passes]
            self.records.append([samples, losses, step_promise.result().metrics["grad_norm"]])
        self.records.append(training.save_state("end").result().path)
        finish(self.address, service)


def datum(tokens: list[int], seed: int) -> types.Datum:
    row = [5, 6, 7, *tokens, seed]
    inputs = {"target_tokens": np.array(row[1:]), "weights": np.ones(len(row) - 1, np.float32)}
    tensors = {name: types.TensorData.from_numpy(value) for name, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=tensors)


def run(address: str, kinds: str) -> None:
    clients = [Client(address, kind) for kind in kinds]
    turns = [client.train(4) for client in clients]
    while turns:
        turns = [turn for turn in turns if next(turn, "done") is None]
    for client in clients:
        print(json.dumps([client.kind, client.records]), flush=True)


if sys.argv[2:] == ["vanish"]:
    for _ in Client(sys.argv[1], "a").train(10_000):
        print("under way", flush=True)
for place in range(1, len(sys.argv), 2):
    run(sys.argv[place], sys.argv[place + 1])
