"""Calls that clients post: each reads its body and answers at once, or hands work to the model's worker and answers with a promise."""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import HTTPException

from skyrl_engine_tinker.adapted import AdaptedLayers
from skyrl_engine_tinker.checkpoints import Address, Facts
from skyrl_engine_tinker.codecs import parse_message
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.model_worker import Answer, PendingAnswer
from skyrl_engine_tinker.sampling import SampleCall
from skyrl_engine_tinker.server import SamplingSession, Server

HELD_SECONDS = 25.0
"""Seconds that a poll is held; the SDK gives up after 45."""


def _parse_fields(body: bytes) -> dict[str, Any]:
    value = json.loads(body or b"{}")
    if not isinstance(value, dict):
        raise RequestError("the body is no JSON object")
    return value


async def _create_session(server: Server, _body: bytes) -> Answer:
    session = secrets.token_hex(16)
    server.sessions[session] = time.monotonic()
    return {"type": "create_session", "session_id": session}


async def _heartbeat(server: Server, body: bytes) -> Answer:
    server.touch(_parse_fields(body)["session_id"])
    return {"type": "session_heartbeat"}


async def _telemetry(_server: Server, _body: bytes) -> Answer:
    return {"status": "accepted"}


async def _create_model(server: Server, body: bytes) -> Answer:
    fields = _parse_fields(body)
    session, lora = server.touch(fields["session_id"]), fields.get("lora_config") or {}
    model_id, base, rank = _format_model_id(session, fields), str(fields["base_model"]), int(lora.get("rank", 0))
    try:
        server.settings.require(base)
        server.settings.require_rank(rank)
        layers = AdaptedLayers.read(lora, rank)
    except RequestError as error:
        return server.register_refusal(model_id, error)
    model = ServedModel(server.settings, model_id, base, rank, layers)
    model.metadata = fields.get("user_metadata")
    return server.create_model(model, lambda model: model.open(lora.get("seed")))


def _format_model_id(session: str, fields: Mapping[str, Any]) -> str:
    return f"{session}:train:{int(fields['model_seq_id'])}"


async def _unload_model(server: Server, body: bytes) -> Answer:
    return server.unload_model(_parse_fields(body)["model_id"])


async def _get_info(server: Server, body: bytes) -> Answer:
    _, model = server.find_trained_model(_parse_fields(body)["model_id"])
    facts = {"model_name": model.base_model, "tokenizer_id": server.settings.tokenizer_of(model.base_model)}
    return {"type": "get_info", "model_data": facts, "model_id": model.model_id, "is_lora": model.rank > 0, "lora_rank": model.rank}


async def _forward_backward(server: Server, body: bytes) -> Answer:
    request = await asyncio.to_thread(parse_message, "ForwardBackwardRequest", body)
    return _submit_in_turn(server, request.model_id, request.seq_id, lambda model: model.forward_backward(request), request)


async def _optim_step(server: Server, body: bytes) -> Answer:
    fields = _parse_fields(body)

    def step(model: ServedModel) -> Answer:
        if "adam_params" not in fields:
            raise RequestError("this server steps with AdamW alone; send adam_params")
        return model.optim_step(fields["adam_params"])

    return _submit_in_turn(server, fields["model_id"], fields["seq_id"], step)


async def _save_weights(server: Server, body: bytes) -> Answer:
    fields = _parse_fields(body)
    return _submit_in_turn(server, fields["model_id"], fields["seq_id"], lambda model: _save(model, fields, "weights"))


async def _save_external(server: Server, body: bytes) -> Answer:
    fields = _parse_fields(body)

    def save(model: ServedModel) -> Answer:
        if fields.get("age_encryption_recipients"):
            raise RequestError("this server encrypts nothing; leave age_encryption_recipients out")
        return _save(model, fields, "external_weights")

    return _submit_in_turn(server, fields["model_id"], fields["seq_id"], save)


def _save(model: ServedModel, fields: Mapping[str, Any], kind: str) -> Answer:
    address = Address(model.model_id, kind, fields.get("path") or f"step-{fields['seq_id']}")
    overwrite, ttl = bool(fields.get("overwrite")), fields.get("ttl_seconds")
    return model.save(address, overwrite=overwrite, ttl=ttl, metadata=fields.get("user_metadata"))


async def _load_weights(server: Server, body: bytes) -> Answer:
    fields = _parse_fields(body)
    path, optimizer = str(fields["path"]), bool(fields["optimizer"])
    if fields.get("session_id") is not None:
        session = server.touch(fields["session_id"])
        model_id = _format_model_id(session, fields)
        try:
            facts = Facts.of(server.settings.directory, Address.read(path, ("weights",)))
            server.settings.require(facts.base_model)
        except RequestError as error:
            return server.register_refusal(model_id, error)
        model = ServedModel(server.settings, model_id, facts.base_model, facts.lora_rank, facts.layers)
        return server.create_model(model, lambda model: model.load(path, optimizer, create=True))
    return _submit_in_turn(server, fields["model_id"], fields["seq_id"], lambda model: model.load(path, optimizer, create=False))


async def _weights_info(server: Server, body: bytes) -> Answer:
    facts = Facts.of(server.settings.directory, Address.read(str(_parse_fields(body)["tinker_path"])))
    adapters = {"train_attn": facts.train_attn, "train_mlp": facts.train_mlp, "train_unembed": False} if facts.lora_rank else {}
    return {"base_model": facts.base_model, "is_lora": facts.lora_rank > 0, "lora_rank": facts.lora_rank, **adapters}


async def _save_for_sampler(server: Server, body: bytes) -> Answer:
    fields = _parse_fields(body)
    kind, name = fields.get("kind", "snapshot"), fields.get("path")
    sampler, loop = secrets.token_hex(16), asyncio.get_running_loop()

    def create_sampler(model: ServedModel) -> Answer:
        if kind not in ("snapshot", "inflight"):
            raise RequestError(f"there is no sampler of the kind {kind!r}; there are snapshot and inflight")
        if name and kind == "inflight":
            raise RequestError("weights that later ones replace have no name; leave the path out")
        if name:
            return _save(model, fields, "sampler_weights")
        (model.samplers.pin if kind == "snapshot" else model.samplers.publish)(sampler)
        facts = SamplingSession(model.session, model.base_model, model_id=model.model_id)
        # runs before the answer is sent, on the same loop
        loop.call_soon_threadsafe(server.samplers.__setitem__, sampler, facts)
        return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

    return _submit_in_turn(server, fields["model_id"], fields["seq_id"], create_sampler)


async def _create_sampling_session(server: Server, body: bytes) -> Answer:
    fields, directory = _parse_fields(body), server.settings.directory
    session, path = server.touch(fields["session_id"]), fields.get("model_path")
    address = None if path is None else Address.read(str(path), ("weights", "sampler_weights"))
    base = str(fields["base_model"]) if address is None else Facts.of(directory, address).base_model
    sampler = secrets.token_hex(16)
    server.samplers[sampler] = SamplingSession(session, base, stored=server.settings.find_weights(base, address))
    return {"type": "create_sampling_session", "sampling_session_id": sampler}


async def _sample(server: Server, body: bytes) -> Answer:
    fields = _parse_fields(body)
    name, limits = str(fields.get("sampling_session_id")), server.settings.serve
    if (sampler := server.samplers.get(name)) is None:
        raise HTTPException(404, "there is no such sampling session")
    request_id = f"{name}:{fields['seq_id']}"
    # a request that is refused for its number has ids all the same: the client asks for them before it asks what went wrong
    count = min(max(int(fields.get("num_samples", 1)), 0), limits.samples)
    answer = {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{index}" for index in range(count)]}
    if request_id in server.promises:
        return answer
    promise = PendingAnswer(asyncio.get_running_loop())
    try:
        call = SampleCall.read(fields, limits)
        worker, model = server.find_sampled_model(sampler)
    except (RequestError, KeyError, TypeError, ValueError) as error:
        promise.fail(
            error if isinstance(error, RequestError) else RequestError(f"asample was sent with {type(error).__name__}: {error}")
        )
        server.register_future(request_id, promise)
        return answer
    server.admit(promise, call.count)
    server.register_future(request_id, promise)
    worker.submit_unordered(lambda: _start_sampling(model, name, sampler, call, promise), promise, sampler.session)
    return answer


def _start_sampling(model: ServedModel, name: str, sampler: SamplingSession, call: SampleCall, promise: PendingAnswer) -> None:
    try:
        if model.base_model != sampler.base_model:
            raise RequestError(f"this server has one base model at a time, and {model.base_model} is there; close its client first")
        model.samplers.sample(name, sampler.session, sampler.stored, call, promise)
    except RequestError as error:
        promise.fail(error)


async def _retrieve(server: Server, body: bytes) -> Answer:
    request_id = str(_parse_fields(body)["request_id"])
    promise = server.promises.get(request_id)
    if promise is None:
        raise HTTPException(410, "there is no such request, or its answer is no longer kept")
    if not await promise.wait(HELD_SECONDS):
        return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    return promise.answer


def _submit_in_turn(
    server: Server, model_id: Any, number: Any, work: Callable[[ServedModel], Answer], datums: Any | None = None
) -> Answer:
    """Queue `work` as request `number` of its model, and answer with a promise. `datums` is the request itself if it holds datums."""
    worker, model = server.find_trained_model(model_id)
    if int(number) < 1:
        raise RequestError(f"seq_id is {number}; requests of a model are counted from 1")
    if datums is not None:
        model.arrive(datums)
    return server.register_future(f"{model_id}:{int(number)}", worker.submit(int(number), lambda: work(model)))


CALLS: Mapping[str, Callable[[Server, bytes], Awaitable[Answer]]] = {
    "create_session": _create_session,
    "session_heartbeat": _heartbeat,
    "telemetry": _telemetry,
    "create_model": _create_model,
    "unload_model": _unload_model,
    "get_info": _get_info,
    "forward_backward": _forward_backward,
    "optim_step": _optim_step,
    "save_weights": _save_weights,
    "save_weights_external": _save_external,
    "load_weights": _load_weights,
    "weights_info": _weights_info,
    "save_weights_for_sampler": _save_for_sampler,
    "create_sampling_session": _create_sampling_session,
    "asample": _sample,
    "retrieve_future": _retrieve,
}
"""Calls that are posted to `/api/v1/NAME`."""
