"""The generator `hf` on a CUDA device: tokens and log-probabilities as on the CPU, kept keys and values, and memory that sleep gives back."""

import numpy as np
import pytest
import torch
from hf_requests import Weights, build_requests, finish_requests

from skyrl_engine.contracts import POLICY, GeneratorStart, ModelConfig
from skyrl_engine.modeling.loading import load_causal_lm
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine_generators.generator import HfGenerator
from skyrl_engine_generators.options import HfOptions

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("wide")
    write_model(
        directory,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_hidden_layers=6,
    )
    write_tokenizer(directory, ["some words to learn from, and more words to say"])
    return str(directory)


def start(folder: str, device: str, dtype: str) -> HfGenerator:
    generator = HfGenerator(HfOptions(slots=4))
    model = load_causal_lm(ModelConfig(folder)).eval()
    generator.start(GeneratorStart(ModelConfig(folder, dtype=dtype), device, (), Weights(model), 0))
    return generator


def test_float32_samples_the_tokens_of_the_cpu(folder: str) -> None:
    requests = build_requests(12, ignore_eos=True)
    expected, got = (finish_requests(start(folder, device, "float32"), requests) for device in ("cpu", "cuda:0"))
    for one, other in zip(expected, got, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(other.logprobs, one.logprobs, rtol=0, atol=1e-4)


def test_bfloat16_gives_the_log_probabilities_of_its_weights(folder: str) -> None:
    requests = build_requests(12, ignore_eos=True, max_tokens=16)
    done = finish_requests(start(folder, "cuda:0", "bfloat16"), requests)
    model = load_causal_lm(ModelConfig(folder)).eval()
    gaps = []
    for request, completion in zip(requests, done, strict=True):
        row = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
        with torch.no_grad():
            scores = model(row[None]).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        due = scores.gather(1, row[len(request.prompt_ids) :, None])[:, 0].numpy()
        gaps.append(np.abs(due - completion.logprobs))
    gap = np.concatenate(gaps)
    print(f"bfloat16 beside float32: {gap.mean():.1e} nats on average, {gap.max():.1e} at most")
    assert gap.mean() <= 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sleep_gives_the_memory_back(folder: str, dtype: str) -> None:
    generator = start(folder, "cuda:0", dtype)
    first = finish_requests(generator, build_requests(4))
    before = torch.cuda.memory_allocated()
    generator.sleep()
    held = torch.cuda.memory_allocated()
    print(f"{before:,} bytes are allocated, {held:,} asleep")
    assert before - held >= 20e6 * (4 if dtype == "float32" else 2) * 0.8
    assert torch.cuda.memory_reserved() <= held + 2**25
    model = load_causal_lm(ModelConfig(folder)).eval()
    generator.update(Weights(model), 1, POLICY)
    again = finish_requests(generator, build_requests(4))
    assert [each.token_ids.tolist() for each in again] == [each.token_ids.tolist() for each in first]
    generator.close()
