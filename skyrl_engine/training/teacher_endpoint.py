"""A teacher behind an endpoint: a server that tells the log-probabilities of the tokens that it is given.

It is asked by the route `/completions` of the OpenAI API, with token ids as the prompt and vLLM's parameter `prompt_logprobs`, which answers,
for every token after the first, its id with its log-probability, and those of the k likeliest. Every answer is compared with what was asked,
token by token: an answer about other tokens, or another number of them, ends the run.
"""

import json
import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import Request, build_opener

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from skyrl_engine.config.schema import TeacherConfig
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.data.table.teacher_rows import TEACHER_IDS, TEACHER_LOGPROBS
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.spans import Spans

logger = logging.getLogger(__name__)

_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 30.0
"""Seconds before a request is sent again: doubled after every failure, up to the second one, unless the server names them."""

_MARKS: Final = " \N{LATIN CAPITAL LETTER G WITH DOT ABOVE}\N{LOWER ONE EIGHTH BLOCK}"
"""Characters that stand for the space before a word in names of tokens."""

_CERTAIN: Final = 1.001
"""Largest sum of the probabilities of one place: 1, and what rounding adds."""
_SHOWN: Final = 300
"""Characters of a server's words in an error."""

Decode = Callable[[int], str]
"""A token id to its text, by the student's tokenizer."""


@frozen
class ScoredText:
    """The log-probabilities float32[T] of T tokens, 0 for the first, and the k likeliest tokens at each place, int64[T, k] and float32[T, k];
    k is 0 where none were asked for.
    """

    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]


class _TransientError(Exception):
    """A request failed, and may succeed if it is sent again, after `wait` seconds where the server names them."""

    def __init__(self, cause: str, wait: float | None = None) -> None:
        self.cause, self.wait = cause, wait
        super().__init__(cause)


@define(eq=False)
class EndpointTeacher:
    """A teacher that a server holds. `decode` is the student's tokenizer, with which the server's names of tokens are compared, and
    `vocabulary_size` the number of tokens that the student has embeddings for, None where its configuration does not say.
    """

    table: TeacherConfig
    decode: Decode = field(repr=False)
    key: str | None = field(repr=False)
    vocabulary_size: int | None = None
    _checked: set[int] = field(factory=set, init=False, repr=False)

    @classmethod
    def of(cls, table: TeacherConfig, decode: Decode, vocabulary_size: int | None = None) -> "EndpointTeacher":
        """Read the key that the table names. Raises UnsupportedError where the environment lacks it."""
        key = None
        if table.api_key_env is not None:
            key = os.environ.get(table.api_key_env)
            if not key:
                raise UnsupportedError(
                    f"the environment variable {table.api_key_env}, which holds the teacher's API key, is not set",
                    remedy=f"Export {table.api_key_env}, or let teacher.api_key_env name another one",
                )
        return cls(table, decode, key, vocabulary_size)

    def score(self, columns: SampleColumns, spans: Spans | None = None) -> dict[str, AnyArray]:
        """Return the columns that the teacher gives, on the action axis: `teacher_logprobs` float32[A] of the samples' own tokens or, with
        `teacher.top_k`, `teacher_ids` int64[A, k] and `teacher_logprobs` float32[A, k] of the likeliest. Samples without loss are not asked
        about, and are 0.

        Raises ModelError where the server does not answer, or answers about other tokens, and UnsupportedError for another tokenizer.
        """
        with (spans or Spans())("teacher"):
            samples = [
                sample
                for sample in range(len(columns))
                if columns.loss_weight[columns.action_offsets[sample] : columns.action_offsets[sample + 1]].any()
            ]
            texts = [
                columns.input_ids[columns.token_offsets[sample] : columns.token_offsets[sample + 1]].tolist() for sample in samples
            ]
            with ThreadPoolExecutor(self.table.concurrency) as pool:
                scored = list(pool.map(self.ask, texts))
        return self._lay_out(columns, dict(zip(samples, scored, strict=True)))

    def _lay_out(self, columns: SampleColumns, scored: Mapping[int, ScoredText]) -> dict[str, AnyArray]:
        total, width = int(columns.action_offsets[-1]), self.table.top_k
        logprobs = np.zeros(total if width is None else (total, width), dtype=np.float32)
        ids = np.zeros((total, width or 0), dtype=np.int64)
        for sample, text in scored.items():
            start, end = columns.action_offsets[sample : sample + 2].tolist()
            first = len(text.logprobs) - (end - start)
            logprobs[start:end] = text.logprobs[first:] if width is None else text.top_logprobs[first:]
            ids[start:end] = text.top_ids[first:]
        return {TEACHER_LOGPROBS: logprobs} if width is None else {TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs}

    def ask(self, ids: Sequence[int]) -> ScoredText:
        """Return what the server says of one text. Raises as `score` does."""
        body = {
            "model": self.table.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self.table.top_k or 0,
        }
        answer = self._post("/completions", body)
        try:
            (choice,) = answer["choices"]
            told = choice["prompt_logprobs"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._refuse(
                "answered without prompt_logprobs", "Use a server that knows vLLM's parameter prompt_logprobs, such as vLLM"
            ) from error
        return self._read(list(ids), told)

    def _read(self, ids: list[int], told: Any) -> ScoredText:
        """Read an answer, every place of which must be about the token that was asked about."""
        if not isinstance(told, list) or len(told) != len(ids):
            count = len(told) if isinstance(told, list) else "no"
            raise self._refuse(
                f"answered for {count} tokens where {len(ids)} were asked about",
                "Check that it takes token ids as they are, and cuts none",
            )
        width = self.table.top_k or 0
        logprobs = np.zeros(len(ids), dtype=np.float32)
        top_ids, top_logprobs = np.zeros((len(ids), width), dtype=np.int64), np.zeros((len(ids), width), dtype=np.float32)
        for place, (token, entries) in enumerate(zip(ids[1:], told[1:], strict=True), 1):
            if isinstance(entries, dict) and not all(
                other.isdecimal() and isinstance(entry, dict) for other, entry in entries.items()
            ):
                raise self._refuse(
                    f"answered at token {place} with what is no log-probability of a token's id",
                    "Use a server that names tokens by their ids, as vLLM's prompt_logprobs does",
                )
            own = entries.get(str(token)) if isinstance(entries, dict) else None
            if not isinstance(own, dict):
                raise self._refuse(
                    f"answered at token {place} about other tokens than {token}, which was asked about",
                    "Check that it takes token ids as they are, and adds none",
                )
            self._require_same_token(token, own.get("decoded_token"))
            logprobs[place] = self._read_number(own, place)
            likeliest = sorted(
                ((int(other), entry) for other, entry in entries.items()),
                key=lambda each: (-self._read_number(each[1], place), each[0]),
            )[:width]
            rank = own.get("rank")
            # beside the likeliest stands the token itself, where it is none of them
            missing = len(entries) == width and isinstance(rank, int) and rank > width
            if len(likeliest) < width or missing:
                raise self._refuse(
                    f"answered at token {place} with {len(entries) - missing} of the {width} likeliest tokens",
                    "Lower teacher.top_k, or raise the server's limit, such as vLLM's --max-logprobs",
                )
            beyond = max((other for other, _ in likeliest), default=0)
            if self.vocabulary_size is not None and beyond >= self.vocabulary_size:
                raise self._refuse(
                    f"answered at token {place} that token {beyond} is likely, and the trained model has {self.vocabulary_size} tokens",
                    "Set teacher.url to a model with the tokenizer of the trained one",
                )
            for column, (other, entry) in enumerate(likeliest):
                top_ids[place, column], top_logprobs[place, column] = other, self._read_number(entry, place)
            if (total := float(np.exp(top_logprobs[place]).sum())) > _CERTAIN and width:
                raise self._refuse(
                    f"answered at token {place} with probabilities that add up to {total:.4g}",
                    "Check the server: those of one place add up to at most 1",
                )
        return ScoredText(logprobs, top_ids, top_logprobs)

    def _read_number(self, entry: Mapping[str, Any], place: int) -> float:
        value = entry.get("logprob")
        if not isinstance(value, int | float) or isinstance(value, bool) or not -np.inf < value <= 1e-6:
            raise self._refuse(
                f"answered with {value!r} as a log-probability at token {place}", "Check the server: it is a number of at most 0"
            )
        return min(float(value), 0.0)

    def _require_same_token(self, token: int, name: object) -> None:
        """Refuse a server that calls a token something else than the student's tokenizer does; names that are not plain words say nothing."""
        if token in self._checked or not isinstance(name, str):
            return
        theirs, ours = (text.strip(_MARKS) for text in (name, self.decode(token)))
        if all(text.isascii() and text.isalnum() for text in (theirs, ours)) and theirs != ours:
            raise UnsupportedError(
                f"the teacher at {self.table.url} has another tokenizer: it calls the token {token} {theirs!r}, which is {ours!r} to the "
                "trained model",
                remedy="Set teacher.url to a model with the tokenizer of the trained one",
            )
        self._checked.add(token)

    def _post(self, route: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON that answers a body, sent again while that may help. Raises ModelError."""
        failures = 0
        while True:
            try:
                return self._send(route, body)
            except _TransientError as error:
                failures += 1
                if failures > self.table.retries or (error.wait or 0) > self.table.request_seconds:
                    count = f"{failures} attempts failed, the last one so: " if failures > 1 else ""
                    raise self._refuse(
                        f"{count}{error.cause}", "Check teacher.url and the server, or raise teacher.retries"
                    ) from error
                waits = min(_FIRST_WAIT * 2.0 ** (failures - 1), _LONGEST_WAIT) * random.SystemRandom().uniform(0.5, 1.0)
                time.sleep(waits if error.wait is None else error.wait)

    def _send(self, route: str, body: Mapping[str, Any]) -> Any:
        """Send a body once. Raises _TransientError where another attempt may succeed, and ModelError where none can."""
        headers = {"Content-Type": "application/json", **({} if self.key is None else {"Authorization": f"Bearer {self.key}"})}
        request = Request(f"{str(self.table.url).rstrip('/')}{route}", json.dumps(body).encode(), headers)  # noqa: S310 the schema allows http alone
        try:
            with build_opener().open(request, timeout=self.table.request_seconds) as response:
                answer = json.loads(response.read())
        except HTTPError as error:
            words = f"answered {route} with {error.code}: {error.read().decode(errors='replace'):.{_SHOWN}}"
            if error.code == 429 or error.code >= 500:
                raise _TransientError(words, _read_wait(error.headers.get("Retry-After"))) from error
            raise self._refuse(words, "Check teacher.model, teacher.api_key_env and the server's longest text") from error
        except TimeoutError as error:
            raise _TransientError(f"did not answer {route} in {self.table.request_seconds:g} s") from error
        except (URLError, HTTPException, OSError) as error:
            raise _TransientError(f"cannot be reached ({getattr(error, 'reason', error)})") from error
        except ValueError as error:
            raise self._refuse(
                f"answered {route} with what is no JSON", "Check teacher.url, which ends before /completions"
            ) from error
        return answer

    def _refuse(self, cause: str, remedy: str) -> ModelError:
        return ModelError(f"the teacher at {self.table.url}: {cause}", remedy=remedy)


def make_decode(tokenizer: Any) -> Decode:
    """Return what names a tokenizer's tokens, each by itself."""
    return partial(_decode_one, tokenizer)


def _decode_one(tokenizer: Any, token: int) -> str:
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _read_wait(text: str | None) -> float | None:
    """Return the seconds of a header Retry-After; None for a date, and without one."""
    try:
        return max(0.0, float(text or ""))
    except ValueError:
        return None
