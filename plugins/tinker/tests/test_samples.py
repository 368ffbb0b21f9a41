"""Samples as the wire asks for them: stops, top-k, the limit, and log-probabilities against transformers."""

import threading

import numpy as np
import pytest

from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.wire import CLASSES, LENGTH, STOP

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(client):
    """A model that no test trains; its request 1 made the sampler of `sample`."""
    model = client.open_model()
    yield model
    client.finish(model)


@pytest.fixture(scope="module")
def sample(client, model):
    """Sample after PROMPT with these parameters and fields."""
    sampler, numbers = client.sampler(model, 1), iter(range(1000))

    def draw_sample(params=None, **fields):
        body = {
            "sampling_session_id": sampler,
            "seq_id": next(numbers),
            "prompt": text(PROMPT),
            "sampling_params": {"max_tokens": 12, "seed": 3, "stop": [], **(params or {})},
            **fields,
        }
        answer = client.complete("asample", body)
        return CLASSES["SampleResponse"].FromString(answer) if isinstance(answer, bytes) else answer["error"]

    return draw_sample


def text(tokens):
    return {"chunks": [{"type": "encoded_text", "tokens": tokens}]}


def tokens_of(response) -> list[int]:
    return np.frombuffer(response.sequences[0].tokens, "<i4").tolist()


def test_a_stop_token_ends_a_sample_behind_it(sample):
    free = sample()
    assert free.sequences[0].stop_reason == LENGTH
    assert len(tokens_of(free)) == 12
    stop = tokens_of(free)[4]
    expected = tokens_of(free)[: tokens_of(free).index(stop) + 1]
    stopped = sample({"stop": [stop]})
    assert tokens_of(stopped) == expected
    assert stopped.sequences[0].stop_reason == STOP


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_ends_a_sample_behind_the_token_that_completes_it(sample, settings, as_list):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.serve.models["tiny"])
    free = tokens_of(sample())
    # the text of two neighbours: it ends within the second one
    pairs = (tokenizer.decode(free[place : place + 2], skip_special_tokens=True) for place in range(1, 11))
    stop = next(pair for pair in pairs if len(pair) >= 2)
    expected = next(end for end in range(1, 13) if stop in tokenizer.decode(free[:end], skip_special_tokens=True))
    assert 1 < expected < 12
    stopped = sample({"stop": [stop] if as_list else stop})
    assert tokens_of(stopped) == free[:expected]
    assert stopped.sequences[0].stop_reason == STOP


def test_top_k_of_samples_holds_the_k_most_likely_tokens(sample, settings):
    import torch

    response = sample(topk_sample_logprobs=3)
    top, tokens = response.sequences[0].topk_sampled_logprobs, tokens_of(response)
    assert (top.k, top.length) == (3, 12)
    expected = own_logprobs(settings, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1].topk(3)
    assert np.array_equal(np.frombuffer(top.token_ids, "<i4").reshape(12, 3), expected.indices.numpy())
    logprobs = torch.from_numpy(np.frombuffer(top.logprobs, "<f4").copy()).view(12, 3)
    assert torch.allclose(logprobs, expected.values, rtol=0, atol=1e-4)


def test_top_k_of_prompts_holds_the_k_most_likely_tokens_of_its_last_places(sample, settings):
    row = [5, 6, 7, 8, 9, 10]
    expected = own_logprobs(settings, row)[:-1].topk(3)
    response = sample(prompt=text(row), num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=3, prompt_logprobs_last_n=2)
    own, top = np.frombuffer(response.prompt_logprobs, "<f4"), response.topk_prompt_logprobs
    assert np.isnan(own).tolist() == [True] * 4 + [False] * 2
    assert (top.k, top.length) == (3, 6)
    ids, values = (np.frombuffer(content, kind).reshape(6, 3) for content, kind in ((top.token_ids, "<i4"), (top.logprobs, "<f4")))
    assert (ids[:4] == 0).all()
    assert (values[:4] == -99999).all()
    assert np.array_equal(ids[4:], expected.indices[3:].numpy())
    assert np.abs(values[4:] - expected.values[3:].numpy()).max() < 1e-4
    assert not sample(prompt=text(row)).HasField("topk_prompt_logprobs")


def test_logprobs_are_those_of_transformers(client, model, sample, settings, message):
    """The same model through transformers alone gives those of training, of prompts and of samples at temperature 1, within 1e-4."""
    row = [5, 6, 7, 8, 9, 10, 11, 20, 30, 40]
    expected = own_logprobs(settings, row)[:-1].gather(1, column(row[1:]))[:, 0].numpy()
    body = message(model, 2, tokens=row[:-1], targets=row[1:], forward_only=True)
    output = CLASSES["ForwardBackwardOutput"].FromString(client.complete("forward_backward", body))
    trained = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
    assert np.abs(trained - expected).max() < 1e-4
    response = sample(prompt=text(row), prompt_logprobs=True)
    assert np.abs(np.frombuffer(response.prompt_logprobs, "<f4")[1:] - expected).max() < 1e-4
    tokens, own = tokens_of(response), np.frombuffer(response.sequences[0].logprobs, "<f4")
    sampled = own_logprobs(settings, row + tokens)[len(row) - 1 : -1].gather(1, column(tokens))[:, 0].numpy()
    assert np.abs(own - sampled).max() < 1e-4


def own_logprobs(settings, row):
    """float32[T, V]: what follows each token, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings.serve.models["tiny"], dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([row])).logits[0].log_softmax(-1)


def column(tokens):
    import torch

    return torch.tensor(tokens)[:, None]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_samples": 0}, "do not fit"),
        ({"num_samples": 10**9}, "do not fit"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "no text"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "has no target_prompt_logprobs"),
        (
            {"record_stability_info": True},
            "loss_fn and leave record_stability_info out. There are cross_entropy, ",
        ),
        ({"record_stability_info": True}, "skyrl-engine-losses:ppo"),
        ({"prompt": {"chunks": [{"tokens": [5, -1]}]}}, "the prompt has the token -1, which no model knows"),
        ({"prompt": {"chunks": [{"tokens": [2**31]}]}}, "the prompt has the token 2147483648"),
        ({"topk_prompt_logprobs": 101}, "at most the 100 most likely"),
        ({"topk_sample_logprobs": -1}, "at most the 100 most likely"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 10**6}, "is 1 to"),
        ({"prompt_logprobs_last_n": 1}, "goes with prompt_logprobs"),
        (
            {"prompt_logprobs": True, "prompt_logprobs_last_n": 1, "prompt": {"chunks": [{"tokens": [5]}]}},
            "prompts of two tokens or more",
        ),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 1.5}, "prompt_logprobs_last_n is 1.5; it must be a whole number"),
        ({"topk_prompt_logprobs": 2.7}, "topk_prompt_logprobs is 2.7; it must be a whole number"),
        ({"topk_sample_logprobs": True}, "topk_sample_logprobs is true; it must be a whole number"),
        ({"num_samples": "1"}, 'num_samples is "1"; it must be a whole number'),
        ({"sampling_params": {"max_tokens": 2.0}}, "max_tokens is 2.0; it must be a whole number"),
        ({"sampling_params": {"top_k": True}}, "top_k is true; it must be a whole number"),
        ({"sampling_params": {"seed": 0.5}}, "seed is 0.5; it must be a whole number"),
        ({"sampling_params": {"max_tokens": 1000}}, "do not fit"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_words(sample, fields, words):
    assert words in sample(**fields)


@pytest.mark.parametrize("other_client", [{"longest": 32_768}], indirect=True, ids=[""])
def test_a_model_that_takes_fewer_tokens_than_the_server_bounds_what_is_sampled_and_trained(other_client, message):
    """The tests' model has 160 positions: capabilities, samples without `max_tokens` and datums go by them."""
    (capable,) = other_client.post("get_server_capabilities", None, method="GET")[1]["supported_models"]
    assert capable["max_context_length"] == 160
    model = other_client.open_model()
    body = {"sampling_session_id": other_client.sampler(model, 1), "prompt": text(PROMPT), "sampling_params": {"stop": []}}
    sampled = CLASSES["SampleResponse"].FromString(other_client.complete("asample", {**body, "seq_id": 0}))
    assert len(tokens_of(sampled)) == 160 - len(PROMPT)
    refused = other_client.complete("asample", {**body, "seq_id": 1, "sampling_params": {"max_tokens": 158}})["error"]
    assert "160 tokens with the prompt (serve.longest or the model)" in refused
    tokens = [5 + place % 90 for place in range(161)]
    answer = other_client.complete("forward_backward", message(model, 2, tokens=tokens, targets=tokens))
    assert "datum 0 has 161 tokens; this server takes 160" in answer["error"]
    assert isinstance(
        other_client.complete("forward_backward", message(model, 3, tokens=tokens[:160], targets=tokens[:160])), bytes
    )
    other_client.finish(model)


@pytest.mark.parametrize("other_client", [{"samples": 2}], indirect=True, ids=[""])
def test_the_limit_counts_samples_under_way_and_nothing_else(other_client, message, monkeypatch):
    go, real = threading.Event(), ServedModel.optim_step
    monkeypatch.setattr(ServedModel, "optim_step", lambda *arguments: go.wait(30) and real(*arguments))
    model = other_client.open_model()
    sampler = other_client.sampler(model, 1)
    promises = [other_client.post("forward_backward", message(model, 2))[1]]
    promises.append(other_client.post("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}})[1])
    # five requests of training are under way, and the model is held at its step
    promises += [other_client.post("forward_backward", message(model, number))[1] for number in (4, 5, 6)]
    body = {
        "sampling_session_id": sampler,
        "prompt": text(PROMPT),
        "sampling_params": {"max_tokens": 2},
    }
    status, first = other_client.post("asample", {**body, "seq_id": 0, "num_samples": 2})
    assert status == 200
    status, refused = other_client.post("asample", {**body, "seq_id": 1})
    assert status == 429
    assert "2 samples are under way" in refused["detail"]
    go.set()
    assert isinstance(other_client.post("retrieve_future", first)[1], bytes)
    assert other_client.post("asample", {**body, "seq_id": 1})[0] == 200
    assert all("error" not in other_client.post("retrieve_future", promise)[1] for promise in promises[1:2])
