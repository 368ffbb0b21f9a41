"""A request for samples as it comes from the wire: read, and held against what the server takes."""

import numpy as np
from attrs import frozen

from skyrl_engine.contracts import Sampling
from skyrl_engine_tinker import losses
from skyrl_engine_tinker.codecs import Array
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.requests import SampleRequest
from skyrl_engine_tinker.settings import ServeTable

_REFUSED = ("target_prompt_logprobs", "prompt_alt_tokens_k")
"""Fields that change an answer in a way that this server has not."""

_LARGEST_ID = int(np.iinfo(np.int32).max)


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
    def read(cls, request: SampleRequest, limits: ServeTable, longest: int) -> "SampleCall":
        """Read the body of `asample` for a model that takes `longest` tokens, the sample included. Raises RequestError."""
        params, chunks = request.sampling_params, request.prompt.chunks
        if any(chunk.type != "encoded_text" for chunk in chunks):
            raise RequestError("the prompt has a chunk that is no text; this server samples on tokens alone")
        if request.record_stability_info:
            available = ", ".join([*losses.INPUTS, *limits.losses])
            raise RequestError(
                "record_stability_info is for the loss stable_reinforce, whose formula is not public, so this server has neither: train with "
                f"another loss_fn and leave record_stability_info out. There are {available}"
            )
        if refused_fields := [name for name in _REFUSED if getattr(request, name)]:
            raise RequestError(f"this server has no {refused_fields[0]}")
        ids = [token for chunk in chunks for token in chunk.tokens]
        if ids and not 0 <= min(ids) <= max(ids) <= _LARGEST_ID:
            wrong = next(token for token in ids if not 0 <= token <= _LARGEST_ID)
            raise RequestError(f"the prompt has the token {wrong}, which no model knows")
        prompt = np.array(ids, dtype=np.int32)
        room, count = longest - len(prompt), request.num_samples
        most = params.max_tokens or room
        if not 1 <= count <= limits.samples or not 1 <= most <= room or not len(prompt):
            shorter = " or the model" if longest < limits.longest else ""
            raise RequestError(
                f"{count} samples of {most} tokens after a prompt of {len(prompt)} do not fit: this server takes {limits.samples:,} samples "
                f"(serve.samples), and {longest:,} tokens with the prompt (serve.longest{shorter})"
            )
        stop = params.stop
        stops = (stop,) if isinstance(stop, str) else stop or ()
        try:
            sampling = Sampling(
                max_tokens=most,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(params.top_k or 0, 0),
                stop_token_ids=tuple(stop for stop in stops if isinstance(stop, int)),
                stop_strings=tuple(stop for stop in stops if isinstance(stop, str)),
                ignore_eos=stop is not None and not stops,
            )
        except ValueError as error:
            raise RequestError(f"sampling_params: {error}") from error
        top, top_of_prompt = request.topk_sample_logprobs or 0, request.topk_prompt_logprobs or 0
        if not 0 <= min(top, top_of_prompt) <= max(top, top_of_prompt) <= limits.top_logprobs:
            raise RequestError(f"this server gives at most the {limits.top_logprobs} most likely tokens (serve.top_logprobs)")
        scored, last = bool(request.prompt_logprobs), request.prompt_logprobs_last_n
        if last is not None and len(prompt) == 1:
            raise RequestError(
                "prompt_logprobs_last_n is for prompts of two tokens or more: a first token has no log-probability, and here is no other"
            )
        if last is not None and (not scored or not 1 <= last < len(prompt)):
            raise RequestError(f"prompt_logprobs_last_n goes with prompt_logprobs, and is 1 to {len(prompt) - 1} for this prompt")
        return cls(prompt, sampling, count, params.seed, scored, top, top_of_prompt, last or len(prompt))
