"""Calls to an endpoint: read what comes back, and say what is sent again and after how long."""

import asyncio
import os
import random
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from attrs import define, field

from skyrl_engine import UnsupportedError

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before a request is sent again, where the endpoint names none: doubled after every failure, up to the second one."""

_CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""A connection per call: an endpoint closes idle ones, perhaps just while the next call is on its way."""

_SHOWN = 300


class EndpointError(Exception):
    """A request failed for good; `cause` is part of a sentence that names the endpoint."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(cause)


class TransientError(EndpointError):
    """A request failed, and may succeed if it is sent again, after `wait` seconds where the endpoint names them."""

    def __init__(self, cause: str, wait: float | None = None) -> None:
        self.wait = wait
        super().__init__(cause)


def read_key(name: str | None, setting: str) -> str | None:
    """Return the key that an environment variable holds. Raises UnsupportedError, which names the `setting`, where it is not set."""
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise UnsupportedError(
            f"the environment variable {name}, which holds the endpoint's API key, is not set",
            remedy=f"Export {name}, or let {setting} name another one",
        )
    return key


@define(eq=False)
class EndpointClient:
    """A client of the endpoint at `url`, for threads or for one event loop. Its key is sent as a header and shown nowhere."""

    url: str
    key: str | None = field(repr=False)
    seconds: float
    retries: int
    _threads: httpx.Client | None = field(default=None, init=False)
    _loop: httpx.AsyncClient | None = field(default=None, init=False)

    def post(self, path: str, body: object) -> Any:
        """Return the JSON that answers a body. Raises EndpointError when all retries failed, and at once where retries are no use."""
        if self._threads is None:
            self._threads = httpx.Client(**self._settings())
        patience = _Patience(self.retries, self.seconds)
        while True:
            try:
                return read(path, self._threads.post(f"{self.url.rstrip('/')}{path}", json=body))
            except httpx.TransportError as error:
                failure = _describe_transport(path, error)
            except TransientError as error:
                failure = error
            time.sleep(patience.wait_after(failure))

    async def post_in_loop(self, path: str, body: object) -> Any:
        """Do what `post` does, in an event loop."""
        if self._loop is None:
            self._loop = httpx.AsyncClient(**self._settings())
        patience = _Patience(self.retries, self.seconds)
        while True:
            try:
                return read(path, await self._loop.post(f"{self.url.rstrip('/')}{path}", json=body))
            except httpx.TransportError as error:
                failure = _describe_transport(path, error)
            except TransientError as error:
                failure = error
            await asyncio.sleep(patience.wait_after(failure))

    async def close_in_loop(self) -> None:
        """Close the connections of the event loop."""
        if self._loop is not None:
            await self._loop.aclose()

    def _settings(self) -> dict[str, Any]:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return {"headers": headers, "timeout": self.seconds, "limits": _CONNECTIONS}


@define
class _Patience:
    """The retries of one request: so many, and none after a wait of more than `longest` seconds."""

    retries: int
    longest: float
    failures: int = field(default=0, init=False)

    def wait_after(self, failure: TransientError) -> float:
        """Return the seconds to wait before the request is sent again. Raises EndpointError where it is not."""
        self.failures += 1
        if self.failures > self.retries:
            count = f"{self.failures} attempts failed, the last one so: " if self.failures > 1 else ""
            raise EndpointError(f"{count}{failure.cause}") from failure
        if failure.wait is not None:
            if failure.wait > self.longest:
                raise EndpointError(
                    f"{failure.cause}, and asks for a wait of {failure.wait:g} s, longer than the {self.longest:g} s that a request may take"
                ) from failure
            return failure.wait
        # a random share, so that requests which failed together do not come back together
        return min(FIRST_WAIT * 2.0 ** (self.failures - 1), LONGEST_WAIT) * random.SystemRandom().uniform(0.5, 1.0)


def read(path: str, response: httpx.Response) -> Any:
    """Return the JSON object of a response. Raises TransientError for 429 and from 500 on, EndpointError for everything else that is none."""
    status = response.status_code
    if status == 429 or status >= 500:
        raise TransientError(f"answered {path} with {status}: {_reason(response)}", _retry_after(response))
    if status >= 400:
        raise EndpointError(f"refused {path} ({status}): {_reason(response)}")
    if "html" in response.headers.get("content-type", ""):
        raise EndpointError(f"answered {path} with a web page: its base URL is another one")
    if status != 200:
        raise EndpointError(f"answered {path} with {status}: its base URL is another one")
    try:
        answer = response.json()
    except ValueError as error:
        raise EndpointError(f"answered {path} with what is no JSON: {response.text:.{_SHOWN}}") from error
    if not isinstance(answer, dict):
        raise EndpointError(f"answered {path} with what is no JSON object: {response.text:.{_SHOWN}}")
    return answer


def _describe_transport(path: str, error: httpx.TransportError) -> TransientError:
    if isinstance(error, httpx.TimeoutException):
        return TransientError(f"did not answer {path} in time")
    if isinstance(error, httpx.ConnectError):
        return TransientError(f"cannot be reached ({error})")
    return TransientError(f"lost the connection during {path} ({type(error).__name__}: {error})")


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of the header Retry-After, which holds seconds or a date (RFC 9110, 10.2.3); None without one that can be read."""
    text = response.headers.get("retry-after", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            until = parsedate_to_datetime(text)
        except ValueError:
            return None
        seconds = (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if seconds < float("inf") else None


def _reason(response: httpx.Response) -> str:
    try:
        answer = response.json()
        error = answer.get("error", answer.get("detail", answer))
        words = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        words = "a web page" if "html" in response.headers.get("content-type", "") else response.text
    return f"{words!s:.{_SHOWN}}"
