"""Routes of the API: they read requests, hand them to the model's lane, and hold polls until an answer is there. Nothing here blocks."""

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import zstandard
from attrs import define, field
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from skyrl_engine.contracts import Sampling
from skyrl_engine_tinker.codecs import parsed
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.lane import Answer, Lane, PendingAnswer
from skyrl_engine_tinker.model import SampleCall, ServedModel
from skyrl_engine_tinker.settings import Settings

HELD_SECONDS = 25.0
"""How long a poll is held; the SDK gives up after 45."""
KEPT_SECONDS = 600.0
"""How long an answer is kept behind its arrival."""


@define(eq=False)
class Server:
    """Sessions, the one model, samplers and promises: all in memory, all touched on the event loop alone."""

    settings: Settings
    api_key: str | None = None
    sessions: dict[str, float] = field(factory=dict)
    samplers: dict[str, str | None] = field(factory=dict)
    promises: dict[str, PendingAnswer] = field(factory=dict)
    lane: Lane | None = None
    model: ServedModel | None = None

    def heard_of(self, session: Any) -> str:
        """Note a sign of life. Raises 410 for a session that is not, or no longer."""
        if session not in self.sessions:
            raise HTTPException(410, "there is no such session, or it ended")
        self.sessions[session] = time.monotonic()
        return str(session)

    def lane_of(self, model_id: Any) -> tuple[Lane, ServedModel]:
        if self.lane is None or self.model is None or self.model.model_id != model_id:
            raise HTTPException(404, f"there is no model {model_id!r}, or it was closed")
        return self.lane, self.model

    def opened(self, session: str, number: int, work: Callable[[ServedModel], Answer]) -> dict[str, Any]:
        """Make the one model; `work` opens it. A second one is refused while the first lives; the same request twice is one."""
        model_id = f"{session}:train:{number}"
        if self.model is not None and self.model.model_id == model_id:
            return {"request_id": f"{model_id}:0"}
        if self.model is not None:
            promise = PendingAnswer(asyncio.get_running_loop())
            promise.fail(
                RequestError(f"this server has one model at a time, and {self.model.model_id} is there; close its client first")
            )
            return self.promised(f"{model_id}:0", promise)
        model = self.model = ServedModel(self.settings, model_id)
        lane = self.lane = Lane(
            asyncio.get_running_loop(), hole_seconds=self.settings.serve.hole_seconds, pump=model.pump, end=model.close
        )
        return self.promised(f"{model_id}:0", lane.submit(0, lambda: work(model)))

    def promised(self, request_id: str, promise: PendingAnswer) -> dict[str, Any]:
        self.promises.setdefault(request_id, promise)
        return {"request_id": request_id}

    async def end(self, session: str) -> None:
        """End a session: its model finishes the request that it is at, and is closed."""
        self.sessions.pop(session, None)
        if self.model is not None and self.lane is not None and self.model.model_id.startswith(f"{session}:"):
            lane, self.lane, self.model = self.lane, None, None
            await asyncio.to_thread(lane.close)

    async def sweep(self) -> None:
        """Forget answers that were there long enough, and end sessions that gave no sign of life."""
        while True:
            await asyncio.sleep(min(5.0, self.settings.serve.session_seconds))
            now = time.monotonic()
            for request_id, promise in list(self.promises.items()):
                if promise.finished_at is not None and now - promise.finished_at > KEPT_SECONDS:
                    # the lane keeps the promise, to know the request again
                    promise.answer = {"error": "the answer is no longer kept", "category": "server"}
                    del self.promises[request_id]
            for session, heard in list(self.sessions.items()):
                if now - heard > self.settings.serve.session_seconds:
                    await self.end(session)


def application(settings: Settings, api_key: str | None = None) -> FastAPI:
    """Return the server as an ASGI application. With `api_key` every request must bring it in X-API-Key."""
    server = Server(settings, api_key)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(server.sweep())
        yield
        sweeping.cancel()
        for session in list(server.sessions):
            await server.end(session)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/api/v1/{call}")
    async def post(call: str, request: Request) -> Response:
        _authorize(request, server.api_key)
        if (handler := _CALLS.get(call)) is None:
            raise HTTPException(404, f"this server has no {call}")
        body = await _body(request, settings.serve.body_bytes)
        try:
            answer = await handler(server, body)
        except RequestError as error:
            raise HTTPException(422, str(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise HTTPException(422, f"{call} was sent with {type(error).__name__}: {error}") from error
        return Response(answer, media_type="application/x-protobuf") if isinstance(answer, bytes) else JSONResponse(answer)

    @app.post("/api/v1/client/{_kind}")
    async def client_config(_kind: str, request: Request) -> Any:
        _authorize(request, server.api_key)
        return {"pjwt_auth_enabled": False, "proto_compress_fwdbwd": True}

    @app.get("/api/v1/samplers/{sampler:path}")
    async def sampler_info(sampler: str, request: Request) -> Any:
        _authorize(request, server.api_key)
        if sampler not in server.samplers or server.model is None:
            raise HTTPException(404, "there is no such sampler")
        path = sampler if sampler.startswith("tinker://") else None
        return {"sampler_id": sampler, "base_model": server.model.base_model, "model_path": path}

    @app.post("/api/v1/sessions/{session}/finish")
    async def finish(session: str, request: Request) -> Response:
        _authorize(request, server.api_key)
        await server.end(session)
        return Response(status_code=204)

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities(request: Request) -> Any:
        _authorize(request, server.api_key)
        facts = {"max_context_length": settings.serve.longest, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **facts} for name in settings.serve.models]}

    return app


def _authorize(request: Request, api_key: str | None) -> None:
    given = request.headers.get("x-api-key", "")
    if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
        raise HTTPException(401, "the key in X-API-Key is not this server's")


async def _body(request: Request, limit: int) -> bytes:
    """Read and decompress a body, never more than `limit` bytes of either."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise HTTPException(413, f"the request is larger than {limit:,} bytes (serve.body_bytes)")
        parts.append(part)
    body = b"".join(parts)
    if request.headers.get("content-encoding") == "zstd":
        try:
            with zstandard.ZstdDecompressor().stream_reader(body) as reader:
                body = reader.read(limit + 1)
        except zstandard.ZstdError as error:
            raise HTTPException(422, f"the body is no zstd: {error}") from error
        if len(body) > limit:
            raise HTTPException(413, f"the request is larger than {limit:,} bytes when it is decompressed (serve.body_bytes)")
    return body


def _json(body: bytes) -> dict[str, Any]:
    value = json.loads(body or b"{}")
    if not isinstance(value, dict):
        raise RequestError("the body is no JSON object")
    return value


async def _create_session(server: Server, _body: bytes) -> Answer:
    session = secrets.token_hex(16)
    server.sessions[session] = time.monotonic()
    return {"type": "create_session", "session_id": session}


async def _heartbeat(server: Server, body: bytes) -> Answer:
    server.heard_of(_json(body)["session_id"])
    return {"type": "session_heartbeat"}


async def _telemetry(_server: Server, _body: bytes) -> Answer:
    return {"status": "accepted"}


async def _create_model(server: Server, body: bytes) -> Answer:
    given = _json(body)
    session, lora = server.heard_of(given["session_id"]), given.get("lora_config") or {}
    rank, seed, base = int(lora.get("rank", 0)), lora.get("seed"), str(given["base_model"])
    return server.opened(session, int(given["model_seq_id"]), lambda model: model.open(base, rank, seed))


async def _get_info(server: Server, body: bytes) -> Answer:
    _, model = server.lane_of(_json(body)["model_id"])
    facts = {"model_name": model.base_model, "tokenizer_id": server.settings.serve.models.get(model.base_model)}
    return {"type": "get_info", "model_data": facts, "model_id": model.model_id, "is_lora": model.rank > 0, "lora_rank": model.rank}


async def _forward_backward(server: Server, body: bytes) -> Answer:
    request = parsed("ForwardBackwardRequest", body)
    return _in_turn(server, request.model_id, request.seq_id, lambda model: model.forward_backward(request))


async def _optim_step(server: Server, body: bytes) -> Answer:
    given = _json(body)

    def step(model: ServedModel) -> Answer:
        if "adam_params" not in given:
            raise RequestError("this server steps with AdamW alone; send adam_params")
        return model.optim_step(given["adam_params"])

    return _in_turn(server, given["model_id"], given["seq_id"], step)


async def _save_weights(server: Server, body: bytes) -> Answer:
    given = _json(body)
    name, overwrite = given.get("path") or f"step-{given['seq_id']}", bool(given.get("overwrite"))
    return _in_turn(server, given["model_id"], given["seq_id"], lambda model: model.save(name, overwrite=overwrite))


async def _load_weights(server: Server, body: bytes) -> Answer:
    given = _json(body)
    path, optimizer = str(given["path"]), bool(given["optimizer"])
    if given.get("session_id") is not None:
        session = server.heard_of(given["session_id"])
        return server.opened(session, int(given["model_seq_id"]), lambda model: model.load(path, optimizer, create=True))
    return _in_turn(server, given["model_id"], given["seq_id"], lambda model: model.load(path, optimizer, create=False))


async def _weights_info(server: Server, body: bytes) -> Answer:
    folder = server.settings.addressed(str(_json(body)["tinker_path"]))
    facts = json.loads((folder / "tinker.json").read_text(encoding="utf-8"))
    return {"base_model": facts["base_model"], "is_lora": facts["lora_rank"] > 0, "lora_rank": facts["lora_rank"]}


async def _save_for_sampler(server: Server, body: bytes) -> Answer:
    given = _json(body)
    if given.get("kind", "snapshot") != "snapshot":
        raise RequestError("samplers of this server stay with their weights (kind snapshot)")
    name = given.get("path")
    sampler = f"tinker://{given['model_id']}/sampler_weights/{name}" if name else secrets.token_hex(16)

    def pinned(model: ServedModel) -> Answer:
        if name:
            server.settings.checkpoint(model.model_id, "sampler_weights", name)
        model.pin(sampler)
        server.samplers[sampler] = model.model_id
        return {"type": "save_weights_for_sampler", "path" if name else "sampling_session_id": sampler}

    return _in_turn(server, given["model_id"], given["seq_id"], pinned)


async def _create_sampling_session(server: Server, body: bytes) -> Answer:
    path = _json(body).get("model_path")
    if path is None:
        raise RequestError("this server samples from models that are being trained: make a sampler with save_weights_for_sampler")
    if path not in server.samplers:
        raise RequestError(f"there are no sampler weights {path!r} in this process")
    return {"type": "create_sampling_session", "sampling_session_id": path}


async def _sample(server: Server, body: bytes) -> Answer:
    given = _json(body)
    sampler = given.get("sampling_session_id")
    if (model_id := server.samplers.get(str(sampler))) is None:
        raise HTTPException(404, "there is no such sampling session")
    lane, model = server.lane_of(model_id)
    request_id = f"{sampler}:{given['seq_id']}"
    count = int(given.get("num_samples", 1))
    answer = {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{place}" for place in range(count)]}
    if request_id in server.promises:
        return answer
    under_way = sum(each.finished_at is None for each in server.promises.values())
    if under_way >= server.settings.serve.samples:
        raise HTTPException(429, f"{under_way} requests are under way (serve.samples); come again")
    promise = PendingAnswer(asyncio.get_running_loop())
    server.promised(request_id, promise)
    try:
        call = _sample_call(given, count, server.settings.serve.longest)
    except (RequestError, KeyError, TypeError, ValueError) as error:
        promise.fail(RequestError(str(error)))
        return answer
    lane.beside(lambda: model.sample(str(sampler), call, promise))
    return answer


def _sample_call(given: dict[str, Any], count: int, longest: int) -> SampleCall:
    params, chunks = given["sampling_params"], given["prompt"]["chunks"]
    if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
        raise RequestError("the prompt has a chunk that is no text; this server samples on tokens alone")
    refused = (
        "topk_prompt_logprobs",
        "target_prompt_logprobs",
        "prompt_alt_tokens_k",
        "prompt_logprobs_last_n",
        "record_stability_info",
    )
    if asked := [name for name in refused if given.get(name)]:
        raise RequestError(f"this server has no {asked[0]}")
    prompt = np.array([token for chunk in chunks for token in chunk["tokens"]], dtype=np.int32)
    room = longest - len(prompt)
    most = int(params.get("max_tokens") or room)
    if not 1 <= count <= 1024 or not 1 <= most <= room or not len(prompt):
        raise RequestError(
            f"{count} samples of {most} tokens behind {len(prompt)} do not fit: this server takes 1024 and {longest:,}"
        )
    stop = params.get("stop")
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    sampling = Sampling(
        max_tokens=most,
        temperature=float(params.get("temperature", 1.0)),
        top_p=float(params.get("top_p", 1.0)),
        top_k=max(int(params.get("top_k", -1)), 0),
        stop_token_ids=tuple(each for each in stops if isinstance(each, int)),
        stop_strings=tuple(each for each in stops if isinstance(each, str)),
        ignore_eos=stop is not None and not stops,
    )
    return SampleCall(
        prompt, sampling, count, params.get("seed"), bool(given.get("prompt_logprobs")), int(given.get("topk_sample_logprobs") or 0)
    )


async def _retrieve(server: Server, body: bytes) -> Answer:
    request_id = str(_json(body)["request_id"])
    promise = server.promises.get(request_id)
    if promise is None:
        raise HTTPException(410, "there is no such request, or its answer is no longer kept")
    if not await promise.wait(HELD_SECONDS):
        return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    return promise.answer


def _in_turn(server: Server, model_id: Any, number: Any, work: Callable[[ServedModel], Answer]) -> Answer:
    lane, model = server.lane_of(model_id)
    if int(number) < 1:
        raise RequestError(f"seq_id is {number}; requests of a model are counted from 1")
    return server.promised(f"{model_id}:{int(number)}", lane.submit(int(number), lambda: work(model)))


_CALLS = {
    "create_session": _create_session,
    "session_heartbeat": _heartbeat,
    "telemetry": _telemetry,
    "create_model": _create_model,
    "get_info": _get_info,
    "forward_backward": _forward_backward,
    "optim_step": _optim_step,
    "save_weights": _save_weights,
    "load_weights": _load_weights,
    "weights_info": _weights_info,
    "save_weights_for_sampler": _save_for_sampler,
    "create_sampling_session": _create_sampling_session,
    "asample": _sample,
    "retrieve_future": _retrieve,
}
