"""The state of the server: sessions, models, samplers, and promises of answers."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from attrs import define, field, frozen
from fastapi import HTTPException

from skyrl_engine_tinker import checkpoints
from skyrl_engine_tinker.checkpoints import Address, SavedWeights
from skyrl_engine_tinker.downloads import Downloads
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.metrics import Counters
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.model_worker import ModelWorker, PendingAnswer
from skyrl_engine_tinker.settings import Settings
from skyrl_engine_tinker.slots import LoadedModel, ModelSlots, Opener

KEPT_SECONDS = 600.0
"""Seconds that an answer is kept behind its arrival."""

EXPIRY_SECONDS = 60.0
"""Seconds between two searches for checkpoints whose time is over; nobody is given one meanwhile."""


@frozen
class SamplingSession:
    """A sampling session: of the model `model_id`, or of weights on the disk, which whatever model of this base is there samples from."""

    session: str
    base_model: str
    model_id: str | None = None
    stored: SavedWeights | None = None


@define(eq=False)
class Server:
    """Sessions, models, samplers and promises: all in memory, all touched on the event loop alone."""

    settings: Settings
    sessions: dict[str, float] = field(factory=dict)
    samplers: dict[str, SamplingSession] = field(factory=dict)
    promises: dict[str, PendingAnswer] = field(factory=dict)
    places: ModelSlots = field(init=False)
    downloads: Downloads = field(factory=Downloads)
    counters: Counters = field(factory=Counters)
    _unloading: set[asyncio.Task[None]] = field(factory=set)
    _sampling: list[tuple[PendingAnswer, int]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.places = ModelSlots(self.settings)

    def touch(self, session: Any) -> str:
        """Note a sign of life. Raises 410 for a session that is not, or no longer."""
        if session not in self.sessions:
            raise HTTPException(410, "there is no such session, or it ended")
        self.sessions[session] = time.monotonic()
        self.places.touch(session)
        return str(session)

    def find_trained_model(self, model_id: Any) -> tuple[ModelWorker, ServedModel]:
        """Return a trained model and its worker, which is a sign of life of its session. Raises 404 for a model that is not there."""
        if (found := self.places.find(model_id)) is None:
            raise HTTPException(404, f"there is no model {model_id!r}, or it was closed")
        if found.model.session in self.sessions:
            self.touch(found.model.session)
        return found.worker, found.model

    def create_model(self, model: ServedModel, opening: Opener) -> dict[str, Any]:
        """Make a model that is trained, as soon as there is a place for it. The same request twice is one."""
        request_id = f"{model.model_id}:0"
        if self.places.find(model.model_id) is not None or request_id in self.promises:
            return {"request_id": request_id}
        promise = PendingAnswer(asyncio.get_running_loop())
        self.places.ask(model, opening, promise)
        return self.register_future(request_id, promise)

    def register_refusal(self, model_id: str, error: RequestError) -> dict[str, Any]:
        """Answer who asks for a model that cannot be opened."""
        promise = PendingAnswer(asyncio.get_running_loop())
        promise.fail(error)
        return self.register_future(f"{model_id}:0", promise)

    def find_sampled_model(self, sampler: SamplingSession) -> tuple[ModelWorker, ServedModel]:
        """Return the model that a sampler samples from.

        Raises 404 for a model that was closed, and RequestError where a model of another base is trained.
        """
        if sampler.session in self.sessions:
            self.touch(sampler.session)
        if sampler.model_id is not None:
            return self.find_trained_model(sampler.model_id)
        place = self._find_saving_model(sampler.stored) or self.places.sampling(sampler.base_model, sampler.session)
        return place.worker, place.model

    def _find_saving_model(self, stored: SavedWeights | None) -> LoadedModel | None:
        """Return the model that wrote a checkpoint, where there is no room for copies: its memory may hold these very weights."""
        if stored is None or stored.path is None or self.settings.serve.weight_sets:
            return None
        found = self.places.find(Address.read(stored.path).model_id)
        return None if found is None or found.model.failure is not None else found

    def admit(self, promise: PendingAnswer, count: int) -> None:
        """Note `count` samples as under way until `promise` is kept. Raises 429 where they are too many beside those that are."""
        self._sampling = [each for each in self._sampling if each[0].finished_at is None]
        under_way = sum(each for _, each in self._sampling)
        if under_way + count > self.settings.serve.samples:
            raise HTTPException(
                429, f"{under_way} samples are under way, and {count} more are too many (serve.samples); come again"
            )
        self._sampling.append((promise, count))

    def gauges(self) -> list[tuple[str, str, Callable[[], float]]]:
        """List what may be looked at: name, meaning, value."""
        return [
            ("sessions", "Sessions that live.", lambda: len(self.sessions)),
            ("samplers", "Sampling sessions that live.", lambda: len(self.samplers)),
            ("models", "Models that are trained.", lambda: len(self.places.trained)),
            (
                "samples_under_way",
                "Samples that were asked for and not answered.",
                lambda: sum(count for promise, count in self._sampling if promise.finished_at is None),
            ),
            (
                "requests_waiting",
                "Requests of models that wait for their turn.",
                lambda: self.places.waiting,
            ),
        ]

    def register_future(self, request_id: str, promise: PendingAnswer) -> dict[str, Any]:
        self.promises.setdefault(request_id, promise)
        return {"request_id": request_id}

    async def end(self, session: str) -> None:
        """End a session: its models finish the requests that they are at, and are closed."""
        self.sessions.pop(session, None)
        self.places.withdraw(session)
        self._drop_samplers(lambda sampler: sampler.session == session)
        await self.places.close(self._leaving([each.model_id for each in self.places.all if each.session == session]))

    def unload_model(self, model_id: Any) -> dict[str, Any]:
        """Close a model behind the request that it is at. The same request twice is one. Raises 404 for a model that is not there."""
        request_id = f"{model_id}:unload"
        if request_id in self.promises:
            return {"request_id": request_id}
        if self.places.find(model_id) is None:
            raise HTTPException(404, f"there is no model {model_id!r}, or it was closed")
        self._drop_samplers(lambda sampler: sampler.model_id == model_id)
        # its place is free before anybody asks
        ending, promise = self._leaving([model_id]), PendingAnswer(asyncio.get_running_loop())

        async def close() -> None:
            await self.places.close(ending)
            promise.set({"type": "unload_model", "model_id": model_id})

        unloading = asyncio.create_task(close())
        self._unloading.add(unloading)
        unloading.add_done_callback(self._unloading.discard)
        return self.register_future(request_id, promise)

    async def shut_down(self) -> None:
        """End all sessions and close all models."""
        for session in list(self.sessions):
            await self.end(session)
        await asyncio.gather(*self._unloading)

    def _drop_samplers(self, ended: Callable[[SamplingSession], bool]) -> None:
        self.samplers = {name: sampler for name, sampler in self.samplers.items() if not ended(sampler)}

    def _leaving(self, model_ids: list[str]) -> list[LoadedModel]:
        """Take models out of their places, and the base model that nobody samples from."""

        def still_sampled(base_model: str) -> bool:
            return any(each.model_id is None and each.base_model == base_model for each in self.samplers.values())

        return self.places.leave(model_ids, still_sampled=still_sampled)

    async def sweep(self) -> None:
        """Forget answers that were there long enough, end sessions that gave no sign of life, and delete checkpoints whose time is over."""
        swept = 0.0
        while True:
            await asyncio.sleep(min(5.0, self.settings.serve.session_seconds))
            now = time.monotonic()
            if now - swept > EXPIRY_SECONDS:
                swept = now
                await asyncio.to_thread(checkpoints.sweep, self.settings.directory)
            for request_id, promise in list(self.promises.items()):
                if promise.finished_at is not None and now - promise.finished_at > KEPT_SECONDS:
                    # the worker keeps the promise, to know the request again
                    promise.answer = {"error": "the answer is no longer kept", "category": "server"}
                    del self.promises[request_id]
            for session, heard in list(self.sessions.items()):
                if now - heard > self.settings.serve.session_seconds:
                    await self.end(session)
            self.places.admit()
