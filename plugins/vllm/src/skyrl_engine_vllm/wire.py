"""The bodies of `/inference/v1/generate`, and what they answer, in the engine's terms. No text but stop strings."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from skyrl_engine.contracts import Completion, GenerationRequest, Sampling, TopLogprobs, VersionSpans
from skyrl_engine.model_facts.tokenizer import Decode
from skyrl_engine_vllm.errors import ServerFault
from skyrl_engine_vllm.stops import find_stop

_WORD = (1 << 64) - 1


def seed_on_server(seed: int) -> int:
    """Return the seed to send for a seed of 64 bits: an integer of 64 bits with a sign, all of whose bits depend on all of the seed's.

    On a CPU, torch's generators read the lower 32 bits alone. The mixing is the finalizer of SplitMix64 (Steele, Lea and Flood 2014), which
    maps no two seeds onto one. vLLM takes -1 for no seed, so 0 is sent in its place.
    """
    word = (seed + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    word ^= word >> 31
    signed = word - (1 << 64) if word >> 63 else word
    return 0 if signed == -1 else signed


def ends_of(sampling: Sampling, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that end a request."""
    return tuple(dict.fromkeys((*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids))))


def is_cut_here(sampling: Sampling) -> bool:
    """Return True where the end of a request is found in what comes back.

    vLLM keeps `min_tokens` by giving stop tokens the probability 0 before, so that log-probabilities would be of another distribution.
    """
    return sampling.min_tokens > 1


def body_of(request: GenerationRequest, *, name: str, model: str, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the body of a request that the server knows as `name`. Every parameter of sampling is said: vLLM has defaults, and others' too.

    The model's end tokens are sent as stop tokens, so that those of the engine count and the answer names the one that came.
    """
    sampling, cut = request.sampling, is_cut_here(request.sampling)
    prompt_logprobs = 0 if request.prompt_logprobs else None
    return {
        "request_id": name,
        "model": model,
        "token_ids": request.prompt_ids.tolist(),
        "stream": False,
        "sampling_params": {
            "n": 1,
            "max_tokens": sampling.max_tokens,
            "min_tokens": 0,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed_on_server(request.seed),
            "stop": [] if cut else [string for string in sampling.stop_strings if string],
            "stop_token_ids": [] if cut else list(ends_of(sampling, eos_token_ids)),
            "ignore_eos": True,
            "bad_words": [],
            "include_stop_str_in_output": True,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": False,
            "detokenize": bool(sampling.stop_strings) and not cut,
            # the sampled token is one of those that are told
            "logprobs": request.top_logprobs + 1 if request.top_logprobs else 0,
            "prompt_logprobs": prompt_logprobs,
        },
    }


@frozen(eq=False)
class GenerateAnswer:
    """An answer of a server to a request: `tags` are the versions that it claims, by the first token of each span."""

    completion: Completion
    tags: tuple[tuple[int, str], ...]

    def with_versions(self, versions: Mapping[str, int]) -> Completion:
        """Return the completion with the versions that the tags stand for."""
        count = len(self.completion.token_ids)
        spans = [(start, versions[tag]) for start, tag in self.tags if start < count]
        spans = [span for place, span in enumerate(spans) if not place or span[1] != spans[place - 1][1]]
        starts = np.array([start for start, _ in spans], dtype=np.int32)
        return evolve(self.completion, versions=VersionSpans(starts, np.array([version for _, version in spans], dtype=np.int64)))


def name_on_server(name: str) -> str:
    """Return what a server calls a request that was sent under a name: in its answer, and where it is aborted."""
    return f"generate-tokens-{name}"


def answer_of(
    request: GenerationRequest, returned: object, *, name: str, eos_token_ids: Sequence[int], decode: Decode | None, vocabulary: int
) -> GenerateAnswer:
    """Read what a server returned to the request that it knows as `name`. Raises ServerFault for what no vLLM returns."""
    try:
        answer = _read(request, returned, name, vocabulary)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ServerFault(f"its answer is none of a vLLM server: {type(error).__name__}: {error}") from error
    return _cut(request, answer, eos_token_ids, decode) if is_cut_here(request.sampling) else answer


def _read(request: GenerationRequest, returned: Any, name: str, vocabulary: int) -> GenerateAnswer:
    if (told := returned["request_id"]) != name_on_server(name):
        raise ServerFault(f"it answered another request ({told!s:.100}) than {name_on_server(name)}, which was sent")
    (choice,) = returned["choices"]
    tokens = np.array(choice["token_ids"], dtype=np.int32)
    content = choice["logprobs"]["content"] or []
    logprobs = np.array([place["logprob"] for place in content], dtype=np.float32)
    if len(logprobs) != len(tokens) or [place["token_id"] for place in content] != tokens.tolist():
        raise ValueError(f"{len(logprobs)} log-probabilities of {len(tokens)} tokens")
    if len(tokens) > request.sampling.max_tokens or ((tokens < 0) | (tokens >= vocabulary)).any():
        raise ValueError(
            f"{len(tokens)} tokens, where {request.sampling.max_tokens} of a vocabulary of {vocabulary} were asked for"
        )
    finish = choice["finish_reason"]
    if finish not in ("stop", "length", "abort"):
        raise ValueError(f"it ended as {finish!r}")
    if finish == "length" and len(tokens) < request.sampling.max_tokens:
        raise ValueError(f"it ended for length after {len(tokens)} of {request.sampling.max_tokens} tokens")
    completion = Completion(
        request.request_id,
        tokens,
        np.minimum(logprobs, 0.0),
        VersionSpans.one(0, 0),
        finish,
        choice["stop_reason"] if finish == "stop" else None,
        prompt_logprobs=_prompt_logprobs(request, returned) if request.prompt_logprobs else None,
        top_logprobs=_top_logprobs(request, content) if request.top_logprobs else None,
    )
    spans = choice["weight_versions"] or []
    return GenerateAnswer(
        completion, tuple((int(span["start"]), str(span["version"])) for span in spans if span["end"] > span["start"])
    )


def _top_logprobs(request: GenerationRequest, content: Sequence[Any]) -> TopLogprobs:
    count = request.top_logprobs
    ids, scores = np.zeros((len(content), count), dtype=np.int32), np.zeros((len(content), count), dtype=np.float32)
    for row, place in enumerate(content):
        # the sampled token comes along, wherever it stands
        known = {each["token_id"]: each["logprob"] for each in place["top_logprobs"]}
        best = sorted(known.items(), key=lambda each: -each[1])[:count]
        ids[row], scores[row] = [token for token, _ in best], [score for _, score in best]
    return TopLogprobs(ids, scores)


def _prompt_logprobs(request: GenerationRequest, returned: Any) -> npt.NDArray[np.float32]:
    first, *places = returned["prompt_logprobs"]
    prompt = request.prompt_ids.tolist()
    if first is not None or len(places) != len(prompt) - 1:
        raise ValueError(f"log-probabilities of {len(places) + 1} places of a prompt of {len(prompt)} tokens")
    scores = [place[str(token)]["logprob"] for token, place in zip(prompt[1:], places, strict=True)]
    return np.array([np.nan, *scores], dtype=np.float32)


def _cut(request: GenerationRequest, answer: GenerateAnswer, eos_token_ids: Sequence[int], decode: Decode | None) -> GenerateAnswer:
    sampling, completion = request.sampling, answer.completion
    strings = [string for string in sampling.stop_strings if string]
    end = find_stop(completion.token_ids.tolist(), ends_of(sampling, eos_token_ids), strings, sampling.min_tokens, decode)
    if end is None:
        return answer
    top = completion.top_logprobs
    return evolve(
        answer,
        completion=evolve(
            completion,
            token_ids=completion.token_ids[: end.count],
            logprobs=completion.logprobs[: end.count],
            finish="stop",
            stop=end.stop,
            top_logprobs=None if top is None else TopLogprobs(top.token_ids[: end.count], top.logprobs[: end.count]),
        ),
    )
