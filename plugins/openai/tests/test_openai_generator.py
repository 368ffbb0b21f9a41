"""The generator against small endpoints of ours, behind which `hf` samples: texts, token ids, stops, refusals and faults."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai_routes import Endpoint
from tokenizers.processors import TemplateProcessing

from skyrl_engine import EngineError, UnsupportedError
from skyrl_engine.contracts import Completion, GenerationRequest, GeneratorStart, ModelConfig, Sampling
from skyrl_engine.contracts.kinds.generator import as_completions
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.testing import GeneratorConformance
from skyrl_engine.workers.weight_files import WrittenWeights
from skyrl_engine_openai.client import EndpointClient, EndpointError, TransientError, _Patience, read
from skyrl_engine_openai.generator import OpenaiGenerator
from skyrl_engine_openai.options import OpenaiOptions
from skyrl_engine_openai.wire import Wire

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
Served = tuple[str, Endpoint]
Opens = Callable[..., OpenaiGenerator]


class TestOpenaiConformance(GeneratorConformance):
    """An endpoint takes no weights, so the kit cannot give it its model; what holds for every plugin holds."""

    plugin = "skyrl-engine-openai:openai"
    options = {"url": "http://127.0.0.1:9/v1", "model": "m"}  # noqa: RUF012


@pytest.fixture
def opens(folder: Path) -> Iterator[Opens]:
    """`opens(url, **options)`: a started generator, closed in the end."""
    opened: list[OpenaiGenerator] = []

    def open_one(url: str, **options: Any) -> OpenaiGenerator:
        generator = OpenaiGenerator(OpenaiOptions(url, "m", **options))
        opened.append(generator)
        ends = load_tokenizer(ModelConfig(str(folder))).eos_token_id
        generator.start(GeneratorStart(ModelConfig(str(folder)), "cpu", (ends,), WrittenWeights(None, None), 3))
        return generator

    yield open_one
    for generator in opened:
        generator.close()


def request_of(endpoint: Endpoint, text: str, number: int = 0, **sampling: Any) -> GenerationRequest:
    prompt = np.array(endpoint.tokenizer.encode(text), dtype=np.int32)
    return GenerationRequest(number, prompt, Sampling(**{"max_tokens": 12, "temperature": 0.0, **sampling}), seed=7 + number)


def sample(generator: OpenaiGenerator, requests: Sequence[GenerationRequest]) -> list[Completion]:
    generator.submit(requests)
    return collect(generator, requests)


def collect(generator: OpenaiGenerator, requests: Sequence[GenerationRequest]) -> list[Completion]:
    done: dict[int, Completion] = {}
    until = time.monotonic() + 60
    while len(done) < len(requests):
        assert time.monotonic() < until, "requests never came back"
        for completion in as_completions("openai", generator.poll(0.5)):
            assert completion.request_id not in done
            done[completion.request_id] = completion
    return [done[request.request_id] for request in requests]


def due_tokens(endpoint: Endpoint, request: GenerationRequest) -> list[int]:
    """The tokens of `hf` itself."""
    body = {"max_tokens": request.sampling.max_tokens, "temperature": 0.0, "return_token_ids": True}
    tokens: list[int] = endpoint.complete(body, request.prompt_ids.tolist())["choices"][0]["token_ids"]
    return tokens


def test_token_ids_come_back_as_they_were_sampled(opens: Opens, like_vllm: Served) -> None:
    url, endpoint = like_vllm
    generator = opens(url, dialect="vllm")
    requests = [request_of(endpoint, "ab " * count, count) for count in range(1, 6)]
    for request, done in zip(requests, sample(generator, requests), strict=True):
        assert done.token_ids.tolist() == due_tokens(endpoint, request)
        assert np.isnan(done.logprobs).all()
        assert done.versions.versions.tolist() == [3]


def test_text_is_encoded_with_the_tokenizer_of_the_run(opens: Opens, plain: Served) -> None:
    url, endpoint = plain
    requests = [request_of(endpoint, "ab " * count, count) for count in range(1, 6)]
    for request, done in zip(requests, sample(opens(url), requests), strict=True):
        text = endpoint.tokenizer.decode(due_tokens(endpoint, request), skip_special_tokens=True)
        assert endpoint.tokenizer.decode(done.token_ids.tolist(), skip_special_tokens=True) == text
        assert done.finish in ("stop", "length")
        assert (done.token_ids[-1] == endpoint.tokenizer.eos_token_id) == (done.finish == "stop")


def test_seeds_reach_the_endpoint(opens: Opens, plain: Served) -> None:
    url, endpoint = plain
    generator = opens(url)
    first, again = (request_of(endpoint, "ab", number, temperature=1.0, max_tokens=20) for number in (0, 1))
    sample(generator, [first, again])
    assert {body["seed"] for body in endpoint.bodies[-2:]} == {7, 8}


def test_a_stop_string_ends_the_text_and_stays_in_it(opens: Opens, plain: Served, like_vllm: Served) -> None:
    for (url, endpoint), dialect in ((plain, "openai"), (like_vllm, "vllm")):
        generator = opens(url, dialect=dialect)
        (whole,) = sample(generator, [request_of(endpoint, "ab ab", max_tokens=30)])
        text = endpoint.tokenizer.decode(whole.token_ids.tolist(), skip_special_tokens=True)
        stop = text[4:6]
        (done,) = sample(generator, [request_of(endpoint, "ab ab", 1, max_tokens=30, stop_strings=(stop,))])
        ended = endpoint.tokenizer.decode(done.token_ids.tolist(), skip_special_tokens=True)
        assert (done.finish, done.stop) == ("stop", stop)
        assert ended.count(stop) == 1
        assert text.startswith(ended[: ended.index(stop) + len(stop)])


def test_a_chat_endpoint_is_given_plain_prompts_alone(opens: Opens, plain: Served) -> None:
    url, endpoint = plain
    generator = opens(url, endpoint="chat")
    (done,) = sample(generator, [request_of(endpoint, "what is ab?")])
    assert done.error is None
    assert endpoint.bodies[-1]["messages"] == [{"role": "user", "content": "what is ab?"}]
    rendered = endpoint.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    with pytest.raises(UnsupportedError, match=r"has the special token <\|im_start\|>"):
        generator.submit([request_of(endpoint, rendered, 1)])


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 3), ("min_p", 0.1), ("stop_token_ids", (5,)), ("ignore_eos", True), ("min_tokens", 4)]
)
def test_what_a_plain_endpoint_has_no_word_for_is_refused_by_name(
    opens: Opens, plain: Served, like_vllm: Served, name: str, value: Any
) -> None:
    url, endpoint = plain
    with pytest.raises(UnsupportedError, match=name):
        opens(url).submit([request_of(endpoint, "ab", **{name: value})])
    generator = opens(like_vllm[0], dialect="vllm")
    if name == "min_tokens":
        with pytest.raises(UnsupportedError, match=name):
            generator.submit([request_of(endpoint, "ab", min_tokens=value)])
        return
    (done,) = sample(generator, [request_of(endpoint, "ab", **{name: value})])
    assert done.error is None
    sent = like_vllm[1].bodies[-1]
    due = {"stop_token_ids": [5, endpoint.tokenizer.eos_token_id], "ignore_eos": True}.get(name, value)
    assert sent[name] == due
    assert (sent["stop_token_ids"] == []) == (name == "ignore_eos")


def test_an_endpoint_without_token_ids_is_no_vllm(opens: Opens, plain: Served, like_vllm: Served) -> None:
    (refused,) = sample(opens(plain[0], dialect="vllm"), [request_of(plain[1], "ab")])
    assert refused.finish == "error"
    assert "Unrecognized request argument supplied" in str(refused.error)
    like_vllm[1].misbehaviour["/v1/completions"] = "once textonly"
    (lacking,) = sample(opens(like_vllm[0], dialect="vllm"), [request_of(plain[1], "ab")])
    assert "gave the token_ids None" in str(lacking.error)
    like_vllm[1].misbehaviour["/v1/completions"] = "once othertokenizer"
    (foreign,) = sample(opens(like_vllm[0], dialect="vllm"), [request_of(plain[1], "ab")])
    assert "another tokenizer than the run" in str(foreign.error)


@pytest.mark.parametrize("wrong", ["429 0", "500", "cut"])
def test_a_request_is_sent_again_where_that_may_help(opens: Opens, plain: Served, wrong: str) -> None:
    url, endpoint = plain
    endpoint.misbehaviour["/v1/completions"] = f"once {wrong}"
    (done,) = sample(opens(url, retries=1), [request_of(endpoint, "ab")])
    assert done.error is None
    assert "/v1/completions" not in endpoint.misbehaviour


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("429 0", "2 attempts failed, the last one so: answered /completions with 429"),
        ("429 900", "asks for a wait of 900 s"),
        ("500", "2 attempts failed, the last one so: answered /completions with 500: EngineCore encountered an issue"),
        ("cut", "lost the connection"),
        ("hang", "in time"),
        ("403", r"refused /completions \(403\): Forbidden"),
        ("html", "a web page"),
        ("notjson", "no JSON: of course!"),
        ("garbage", "no completion"),
    ],
)
def test_a_request_that_fails_says_why(opens: Opens, plain: Served, wrong: str, words: str) -> None:
    url, endpoint = plain
    endpoint.misbehaviour["/v1/completions"] = wrong
    (done,) = sample(opens(url, retries=1, request_seconds=1.0), [request_of(endpoint, "ab")])
    assert done.finish == "error"
    assert done.error is not None
    assert done.error.startswith(f"the endpoint {url} ")
    assert re.search(words, done.error), done.error
    endpoint.misbehaviour.clear()
    (next_one,) = sample(opens(url), [request_of(endpoint, "ab", 1)])
    assert next_one.error is None


def test_an_endpoint_that_is_not_there_is_named(opens: Opens, plain: Served) -> None:
    (done,) = sample(opens("http://127.0.0.1:9/v1", retries=0), [request_of(plain[1], "ab")])
    assert "http://127.0.0.1:9/v1 cannot be reached" in str(done.error)


def test_waits_are_those_of_the_endpoint_or_grow() -> None:
    patience = _Patience(3, 60.0)
    assert patience.wait_after(TransientError("failed", 7.0)) == 7.0
    assert 0.5 <= patience.wait_after(TransientError("failed")) <= 1.0
    assert 1.0 <= patience.wait_after(TransientError("failed")) <= 2.0
    with pytest.raises(EndpointError, match="4 attempts failed"):
        patience.wait_after(TransientError("failed"))


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [("7", 7.0, 7.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0, 0.0), ("Fri, 31 Dec 2100 23:59:59 GMT", 1e9, 1e10)],
)
def test_retry_after_is_seconds_or_a_date(header: str, least: float, most: float) -> None:
    with pytest.raises(TransientError) as raised:
        read("/completions", httpx.Response(429, headers={"Retry-After": header}))
    assert raised.value.wait is not None
    assert least <= raised.value.wait <= most


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(
    opens: Opens, plain: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, endpoint = plain
    monkeypatch.setenv("VLLM_API_KEY", "sesame")  # of the server
    (done,) = sample(opens(url), [request_of(endpoint, "ab")])
    assert "refused /completions (401): Unauthorized" in str(done.error)
    with pytest.raises(UnsupportedError, match="NO_SUCH_KEY"):
        opens(url, api_key_env="NO_SUCH_KEY")
    monkeypatch.setenv("MY_KEY", "sesame")
    (done,) = sample(opens(url, api_key_env="MY_KEY"), [request_of(endpoint, "ab", 1)])
    assert done.error is None
    assert "sesame" not in repr(EndpointClient(url, "sesame", 1.0, 0))


def test_aborted_requests_come_back_once(opens: Opens, plain: Served) -> None:
    url, endpoint = plain
    endpoint.misbehaviour["/v1/completions"] = "hang"
    generator = opens(url, concurrency=2)
    requests = [request_of(endpoint, "ab", number) for number in range(5)]
    generator.submit(requests)
    generator.abort([3])
    generator.abort()
    assert {done.finish for done in collect(generator, requests)} == {"abort"}
    assert generator.poll(0.0) == []


def test_closing_does_not_wait_for_the_endpoint(opens: Opens, plain: Served) -> None:
    url, endpoint = plain
    endpoint.misbehaviour["/v1/completions"] = "hang"
    generator = opens(url)
    generator.submit([request_of(endpoint, "ab", number) for number in range(3)])
    time.sleep(0.1)
    generator.close()
    assert not generator._tasks


def test_marks_are_neither_sent_twice_nor_read_from_texts(folder: Path) -> None:
    """The token that a tokenizer puts before every text is left to the endpoint; a text that spells a special token stays a text."""
    tokenizer = load_tokenizer(ModelConfig(str(folder)))
    mark = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{mark} $A", special_tokens=[(mark, tokenizer.convert_tokens_to_ids(mark))]
    )
    wire = Wire.open(OpenaiOptions("http://host/v1", "m"), tokenizer, (), 0, None)
    request = GenerationRequest(0, np.array(tokenizer.encode("ab"), dtype=np.int32), Sampling(max_tokens=30), seed=0)
    assert len(request.prompt_ids) == 3
    assert wire.body_of(request)["prompt"] == "ab"
    done = wire.completion_of(request, {"choices": [{"text": "a<|im_end|>b", "finish_reason": "length"}]})
    assert tokenizer.decode(done.token_ids.tolist(), skip_special_tokens=True) == "a<|im_end|>b"
    cut = wire.completion_of(request, {"choices": [{"text": "a" * 40, "finish_reason": "stop"}]})
    assert (len(cut.token_ids), cut.finish, cut.stop) == (30, "length", None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"url": "127.0.0.1:8000"}, "base URL"),
        ({"url": "https://me:secret@host/v1"}, "api_key_env"),
        ({"endpoint": "chat", "dialect": "vllm"}, "token ids"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OpenaiOptions(**{"url": "http://host/v1", "model": "m", **wrong})


def test_weights_are_refused(opens: Opens, plain: Served) -> None:
    with pytest.raises(EngineError, match="takes no weights"):
        opens(plain[0]).update(WrittenWeights(None, None), 1)
