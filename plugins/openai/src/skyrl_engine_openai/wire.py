"""The bodies of requests to an endpoint, and what it answers, in the engine's terms.

Every field of `Sampling` is sent, kept here, or refused by name, as the dialect says:

    field                     "openai"           "vllm"
    max_tokens                sent, cut here     sent
    temperature, top_p        sent               sent
    stop_strings              found here         sent
    top_k, min_p              refused            sent
    stop_token_ids            refused            sent
    ignore_eos                refused            sent
    min_tokens above 1        refused            refused
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import Completion, FinishReason, GenerationRequest, VersionSpans
from skyrl_engine_openai.client import EndpointError
from skyrl_engine_openai.options import OpenaiOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SEEDS = 1 << 31
"""Seeds that are sent are below this: some endpoints take no larger ones."""

_SHOWN = 300


def refuse_unsupported(request: GenerationRequest, options: OpenaiOptions) -> None:
    """Raise UnsupportedError for what the endpoint's dialect has no word for; it would be left out in silence."""
    sampling = request.sampling
    if sampling.min_tokens > 1:
        raise UnsupportedError(
            f"request {request.request_id} asks for min_tokens, for which endpoints change the distribution, or have no word",
            remedy="Sample without min_tokens, or with the generator hf or vllm",
        )
    if options.dialect == "vllm":
        return
    words = {
        "top_k": sampling.top_k > 0,
        "min_p": sampling.min_p > 0.0,
        "stop_token_ids": bool(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    for name, is_asked in words.items():
        if is_asked:
            raise UnsupportedError(
                f"request {request.request_id} asks for {name}, which not every OpenAI-compatible endpoint knows",
                remedy=f'Sample without {name}, or set generator.dialect = "vllm" if the endpoint is a vLLM server',
            )


@frozen(eq=False)
class Wire:
    """The two directions between requests and an endpoint. A tokenizer serves one thread at a time: that of `body_of` and `completion_of`."""

    options: OpenaiOptions
    tokenizer: "PreTrainedTokenizerBase"
    eos_token_ids: Sequence[int]
    version: int
    vocabulary: int
    _prefix: tuple[int, ...]
    """Tokens that the tokenizer puts before every text, and an endpoint too."""
    _special: Mapping[int, str]
    """The special tokens of the tokenizer."""

    @classmethod
    def open(
        cls,
        options: OpenaiOptions,
        tokenizer: "PreTrainedTokenizerBase",
        eos_token_ids: Sequence[int],
        version: int,
        vocabulary: int | None,
    ) -> "Wire":
        """Learn from the tokenizer what it adds to texts."""
        prefix = tuple(tokenizer.encode(""))
        special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        return cls(options, tokenizer, eos_token_ids, version, vocabulary or len(tokenizer), prefix, special)

    @property
    def path(self) -> str:
        """The route that is called."""
        return "/completions" if self.options.endpoint == "completions" else "/chat/completions"

    def require_plain(self, request: GenerationRequest) -> None:
        """Raise UnsupportedError for a prompt that a chat template rendered, where the endpoint would render it again."""
        special = next((self._special[token] for token in self._own_ids(request) if token in self._special), None)
        if self.options.endpoint == "chat" and special is not None:
            raise UnsupportedError(
                f"the prompt of request {request.request_id} has the special token {special}, and a chat endpoint renders messages itself",
                remedy='Set rl.template = "none" for tasks of one turn, or generator.endpoint = "completions"',
            )

    def body_of(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the body of a request."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.options.model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed % _SEEDS,
        }
        if self.options.dialect == "vllm":
            # all that a vLLM server has defaults of its own for, from the model's generation config
            ends = () if sampling.ignore_eos else self.eos_token_ids
            return body | {
                "prompt": request.prompt_ids.tolist(),
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "repetition_penalty": 1.0,
                "stop": list(sampling.stop_strings),
                "stop_token_ids": list(dict.fromkeys((*sampling.stop_token_ids, *ends))),
                "ignore_eos": True,
                "include_stop_str_in_output": True,
                "return_token_ids": True,
            }
        text = self._decode(self._own_ids(request), skip_special_tokens=False)
        if self.options.endpoint == "chat":
            return body | {"messages": [{"role": "user", "content": text}]}
        return body | {"prompt": text}

    def completion_of(self, request: GenerationRequest, answer: Mapping[str, Any]) -> Completion:
        """Read an answer. Raises EndpointError for what is none."""
        try:
            choice = answer["choices"][0]
            text = choice["text"] if self.options.endpoint == "completions" else choice["message"]["content"]
            finish = choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise EndpointError(f"answered with what is no completion: {answer!r:.{_SHOWN}}") from error
        if finish not in ("stop", "length"):
            raise EndpointError(f"ended its answer as {finish!r}")
        if not isinstance(text, str):
            raise EndpointError(f"answered without a text: {choice!r:.{_SHOWN}}")
        if self.options.dialect == "vllm":
            return self._read_ids(request, choice, text, finish)
        return self._read_text(request, text, finish)

    def _own_ids(self, request: GenerationRequest) -> list[int]:
        """Return the tokens of a prompt without those that an endpoint puts before it."""
        ids: list[int] = request.prompt_ids.tolist()
        count = len(self._prefix)
        return ids[count:] if count and len(ids) > count and tuple(ids[:count]) == self._prefix else ids

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _read_ids(self, request: GenerationRequest, choice: Mapping[str, Any], text: str, finish: FinishReason) -> Completion:
        ids = choice.get("token_ids")
        if not isinstance(ids, list) or not all(isinstance(each, int) and 0 <= each < self.vocabulary for each in ids):
            raise EndpointError(
                f'gave the token_ids {ids!r:.80}, where ids below {self.vocabulary} are due (generator.dialect = "vllm"): it is no vLLM '
                "server of the run's model"
            )
        if _letters(text) != _letters(self._decode(ids, skip_special_tokens=True)):
            raise EndpointError("gave token_ids that spell another text than its own: it has another tokenizer than the run")
        stop = choice.get("stop_reason")
        return self._make(request, ids, finish, stop if finish == "stop" and isinstance(stop, int | str) else None)

    def _read_text(self, request: GenerationRequest, text: str, finish: FinishReason) -> Completion:
        stop: int | str | None = None
        found = [(text.index(string) + len(string), string) for string in request.sampling.stop_strings if string in text]
        if found:
            end, stop = min(found)
            text, finish = text[:end], "stop"
        # what is written like a special token is text
        ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if finish == "stop" and stop is None and self.eos_token_ids:
            stop = self.eos_token_ids[0]
            ids = [*ids, stop]
        if len(ids) > request.sampling.max_tokens:
            ids, finish, stop = ids[: request.sampling.max_tokens], "length", None
        return self._make(request, ids, finish, stop)

    def _make(self, request: GenerationRequest, ids: Sequence[int], finish: FinishReason, stop: int | str | None) -> Completion:
        tokens = np.array(ids, dtype=np.int32)
        unknown = np.full(len(tokens), np.nan, dtype=np.float32)
        return Completion(request.request_id, tokens, unknown, VersionSpans.one(self.version, len(tokens)), finish, stop)


def _letters(text: str) -> str:
    """Return a text without what servers decode differently: spaces at its start, and halves of characters at its end."""
    return "".join(each for each in text if not each.isspace() and each != "\N{REPLACEMENT CHARACTER}")


def empty(request: GenerationRequest, finish: FinishReason, error: str | None = None) -> Completion:
    """Return a completion without tokens."""
    nothing = np.zeros(0, dtype=np.int32)
    return Completion(request.request_id, nothing, nothing.astype(np.float32), VersionSpans.one(0, 0), finish, error=error)
