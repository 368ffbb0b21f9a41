"""A training and sampling loop of the real SDK, run in a process of its own: ADDRESS... It prints what each address answered, as JSON lines."""

import json
import sys
from typing import Any

import numpy as np
import tinker
from sdk_versions import finish, settle
from tinker import types

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def datum(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    row = [*prompt, *tokens]
    before = [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": np.array(row[1:]),
        "logprobs": np.array([*before, *logprobs], np.float32),
        "advantages": np.array([*before, *([advantage] * len(tokens))], np.float32),
    }
    tensors = {name: types.TensorData.from_numpy(value) for name, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=tensors)


def loop(address: str) -> tuple[str, list[Any]]:
    """Return the path of the last checkpoint, and what the server answered at each step."""
    service = tinker.ServiceClient(base_url=address)
    training = settle(service.create_lora_training_client(base_model="tiny", rank=4, seed=1))
    records: list[Any] = []
    for step in range(5):
        sampler = settle(training.save_weights_and_get_sampling_client())
        promises = [
            sampler.sample(types.ModelInput.from_ints(prompt), 2, types.SamplingParams(max_tokens=5, seed=100 * step + place))
            for place, prompt in enumerate(PROMPTS)
        ]
        sequences = [(prompt, each) for prompt, one in zip(PROMPTS, promises, strict=True) for each in one.result().sequences]
        # a reward that anybody can check: how many tokens are even
        data = [
            datum(prompt, list(each.tokens), list(each.logprobs), sum(token % 2 == 0 for token in each.tokens) - 2.5)
            for prompt, each in sequences
        ]
        passes = [training.forward_backward(part, "importance_sampling") for part in (data[:3], data[3:])]
        step_output = training.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)).result()
        outputs = [each.result() for each in passes]
        records.append(
            {
                "samples": [[list(each.tokens), list(each.logprobs)] for _, each in sequences],
                "logprobs": [out["logprobs"].tolist() for each in outputs for out in each.loss_fn_outputs],
                "loss": [each.metrics["loss:sum"] for each in outputs],
                "grad_norm": step_output.metrics["grad_norm"],
            }
        )
    path = training.save_state("end").result().path
    finish(address, service)
    return path, records


if __name__ == "__main__":
    for server in sys.argv[1:]:
        print(json.dumps(loop(server)), flush=True)
