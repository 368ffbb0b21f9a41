"""Routes of the API: who may call, how large a body may be, and which call it is. Nothing here blocks, so heartbeats are answered."""

import contextlib
import functools
import hmac
from collections.abc import AsyncIterator
from typing import Any, TextIO

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from skyrl_engine_tinker.access import LocalCallers
from skyrl_engine_tinker.bodies import read_body
from skyrl_engine_tinker.calls import CALLS
from skyrl_engine_tinker.counted import Counted
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.redaction import ErrorRedactor
from skyrl_engine_tinker.rest import downloads, rest
from skyrl_engine_tinker.server import Server
from skyrl_engine_tinker.settings import Settings


def application(
    settings: Settings, api_key: str | None = None, request_log: TextIO | None = None, *, anyone: bool = False
) -> FastAPI:
    """Return the server as an ASGI application.

    With `api_key` every request must bring it in X-API-Key, or as a bearer token. Without one, requests of web pages and under names of other
    hosts are refused, unless `anyone` may call. `request_log` gets a line of JSON per request.
    """
    server, redactor = Server(settings), ErrorRedactor(settings)
    server.counters.log = request_log
    for name, about, value in server.gauges():
        server.counters.gauge(name, about, value)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        yield
        await server.shut_down()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.release_polls = server.release_polls

    @app.exception_handler(HTTPException)
    async def refuse(_request: Request, error: HTTPException) -> Response:
        return JSONResponse({"detail": redactor.redact(str(error.detail))}, status_code=error.status_code, headers=error.headers)

    @app.post("/api/v1/{call}")
    async def post(call: str, request: Request) -> Response:
        _authorize(request, api_key)
        if (known_call := CALLS.get(call)) is None:
            raise HTTPException(404, f"this server has no {call}")
        body = await read_body(request, settings.serve.body_bytes)
        try:
            answer = await known_call.run(server, body)
        except RequestError as error:
            raise HTTPException(422, str(error)) from error
        return (
            Response(answer, media_type="application/x-protobuf")
            if isinstance(answer, bytes)
            else JSONResponse(redactor.redact_answer(answer))
        )

    @app.post("/api/v1/client/{_kind}")
    async def client_config(_kind: str, request: Request) -> Any:
        _authorize(request, api_key)
        return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": True}

    @app.post("/api/v1/sessions/{session}/finish")
    async def finish(session: str, request: Request) -> Response:
        _authorize(request, api_key)
        await server.end(session)
        return Response(status_code=204)

    @app.get("/healthz")
    @app.get("/api/v1/healthz")
    async def healthz() -> Any:
        # without the key: whoever watches the process need not be a client
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        _authorize(request, api_key)
        return Response(server.counters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(rest(server, functools.partial(_authorize, api_key=api_key)))
    app.include_router(downloads(server))
    if api_key is None and not anyone:
        app.add_middleware(LocalCallers)
    app.add_middleware(Counted, counters=server.counters, calls=CALLS.keys())
    return app


def _authorize(request: Request, api_key: str | None) -> None:
    client_key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
    if api_key is not None and not hmac.compare_digest(client_key.encode(), api_key.encode()):
        raise HTTPException(401, "the key in X-API-Key, or after Authorization: Bearer, is not this server's")
