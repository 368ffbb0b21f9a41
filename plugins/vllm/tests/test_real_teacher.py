"""A real vLLM server as a teacher (`[teacher] url`): its `prompt_logprobs`, against transformers' own scores of the same model."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_engine.config.schema import TeacherConfig
from skyrl_engine.contracts import SampleColumns
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.testing.generators import bench
from skyrl_engine.training.teacher_endpoint import EndpointTeacher, make_decode
from skyrl_engine_vllm.client import ServerClient

TEXTS = [[5, 9, 2, 7, 7, 3], [4, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


def teacher_at(url: str, **settings: object) -> EndpointTeacher:
    client = ServerClient(url, None, seconds=30.0)
    try:
        name = client.get("/v1/models")["data"][0]["id"]
    finally:
        client.close()
    table = TeacherConfig(url=f"{url}/v1", model=name, **settings)  # type: ignore[arg-type]
    return EndpointTeacher.of(table, make_decode(AutoTokenizer.from_pretrained(bench.model_folder())))


def test_columns_are_the_models_own_log_probabilities(server_url: str) -> None:
    """Those of the samples' tokens, and of the k likeliest in their order; vLLM computes in float32 here: 1e-3."""
    model = AutoModelForCausalLM.from_pretrained(bench.model_folder()).eval()
    columns = SampleColumns.from_lists(input_ids=TEXTS, num_actions=[len(text) - 1 for text in TEXTS])
    own = teacher_at(server_url).score(columns)["teacher_logprobs"]
    top = teacher_at(server_url, top_k=3).score(columns)
    start = 0
    for text in TEXTS:
        with torch.no_grad():
            logprobs = model(torch.tensor([text])).logits[0, :-1].float().log_softmax(-1)
        chosen = slice(start, start + len(text) - 1)
        np.testing.assert_allclose(own[chosen], logprobs.gather(-1, torch.tensor(text[1:])[:, None])[:, 0], atol=1e-3)
        np.testing.assert_allclose(top["teacher_logprobs"][chosen], logprobs.topk(3).values, atol=1e-3)
        assert top["teacher_ids"][chosen].tolist() == logprobs.topk(3).indices.tolist()
        start += len(text) - 1


def test_a_text_that_is_too_long_and_too_many_likeliest_tokens_are_told(server_url: str) -> None:
    with pytest.raises(ModelError, match=r"answered /completions with 400"):
        teacher_at(server_url).ask([3] * (bench.POSITIONS + 100))
    with pytest.raises(ModelError, match=r"answered /completions with 400"):
        teacher_at(server_url, top_k=10_000).ask([3, 4])


def test_another_tokenizer_is_noticed_by_the_names_that_the_server_gives(server_url: str) -> None:
    teacher = teacher_at(server_url)
    teacher.decode = str
    with pytest.raises(UnsupportedError, match="has another tokenizer: it calls the token"):
        teacher.ask(TEXTS[0])
