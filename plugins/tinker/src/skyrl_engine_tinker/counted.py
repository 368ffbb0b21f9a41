"""Requests counted on their way: call, status, seconds, bytes."""

import time
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_engine_tinker.metrics import Counters


class Counted:
    """Middleware that counts every HTTP request, by names of this server alone: what clients make up has none."""

    def __init__(self, app: ASGIApp, counters: Counters, calls: Collection[str]) -> None:
        self._app, self._counters, self._calls = app, counters, calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, received, sent_bytes = time.perf_counter(), 500, 0, 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            nonlocal status, sent_bytes
            status = message.get("status", status)
            sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            self._counters.count_request(self._name(scope), status, time.perf_counter() - begin, received, sent_bytes)

    def _name(self, scope: Scope) -> str:
        endpoint: Any = scope.get("endpoint")
        call = scope.get("path_params", {}).get("call")
        if call is not None:
            return str(call) if call in self._calls else "unknown"
        return str(getattr(endpoint, "__name__", "unknown"))
