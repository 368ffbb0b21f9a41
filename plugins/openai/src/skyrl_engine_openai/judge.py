"""A judge for rewards: ask a model at an endpoint from a reward function, with retries, a limit on concurrency and a cache on disk."""

import fcntl
import hashlib
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from attrs import frozen

from skyrl_engine import RolloutError
from skyrl_engine_openai.client import EndpointClient, EndpointError, read_key
from skyrl_engine_openai.options import require_url

_TABLE = "CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, text TEXT NOT NULL, finish TEXT) WITHOUT ROWID"

_PATIENCE_SECONDS = 60.0
"""Seconds in which another process must have finished writing to the cache."""

_NAP = 0.02


@frozen
class Judgement:
    """The text of a judge's answer, why it ended ("stop", "length"), and its cost under the names of metrics.

    `metrics` are `judge/requests` and `judge/cache_hits`, one of which is 1, `judge/prompt_tokens` and `judge/completion_tokens`. These are 0
    for an answer from the cache, and where the endpoint counts none.
    """

    text: str
    finish: str | None
    metrics: Mapping[str, float]


class Judge:
    """A model at an OpenAI-compatible endpoint that is asked for judgements: `judge(messages)`.

    `url` ends before `/chat/completions`. `sampling` are further fields of every request, such as `temperature` (0 where none is named),
    `max_tokens` or `response_format`. `concurrency` limits the requests under way to the endpoint from this machine, over all processes of
    this user. `cache` is a file, which several processes may share, that keeps every answer under its url, model, messages and sampling
    settings; the key is not in it. `retries` and `seconds` are as the options `retries` and `request_seconds` of the generator.

    Raises ValueError for a `url` that is none, UnsupportedError where the variable that `api_key_env` names is not set.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        cache: str | Path | None = None,
        concurrency: int = 8,
        retries: int = 5,
        seconds: float = 60.0,
        **sampling: Any,
    ) -> None:
        require_url(url)
        if concurrency < 1:
            raise ValueError(f"a judge with concurrency = {concurrency} could never ask")
        self._client = EndpointClient(url, read_key(api_key_env, "api_key_env"), seconds, retries)
        self._body = {"model": model, "temperature": 0, **sampling}
        self._cache = None if cache is None else Path(cache).expanduser()
        self.concurrency = concurrency
        place = hashlib.sha256(url.encode()).hexdigest()[:16]
        self._slots = Path(tempfile.gettempdir()) / f"skyrl-engine-judge-{os.getuid()}-{place}"

    def __call__(self, messages: str | Sequence[Mapping[str, Any]]) -> Judgement:
        """Return the answer to messages, or to one of the user. Raises RolloutError where the endpoint gives none."""
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(message) for message in messages]
        body = {**self._body, "messages": asked}
        question = hashlib.sha256(json.dumps([self._client.url, body], sort_keys=True).encode()).hexdigest()
        if (known := self._find(question)) is not None:
            return Judgement(*known, _count(cache_hits=1))
        try:
            with self._take_slot():
                answer = self._client.post("/chat/completions", body)
            text, finish, usage = _read(answer)
        except EndpointError as error:
            raise RolloutError(
                f"the judge at {self._client.url} {error.cause}", remedy="Check its url, model and key, or raise its retries"
            ) from error
        self._keep(question, text, finish)
        return Judgement(text, finish, _count(requests=1, **usage))

    @contextmanager
    def _take_slot(self) -> Iterator[None]:
        """Hold one of `concurrency` locked files; the system frees those of a process that ends. Files that nobody holds are deleted after."""
        while True:
            for number in range(self.concurrency):
                if (held := _lock(self._slots / str(number))) is None:
                    continue
                try:
                    yield
                finally:
                    held.close()
                    _delete_free_slots(self._slots)
                return
            time.sleep(_NAP)

    def _open(self, path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=_PATIENCE_SECONDS)
        connection.execute(_TABLE)
        return connection

    def _find(self, question: str) -> tuple[str, str | None] | None:
        if self._cache is None:
            return None
        with closing(self._open(self._cache)) as cache:
            row: tuple[str, str | None] | None = cache.execute(
                "SELECT text, finish FROM answers WHERE question = ?", (question,)
            ).fetchone()
        return row

    def _keep(self, question: str, text: str, finish: str | None) -> None:
        if self._cache is not None:
            with closing(self._open(self._cache)) as cache, cache:
                cache.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", (question, text, finish))


def _lock(slot: Path) -> IO[str] | None:
    """Return a slot's file, locked and open; None where another one holds it."""
    while True:
        # not by exist_ok: that looks whether it is a folder, by which time somebody may have deleted it
        with suppress(FileExistsError):
            slot.parent.mkdir(mode=0o700)
        try:
            file = slot.open("a")
        except FileNotFoundError:  # somebody has deleted the folder meanwhile
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if slot.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:
            pass
        # the file of that name is another one, or none, since it was opened
        file.close()


def _delete_free_slots(slots: Path) -> None:
    """Delete the files of slots that nobody holds, those of processes that were killed among them, and the folder with the last."""
    with suppress(OSError):
        for slot in slots.iterdir():
            with slot.open("r") as file, suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if slot.stat().st_ino == os.fstat(file.fileno()).st_ino:
                    slot.unlink()
        slots.rmdir()


def _read(answer: Mapping[str, Any]) -> tuple[str, str | None, dict[str, float]]:
    try:
        choice = answer["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
        usage = answer.get("usage") or {}
        counts = {name: float(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EndpointError(f"answered with what is no chat completion: {answer!r:.300}") from error
    if not isinstance(text, str):
        raise EndpointError(f"answered without a text: {choice!r:.300}")
    return text, finish, counts


def _count(
    requests: float = 0.0, cache_hits: float = 0.0, prompt_tokens: float = 0.0, completion_tokens: float = 0.0
) -> dict[str, float]:
    return {
        "judge/requests": float(requests),
        "judge/cache_hits": float(cache_hits),
        "judge/prompt_tokens": prompt_tokens,
        "judge/completion_tokens": completion_tokens,
    }
