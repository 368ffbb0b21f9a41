"""The generator `hf` on ranks that hold parts of the weights: together they sample what one rank with all of them does."""

import numpy as np
import pytest
from by_day import now
from hf_requests import build_requests
from sampled_models import ARCHITECTURES, write
from sampling_ranks import sample_together
from transformers import Qwen3VLConfig

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.model_facts.tensor_parallel_plan import refuse_indivisible

DIVIDED = ("qwen3", "llama", "gemma3_text", "mistral", "qwen2", "qwen3_moe", "mixtral", "phi3", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("family", now(DIVIDED, "qwen3"))
def test_ranks_with_parts_of_the_weights_sample_what_one_rank_samples(family, tmp_path, alone, pair):
    """Tokens are equal and log-probabilities within 1e-4 nats, before and after an update, and no rank holds much more than its part."""
    folder = str(write(tmp_path, family, **ARCHITECTURES[family]))
    requests = build_requests(9, ignore_eos=True)
    due, _, due_later, rows = sample_together(folder, requests)
    here, there = pair.run(sample_together, folder, requests)
    assert here[3] == there[3] == rows
    assert max(here[1], there[1]) < 0.7
    for ranks, expected in ((here[0], due), (here[2], due_later)):
        for got, want in zip(ranks, expected, strict=True):
            assert got.token_ids.tolist() == want.token_ids.tolist()
            assert np.abs(got.logprobs - want.logprobs).max() < 1e-4
    for mine, other in zip(here[0], there[0], strict=True):
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        assert mine.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"dtype": "float64"}], ids=lambda settings: settings.get("dtype"))
def test_what_is_sampled_beside_a_request_changes_no_bit_on_four_ranks(settings, tmp_path, quad):
    folder = str(write(tmp_path, "llama", num_attention_heads=4, num_key_value_heads=4))
    requests = build_requests(9, ignore_eos=True)
    many, few = (quad.run(sample_together, folder, requests, slots=slots, **settings)[0][0] for slots in (9, 2))
    for one, other in zip(many, few, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_a_model_that_ranks_cannot_divide_is_refused_with_a_remedy(tmp_path):
    config = load_config(ModelConfig(str(write(tmp_path, "gpt2", **ARCHITECTURES["gpt2"]))))
    seeing = Qwen3VLConfig()
    for refused in (config, seeing):
        with pytest.raises(UnsupportedError, match=r"2 tensor-parallel ranks are to sample together.*generator vllm"):
            refuse_indivisible(refused, "a model", 2)
