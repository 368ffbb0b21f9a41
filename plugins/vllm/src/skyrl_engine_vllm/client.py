"""Calls to one vLLM server over HTTP: those that control it, which wait, and those that generate, which do not."""

from collections.abc import Mapping
from typing import Any

import httpx

from skyrl_engine_vllm.errors import Refusal, ServerFault

PROBE_SECONDS = 10.0
"""Seconds in which a healthy server says that it is."""

_CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""A connection per call: a server closes idle ones, perhaps just while the next call is on its way, which looks as if it had died."""

PLAIN = {"/v1/load_lora_adapter": "Success"}
"""Routes that answer in words."""

_SHOWN = 300


class ServerClient:
    """A client of the server at `url`. Its key is sent as a header and shown nowhere."""

    def __init__(self, url: str, key: str | None, *, seconds: float) -> None:
        self.url = url.rstrip("/")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # no proxy of the environment stands between a run and its servers
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=seconds, limits=_CONNECTIONS, trust_env=False)
        self._headers = headers

    def open_asynchronous(self, seconds: float) -> httpx.AsyncClient:
        """Return a client for the requests of an event loop."""
        return httpx.AsyncClient(base_url=self.url, headers=self._headers, timeout=seconds, limits=_CONNECTIONS, trust_env=False)

    def get(self, path: str, *, seconds: float | None = None) -> Any:
        """Return the JSON at a path. Raises ServerFault, or Refusal where the server says what is wrong with the call."""
        return self._call("GET", path, None, {}, seconds)

    def post(self, path: str, body: object = None, *, seconds: float | None = None, **query: str) -> Any:
        """Post JSON to a path, and return what comes back; see `get`."""
        return self._call("POST", path, body, query, seconds)

    def is_healthy(self) -> bool:
        """Ask the server if it and its engine live."""
        try:
            self.get("/health", seconds=PROBE_SECONDS)
        except ServerFault:
            return False
        return True

    def ask_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of the worker extension, and return each worker's result."""
        answer = self.post("/collective_rpc", {"method": method, "kwargs": arguments})
        try:
            results: list[Any] = answer["results"]
        except (KeyError, TypeError) as error:
            raise ServerFault(f"its answer to /collective_rpc is none of a vLLM server: {answer!r:.{_SHOWN}}") from error
        return results

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _call(self, method: str, path: str, body: object, query: Mapping[str, str], seconds: float | None) -> Any:
        timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else httpx.Timeout(seconds)
        try:
            response = self._client.request(method, path, json=body, params=dict(query), timeout=timeout)
        except httpx.HTTPError as error:
            raise ServerFault(describe_transport(path, error)) from error
        return read(path, response)


def describe_transport(path: str, error: httpx.HTTPError) -> str:
    """Say what is wrong with a connection."""
    if isinstance(error, httpx.TimeoutException):
        return f"it did not answer {path} in time"
    if isinstance(error, httpx.ConnectError):
        return f"it cannot be reached ({error})"
    return f"the connection broke during {path} ({type(error).__name__}: {error})"


def read(path: str, response: httpx.Response) -> Any:
    """Return the JSON of a response, or the words of a route of `PLAIN`.

    Raises Refusal for a status below 500 that is no success, ServerFault for all else.
    """
    text = response.text
    if response.status_code >= 500:
        raise ServerFault(f"it answered {path} with {response.status_code}: {text:.{_SHOWN}}")
    if "html" in response.headers.get("content-type", ""):
        raise ServerFault(f"it answered {path} with a web page, which no vLLM server does")
    if response.status_code >= 400:
        raise Refusal(f"it refused {path} ({response.status_code}): {_reason(response)}")
    if response.status_code != 200:
        raise ServerFault(f"it answered {path} with {response.status_code}")
    if not text:
        return {}
    if path in PLAIN and text.startswith(PLAIN[path]):
        return text
    try:
        return response.json()
    except ValueError as error:
        raise ServerFault(f"it answered {path} with what is no JSON: {text:.{_SHOWN}}") from error


def _reason(response: httpx.Response) -> str:
    try:
        answer = response.json()
        error = answer.get("error", answer.get("detail", answer))
        words = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        words = response.text
    return f"{words!s:.{_SHOWN}}"
