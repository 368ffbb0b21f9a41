"""A request for samples as it comes from the wire: read, and held against what the server takes."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from attrs import frozen

from skyrl_engine.contracts import Sampling
from skyrl_engine_tinker.codecs import Array
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.settings import ServeTable

Absent = TypeVar("Absent", int, None)

_REFUSED = (
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "record_stability_info",
)
"""Fields that change an answer in a way that this server has not."""


@frozen
class SampleCall:
    """A request for `count` samples after one prompt, int32[P], P >= 1."""

    prompt: Array
    sampling: Sampling
    count: int
    seed: int | None
    prompt_logprobs: bool
    top_logprobs: int
    top_prompt_logprobs: int
    last: int
    """Count of the tokens at the prompt's end that are scored, where tokens of the prompt are."""

    @classmethod
    def read(cls, fields: Mapping[str, Any], limits: ServeTable) -> "SampleCall":
        """Read the body of `asample`. Raises RequestError, and KeyError, TypeError and ValueError for fields that are none."""
        params, chunks = fields["sampling_params"], fields["prompt"]["chunks"]
        if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
            raise RequestError("the prompt has a chunk that is no text; this server samples on tokens alone")
        if refused_fields := [name for name in _REFUSED if fields.get(name)]:
            raise RequestError(f"this server has no {refused_fields[0]}")
        prompt = np.array([token for chunk in chunks for token in chunk["tokens"]], dtype=np.int32)
        room, count = limits.longest - len(prompt), _read_whole_number(fields, "num_samples", 1)
        most = _read_whole_number(params, "max_tokens", 0) or room
        if not 1 <= count <= limits.samples or not 1 <= most <= room or not len(prompt):
            raise RequestError(
                f"{count} samples of {most} tokens after a prompt of {len(prompt)} do not fit: this server takes {limits.samples:,} samples "
                f"(serve.samples), and {limits.longest:,} tokens with the prompt (serve.longest)"
            )
        stop = params.get("stop")
        stops = [stop] if isinstance(stop, str) else list(stop or [])
        sampling = Sampling(
            max_tokens=most,
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(_read_whole_number(params, "top_k", -1), 0),
            stop_token_ids=tuple(stop for stop in stops if isinstance(stop, int)),
            stop_strings=tuple(stop for stop in stops if isinstance(stop, str)),
            ignore_eos=stop is not None and not stops,
        )
        top, top_of_prompt = (_read_whole_number(fields, name, 0) for name in ("topk_sample_logprobs", "topk_prompt_logprobs"))
        if not 0 <= min(top, top_of_prompt) <= max(top, top_of_prompt) <= limits.top_logprobs:
            raise RequestError(f"this server gives at most the {limits.top_logprobs} most likely tokens (serve.top_logprobs)")
        scored, last = bool(fields.get("prompt_logprobs")), _read_whole_number(fields, "prompt_logprobs_last_n", None)
        if last is not None and len(prompt) == 1:
            raise RequestError(
                "prompt_logprobs_last_n is for prompts of two tokens or more: a first token has no log-probability, and here is no other"
            )
        if last is not None and (not scored or not 1 <= last < len(prompt)):
            raise RequestError(f"prompt_logprobs_last_n goes with prompt_logprobs, and is 1 to {len(prompt) - 1} for this prompt")
        return cls(
            prompt, sampling, count, _read_whole_number(params, "seed", None), scored, top, top_of_prompt, last or len(prompt)
        )


def _read_whole_number(fields: Mapping[str, Any], name: str, absent: Absent) -> int | Absent:
    """Return a whole number of a request, `absent` where it is missing or null. Raises RequestError for anything else, 2.0 and true too."""
    value = fields.get(name)
    if value is None:
        return absent
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {json.dumps(value)}; it must be a whole number")
    return value
