"""Calls that clients post: each reads its body and answers at once, or hands work to the model's lane and answers with a promise."""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import HTTPException

from skyrl_engine_tinker.codecs import parsed
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.lane import Answer, PendingAnswer
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.sampling import SampleCall
from skyrl_engine_tinker.server import Server
from skyrl_engine_tinker.settings import FACTS

HELD_SECONDS = 25.0
"""How long a poll is held; the SDK gives up after 45."""


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
    request = await asyncio.to_thread(parsed, "ForwardBackwardRequest", body)
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
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return {"base_model": facts["base_model"], "is_lora": facts["lora_rank"] > 0, "lora_rank": facts["lora_rank"]}


async def _save_for_sampler(server: Server, body: bytes) -> Answer:
    given = _json(body)
    if given.get("kind", "snapshot") != "snapshot":
        raise RequestError("samplers of this server stay with their weights (kind snapshot)")
    name = given.get("path")
    sampler = f"tinker://{given['model_id']}/sampler_weights/{name}" if name else secrets.token_hex(16)
    loop = asyncio.get_running_loop()

    def pinned(model: ServedModel) -> Answer:
        if name:
            server.settings.checkpoint(model.model_id, "sampler_weights", name)
        model.pin(sampler)
        # ahead of the answer, on the same loop
        loop.call_soon_threadsafe(server.samplers.__setitem__, sampler, model.model_id)
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
    sampler, limits = str(given.get("sampling_session_id")), server.settings.serve
    if (model_id := server.samplers.get(sampler)) is None:
        raise HTTPException(404, "there is no such sampling session")
    lane, model = server.lane_of(model_id)
    request_id = f"{sampler}:{given['seq_id']}"
    # a request that is refused for its number has ids all the same: the client asks for them before it asks what went wrong
    count = min(max(int(given.get("num_samples", 1)), 0), limits.samples)
    answer = {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{place}" for place in range(count)]}
    if request_id in server.promises:
        return answer
    promise = PendingAnswer(asyncio.get_running_loop())
    try:
        call = SampleCall.read(given, limits)
    except (RequestError, KeyError, TypeError, ValueError) as error:
        promise.fail(
            error if isinstance(error, RequestError) else RequestError(f"asample was sent with {type(error).__name__}: {error}")
        )
        server.promised(request_id, promise)
        return answer
    server.admit(promise, call.count)
    server.promised(request_id, promise)
    lane.beside(lambda: model.sample(sampler, call, promise), promise)
    return answer


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


CALLS: Mapping[str, Callable[[Server, bytes], Awaitable[Answer]]] = {
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
"""What is posted to `/api/v1/NAME`."""
