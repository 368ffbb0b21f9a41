"""Routes that read and manage what is there: checkpoints, training runs, sessions, samplers, downloads."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from skyrl_engine_tinker import checkpoints
from skyrl_engine_tinker.bodies import parse_object, read_body
from skyrl_engine_tinker.checkpoints import Address, Facts
from skyrl_engine_tinker.downloads import expires, tar
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.requests import TtlRequest, read_request
from skyrl_engine_tinker.server import Server


def downloads(server: Server) -> APIRouter:
    """Make the route of downloads, which asks for no key: an address is a secret."""
    router = APIRouter()

    @router.get("/api/v1/downloads/{secret}")
    async def download(secret: str) -> Response:
        path = server.downloads.find(secret)
        if path is None or not await asyncio.to_thread(path.exists):
            raise HTTPException(404, "there is no such download, or its time is over")
        if await asyncio.to_thread(path.is_file):
            return FileResponse(path, filename=path.name)
        named = {"Content-Disposition": f'attachment; filename="{path.parent.name}.tar"'}
        return StreamingResponse(tar(path), media_type="application/x-tar", headers=named)

    return router


def rest(server: Server, authorize: Callable[[Request], None]) -> APIRouter:
    """Make the routes; `authorize` is called before each."""
    router, directory = APIRouter(prefix="/api/v1", dependencies=[Depends(authorize)]), server.settings.directory

    @router.get("/get_server_capabilities")
    async def capabilities() -> Any:
        settings = server.settings
        return {
            "supported_models": [
                {
                    "model_name": name,
                    "max_context_length": await asyncio.to_thread(settings.longest_of, name),
                    "trainable": name not in settings.sampling_only,
                    "sampleable": True,
                }
                for name in settings.serve.models
            ]
        }

    @router.get("/samplers/{name}")
    async def sampler(name: str) -> Any:
        if (sampler := server.samplers.get(name)) is None:
            raise HTTPException(404, "there is no such sampler")
        path = None if sampler.stored is None else sampler.stored.path
        return {"sampler_id": name, "base_model": sampler.base_model, "model_path": path}

    @router.get("/sessions")
    async def sessions(limit: int = 20, offset: int = 0) -> Any:
        return {"sessions": _cut_page([*server.sessions][::-1], limit, offset)[0]}

    @router.get("/sessions/{session}")
    async def one_session(session: str) -> Any:
        if session not in server.sessions:
            raise HTTPException(404, "there is no such session, or it ended")
        own = [model.model_id for model in server.slots.trained if model.session == session]
        return {
            "training_run_ids": own,
            "sampler_ids": [name for name, sampler in server.samplers.items() if sampler.session == session],
        }

    @router.get("/training_runs")
    async def training_runs(limit: int = 20, offset: int = 0) -> Any:
        page, cursor = _cut_page(await _list_runs(server), limit, offset)
        return {"training_runs": page, "cursor": cursor}

    @router.get("/training_runs/{model_id}")
    async def training_run(model_id: str) -> Any:
        for run in await _list_runs(server):
            if run["training_run_id"] == model_id:
                return run
        raise HTTPException(404, f"there is no training run {model_id!r}, or it saved nothing and ended")

    @router.get("/checkpoints")
    async def all_checkpoints(limit: int = 100, offset: int = 0) -> Any:
        page, cursor = _cut_page(await asyncio.to_thread(checkpoints.list_checkpoints, directory), limit, offset)
        return {"checkpoints": page, "cursor": cursor}

    @router.get("/training_runs/{model_id}/checkpoints")
    async def checkpoints_of_a_model(model_id: str) -> Any:
        return {"checkpoints": await asyncio.to_thread(checkpoints.list_checkpoints, directory, model_id)}

    @router.delete("/training_runs/{model_id}/checkpoints/{kind}/{name}")
    async def delete(model_id: str, kind: str, name: str) -> Response:
        await _run_in_thread(lambda: checkpoints.delete(directory, _read_address(model_id, kind, name)))
        return Response(status_code=204)

    @router.put("/training_runs/{model_id}/checkpoints/{kind}/{name}/ttl")
    async def ttl(model_id: str, kind: str, name: str, request: Request) -> Response:
        body, address = (
            await read_body(request, server.settings.serve.body_bytes),
            await _run_in_thread(lambda: _require_checkpoint(server, model_id, kind, name)),
        )
        try:
            seconds = read_request(TtlRequest, parse_object(body)).ttl_seconds
            await asyncio.to_thread(checkpoints.set_ttl, directory, address, seconds)
        except RequestError as error:
            raise HTTPException(422, str(error)) from error
        return Response(status_code=204)

    @router.get("/training_runs/{model_id}/checkpoints/{kind}/{name}/archive")
    async def archive(model_id: str, kind: str, name: str, request: Request) -> Any:
        address = await _run_in_thread(lambda: _require_checkpoint(server, model_id, kind, name))
        secret = server.downloads.offer(address.folder(directory) / "model")
        return {"url": str(request.url_for("download", secret=secret)), "expires": expires()}

    @router.get("/training_runs/{model_id}/checkpoints/{kind}/{name}/external_weights_urls")
    async def external_weights_urls(model_id: str, kind: str, name: str, request: Request) -> Any:
        address = await _run_in_thread(lambda: _require_checkpoint(server, model_id, kind, name))
        folder = address.folder(directory) / "model"
        files = await asyncio.to_thread(lambda: sorted(path for path in folder.rglob("*") if path.is_file()))
        offered = {file.relative_to(folder).as_posix(): server.downloads.offer(file) for file in files}
        urls = {file: str(request.url_for("download", secret=secret)) for file, secret in offered.items()}
        return {"urls": urls, "expires": expires()}

    return router


def _cut_page(items: list[Any], limit: int, offset: int) -> tuple[list[Any], dict[str, int]]:
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[max(offset, 0) :][: max(limit, 0)], cursor


async def _list_runs(server: Server) -> list[dict[str, Any]]:
    """List models that saved something, after those that are trained now."""
    runs = await asyncio.to_thread(checkpoints.runs, server.settings.directory)
    saved = {run["training_run_id"]: run for run in runs}
    now = datetime.now(UTC).isoformat()
    present = [
        {
            **saved.pop(model.model_id, {}),
            "training_run_id": model.model_id,
            "base_model": model.base_model,
            "model_owner": "",
            "is_lora": model.rank > 0,
            "lora_rank": model.rank or None,
            "user_metadata": model.metadata,
            "last_request_time": now,
        }
        for model in server.slots.trained
    ]
    return [*present, *saved.values()]


def _read_address(model_id: str, kind: str, name: str) -> Address:
    return Address.read(f"tinker://{model_id}/{kind}/{name}")


def _require_checkpoint(server: Server, model_id: str, kind: str, name: str) -> Address:
    address = _read_address(model_id, kind, name)
    Facts.of(server.settings.directory, address)
    return address


async def _run_in_thread(work: Callable[[], Any]) -> Any:
    """Do `work` off the event loop; what it refuses is not there."""
    try:
        return await asyncio.to_thread(work)
    except RequestError as error:
        raise HTTPException(404, str(error)) from error
