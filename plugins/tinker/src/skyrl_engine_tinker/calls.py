"""Calls that clients post: each reads its body and answers at once, or hands work to the model's worker and answers with a promise."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from attrs import frozen
from fastapi import HTTPException

from skyrl_engine_tinker.adapted import AdaptedLayers
from skyrl_engine_tinker.bodies import parse_object
from skyrl_engine_tinker.checkpoints import Address, Facts
from skyrl_engine_tinker.codecs import parse_message
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.model_worker import Answer, PendingAnswer
from skyrl_engine_tinker.requests import (
    CreateByLoadRequest,
    CreateModelRequest,
    InTurn,
    LoadRequest,
    LoraTable,
    ModelRequest,
    OptimStepRequest,
    RetrieveRequest,
    SampleRequest,
    SamplerTurn,
    SamplingSessionRequest,
    SaveExternalRequest,
    SaveForSamplerRequest,
    SaveRequest,
    SessionRequest,
    WeightsInfoRequest,
    read_request,
)
from skyrl_engine_tinker.sampling import SampleCall
from skyrl_engine_tinker.server import SamplingSession, Server

HELD_SECONDS = 25.0
"""Seconds that a poll is held; the SDK gives up after 45."""

Body = TypeVar("Body")
Turn = TypeVar("Turn", bound=InTurn)


@frozen
class ServedCall:
    """A call: `run` answers a body. `requests` are the classes that its JSON is read as, none where it is a protobuf message or is not read."""

    run: Callable[[Server, bytes], Awaitable[Answer]]
    requests: tuple[type, ...] = ()


def _json_call(kind: type[Body], answer: Callable[[Server, Body], Awaitable[Answer]]) -> ServedCall:
    """Make a call that is read when it arrives: a body that does not fit its class is refused with the status 422."""

    async def run(server: Server, body: bytes) -> Answer:
        return await answer(server, read_request(kind, parse_object(body)))

    return ServedCall(run, (kind,))


def _call_in_turn(name: str, kind: type[Turn], work: Callable[[Server, ServedModel, Turn], Answer]) -> ServedCall:
    """Make a call that a model does in its turn. `work` runs on the model's thread."""

    async def run(server: Server, body: bytes) -> Answer:
        return _submit(server, name, kind, parse_object(body), work)

    return ServedCall(run, (kind,))


def _submit(
    server: Server, name: str, kind: type[Turn], fields: Mapping[str, Any], work: Callable[[Server, ServedModel, Turn], Answer]
) -> Answer:
    head = read_request(InTurn, fields)
    return _submit_in_turn(server, name, head, lambda model: work(server, model, read_request(kind, fields)))


async def _create_session(server: Server, _body: bytes) -> Answer:
    session = secrets.token_hex(16)
    server.sessions[session] = time.monotonic()
    return {"type": "create_session", "session_id": session}


async def _heartbeat(server: Server, request: SessionRequest) -> Answer:
    server.touch(request.session_id)
    return {"type": "session_heartbeat"}


async def _telemetry(_server: Server, _body: bytes) -> Answer:
    return {"status": "accepted"}


async def _create_model(server: Server, request: CreateModelRequest) -> Answer:
    server.touch(request.session_id)
    lora = request.lora_config or LoraTable()
    try:
        server.settings.require_trainable(request.base_model)
        server.settings.require_rank(lora.rank)
        layers = AdaptedLayers.read(lora)
    except RequestError as error:
        return server.register_refusal(request.model_id, error)
    model = server.make_model(request.model_id, request.base_model, lora.rank, layers)
    model.metadata = request.user_metadata
    return server.create_model(model, lambda model: model.open(lora.seed))


async def _unload_model(server: Server, request: ModelRequest) -> Answer:
    return server.unload_model(request.model_id)


async def _get_info(server: Server, request: ModelRequest) -> Answer:
    _, model = server.find_trained_model(request.model_id)
    facts = {"model_name": model.base_model, "tokenizer_id": server.settings.tokenizer_of(model.base_model)}
    return {"type": "get_info", "model_data": facts, "model_id": model.model_id, "is_lora": model.rank > 0, "lora_rank": model.rank}


async def _forward_backward(server: Server, body: bytes) -> Answer:
    request = await asyncio.to_thread(parse_message, "ForwardBackwardRequest", body)
    head = InTurn(model_id=request.model_id, seq_id=request.seq_id)
    return _submit_in_turn(server, "forward_backward", head, lambda model: model.forward_backward(request), request)


def _optim_step(_server: Server, model: ServedModel, request: OptimStepRequest) -> Answer:
    if request.adam_params is None:
        raise RequestError("this server steps with AdamW alone; send adam_params")
    return model.optim_step(request.adam_params)


def _save_weights(_server: Server, model: ServedModel, request: SaveRequest) -> Answer:
    return _save(model, request, "weights")


def _save_external(_server: Server, model: ServedModel, request: SaveExternalRequest) -> Answer:
    if request.age_encryption_recipients:
        raise RequestError("this server encrypts nothing; leave age_encryption_recipients out")
    return _save(model, request, "external_weights")


def _save(model: ServedModel, request: SaveRequest, kind: str) -> Answer:
    address = Address(model.model_id, kind, request.path or f"step-{request.seq_id}")
    return model.save(address, overwrite=request.overwrite, ttl=request.ttl_seconds, metadata=request.user_metadata)


async def _load_weights(server: Server, body: bytes) -> Answer:
    fields = parse_object(body)
    if fields.get("session_id") is None:
        return _submit(server, "load_weights", LoadRequest, fields, _load)
    request = read_request(CreateByLoadRequest, fields)
    server.touch(request.session_id)
    try:
        facts = Facts.of(server.settings.directory, Address.read(request.path, ("weights",)))
        if request.base_model not in (None, facts.base_model):
            raise RequestError(
                f"the checkpoint is of {facts.base_model}, and base_model is {request.base_model!r}; leave base_model out"
            )
        server.settings.require_trainable(facts.base_model)
    except RequestError as error:
        return server.register_refusal(request.model_id, error)
    model = server.make_model(request.model_id, facts.base_model, facts.lora_rank, facts.layers)
    model.metadata = request.user_metadata
    return server.create_model(model, lambda model: model.load(request.path, request.optimizer, create=True))


def _load(_server: Server, model: ServedModel, request: LoadRequest) -> Answer:
    return model.load(request.path, request.optimizer, create=False)


async def _weights_info(server: Server, request: WeightsInfoRequest) -> Answer:
    facts = Facts.of(server.settings.directory, Address.read(request.tinker_path))
    adapters = {"train_attn": facts.train_attn, "train_mlp": facts.train_mlp, "train_unembed": False} if facts.lora_rank else {}
    return {"base_model": facts.base_model, "is_lora": facts.lora_rank > 0, "lora_rank": facts.lora_rank, **adapters}


def _save_for_sampler(server: Server, model: ServedModel, request: SaveForSamplerRequest) -> Answer:
    kind, name = request.kind, request.path
    if kind not in ("snapshot", "inflight"):
        raise RequestError(f"there is no sampler of the kind {kind!r}; there are snapshot and inflight")
    if name and kind == "inflight":
        raise RequestError("weights that later ones replace have no name; leave the path out")
    if name:
        return _save(model, request, "sampler_weights")
    sampler = secrets.token_hex(16)
    (model.samplers.pin if kind == "snapshot" else model.samplers.publish)(sampler)
    facts = SamplingSession(model.session, model.base_model, model_id=model.model_id)
    server.add_sampler(sampler, facts)
    return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}


async def _create_sampling_session(server: Server, request: SamplingSessionRequest) -> Answer:
    session, path = server.touch(request.session_id), request.model_path
    address = None if path is None else Address.read(path, ("weights", "sampler_weights"))
    base = request.base_model if address is None else Facts.of(server.settings.directory, address).base_model
    if base is None:
        raise RequestError("the request names neither a base_model nor a model_path")
    sampler = secrets.token_hex(16)
    server.samplers[sampler] = SamplingSession(session, base, stored=server.settings.find_weights(base, address))
    return {"type": "create_sampling_session", "sampling_session_id": sampler}


async def _sample(server: Server, body: bytes) -> Answer:
    fields = parse_object(body)
    head, limits, arrived = read_request(SamplerTurn, fields), server.settings.serve, time.monotonic()
    name = head.sampling_session_id
    if (sampler := server.samplers.get(name)) is None:
        raise HTTPException(404, "there is no such sampling session")
    longest = await asyncio.to_thread(server.settings.longest_of, sampler.base_model)
    request_id = f"{name}:{head.seq_id}"
    # a request that is refused for its number has ids all the same: the client asks for them before it asks what went wrong
    wanted = fields.get("num_samples", 1)
    count = min(max(wanted, 0), limits.samples) if isinstance(wanted, int) else 1
    answer = {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{index}" for index in range(count)]}
    if request_id in server.promises:
        return answer
    promise = PendingAnswer(asyncio.get_running_loop())
    try:
        call = SampleCall.read(read_request(SampleRequest, fields), limits, longest)
        worker, model = server.find_sampled_model(sampler)
    except RequestError as error:
        promise.fail(error)
        server.register_future(request_id, promise)
        return answer
    server.admit(promise, call.count)
    server.register_future(request_id, promise)

    def start() -> None:
        server.counters.record_wait("asample", time.monotonic() - arrived)
        _start_sampling(model, name, sampler, call, promise)

    worker.submit_unordered(start, promise, sampler.session)
    return answer


def _start_sampling(model: ServedModel, name: str, sampler: SamplingSession, call: SampleCall, promise: PendingAnswer) -> None:
    try:
        if model.base_model != sampler.base_model:
            raise RequestError(f"this server has one base model at a time, and {model.base_model} is there; close its client first")
        model.samplers.sample(name, sampler.session, sampler.stored, call, promise)
    except RequestError as error:
        promise.fail(error)


async def _retrieve(server: Server, request: RetrieveRequest) -> Answer:
    promise = server.promises.get(request.request_id)
    if promise is None:
        raise HTTPException(410, "there is no such request, or its answer is no longer kept")
    if not await promise.wait(HELD_SECONDS):
        return {"type": "try_again", "request_id": request.request_id, "queue_state": "active"}
    return promise.answer


def _submit_in_turn(
    server: Server, name: str, head: InTurn, work: Callable[[ServedModel], Answer], datums: Any | None = None
) -> Answer:
    """Queue `work` for the turn of a request of its model, and answer with a promise. `datums` is the request itself if it holds datums."""
    worker, model = server.find_trained_model(head.model_id)
    if datums is not None:
        model.arrive(datums)
    arrived = time.monotonic()

    def run() -> Answer:
        begun = time.monotonic()
        server.counters.record_wait(name, begun - arrived)
        try:
            return work(model)
        finally:
            server.counters.record_work(name, time.monotonic() - begun)

    return server.register_future(f"{head.model_id}:{head.seq_id}", worker.submit(head.seq_id, run))


CALLS: Mapping[str, ServedCall] = {
    "create_session": ServedCall(_create_session),
    "session_heartbeat": _json_call(SessionRequest, _heartbeat),
    "telemetry": ServedCall(_telemetry),
    "create_model": _json_call(CreateModelRequest, _create_model),
    "unload_model": _json_call(ModelRequest, _unload_model),
    "get_info": _json_call(ModelRequest, _get_info),
    "forward_backward": ServedCall(_forward_backward),
    "optim_step": _call_in_turn("optim_step", OptimStepRequest, _optim_step),
    "save_weights": _call_in_turn("save_weights", SaveRequest, _save_weights),
    "save_weights_external": _call_in_turn("save_weights_external", SaveExternalRequest, _save_external),
    "load_weights": ServedCall(_load_weights, (LoadRequest, CreateByLoadRequest)),
    "weights_info": _json_call(WeightsInfoRequest, _weights_info),
    "save_weights_for_sampler": _call_in_turn("save_weights_for_sampler", SaveForSamplerRequest, _save_for_sampler),
    "create_sampling_session": _json_call(SamplingSessionRequest, _create_sampling_session),
    "asample": ServedCall(_sample, (SampleRequest,)),
    "retrieve_future": _json_call(RetrieveRequest, _retrieve),
}
"""Calls that are posted to `/api/v1/NAME`."""
