"""Four hundred samples at once by the real SDK, run in a process of its own: ADDRESS, and `vanish` for a client that waits for none."""

import sys
import time
from typing import Any

import numpy as np
import tinker
from sdk_versions import settle
from tinker import types

SAMPLES = 400


service = tinker.ServiceClient(base_url=sys.argv[1])
training = settle(service.create_lora_training_client(base_model="tiny", rank=0))
sampler = settle(training.save_weights_and_get_sampling_client())
prompt = types.ModelInput.from_ints([5, 6, 7])


def ask(seed: int) -> Any:
    return sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, seed=seed, stop=[]))


if sys.argv[2:] == ["vanish"]:
    row = list(range(5, 60))
    tensors = {"target_tokens": types.TensorData.from_numpy(np.array([*row[1:], 8]))}
    datum = types.Datum(model_input=types.ModelInput.from_ints(row), loss_fn_inputs=tensors)
    training.forward_backward([datum], "cross_entropy").result()
    under_way = [training.forward_backward([datum] * 100, "cross_entropy") for _ in range(20)]
    under_way += [ask(seed) for seed in range(50)]
    print("under way", flush=True)
    time.sleep(600)

together = [ask(seed) for seed in range(SAMPLES)]
sequences = [each.result().sequences[0] for each in together]
assert len({tuple(each.tokens) for each in sequences}) > SAMPLES // 4, "every seed draws its own"
for seed in range(0, SAMPLES, 50):
    alone = ask(seed).result().sequences[0]
    assert list(alone.tokens) == list(sequences[seed].tokens), seed
    assert np.allclose(alone.logprobs, sequences[seed].logprobs, rtol=0, atol=1e-5), seed
print("done")
