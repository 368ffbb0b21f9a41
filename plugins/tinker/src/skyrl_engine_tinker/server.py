"""The state of the server: sessions, models, samplers, and promises of answers."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from attrs import define, field, frozen
from fastapi import HTTPException

from skyrl_engine_tinker import checkpoints
from skyrl_engine_tinker.adapted import AdaptedLayers
from skyrl_engine_tinker.checkpoints import Address, SavedWeights
from skyrl_engine_tinker.downloads import Downloads
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.metrics import Counters
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.model_worker import ModelWorker, PendingAnswer
from skyrl_engine_tinker.settings import Settings
from skyrl_engine_tinker.slots import LoadedModel, ModelSlots, Opener

logger = logging.getLogger(__name__)

KEPT_SECONDS = 600.0
"""Seconds that an answer is kept after it was set."""

EXPIRY_SECONDS = 60.0
"""Seconds between two searches for checkpoints whose time is over; a client does not get an expired one in between."""


@frozen
class SamplingSession:
    """A sampling session: of the model `model_id`, or of weights on the disk. A model of the same base answers it."""

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
    slots: ModelSlots = field(init=False)
    downloads: Downloads = field(factory=Downloads)
    counters: Counters = field(factory=Counters)
    _unloading: set[asyncio.Task[None]] = field(factory=set)
    _sampling: list[tuple[PendingAnswer, int]] = field(factory=list)

    _loop: asyncio.AbstractEventLoop | None = None
    _sweeping: asyncio.Task[None] | None = None

    def __attrs_post_init__(self) -> None:
        self.slots = ModelSlots(self.settings, self.counters)

    async def start(self) -> None:
        """Bring back what a crash left half done, and begin to sweep."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(checkpoints.restore, self.settings.directory)
        self._sweeping = asyncio.create_task(self.sweep())

    def make_model(self, model_id: str, base_model: str, rank: int, layers: AdaptedLayers) -> ServedModel:
        """Make a model for training, which `create_model` opens."""
        return ServedModel(self.settings, model_id, base_model, rank, layers, counters=self.counters)

    def add_sampler(self, name: str, sampler: SamplingSession) -> None:
        """Add a sampling session from a worker's thread, before the answer that the worker gives next is sent."""
        assert self._loop is not None, "models are opened after the start"
        self._loop.call_soon_threadsafe(self.samplers.__setitem__, name, sampler)

    def touch(self, session: Any) -> str:
        """Note a sign of life. Raises 410 for a session that is not, or no longer."""
        if session not in self.sessions:
            raise HTTPException(410, "there is no such session, or it ended")
        self.sessions[session] = time.monotonic()
        self.slots.touch(session)
        return str(session)

    def find_trained_model(self, model_id: Any) -> tuple[ModelWorker, ServedModel]:
        """Return a trained model and its worker; this counts as a sign of life of its session. Raises 404 for a model that is not there."""
        if (loaded := self.slots.find(model_id)) is None:
            raise HTTPException(404, f"there is no model {model_id!r}, or it was closed")
        if loaded.model.session in self.sessions:
            self.touch(loaded.model.session)
        return loaded.worker, loaded.model

    def create_model(self, model: ServedModel, opening: Opener) -> dict[str, Any]:
        """Create a model for training as soon as a slot is free. A repeated request changes nothing."""
        request_id = f"{model.model_id}:0"
        if self.slots.find(model.model_id) is not None or request_id in self.promises:
            return {"request_id": request_id}
        promise = PendingAnswer(asyncio.get_running_loop())
        self.slots.ask(model, opening, promise)
        return self.register_future(request_id, promise)

    def register_refusal(self, model_id: str, error: RequestError) -> dict[str, Any]:
        """Register the refusal of a model that cannot be opened."""
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
        loaded = self._find_saving_model(sampler.stored) or self.slots.sampling(sampler.base_model, sampler.session)
        return loaded.worker, loaded.model

    def _find_saving_model(self, stored: SavedWeights | None) -> LoadedModel | None:
        """Return the model that wrote a checkpoint, where there is no room for copies: its memory may hold these very weights."""
        if stored is None or stored.path is None or self.settings.serve.weight_sets:
            return None
        loaded = self.slots.find(Address.read(stored.path).model_id)
        return None if loaded is None or loaded.model.failure is not None else loaded

    def admit(self, promise: PendingAnswer, count: int) -> None:
        """Note `count` samples as under way until `promise` is kept. Raises 429 if they and the samples under way exceed the limit."""
        self._sampling = [call for call in self._sampling if call[0].finished_at is None]
        under_way = sum(count for _, count in self._sampling)
        if under_way + count > self.settings.serve.samples:
            raise HTTPException(
                429, f"{under_way} samples are under way, and {count} more are too many (serve.samples); come again"
            )
        self._sampling.append((promise, count))

    def gauges(self) -> list[tuple[str, str, Callable[[], float]]]:
        """List the gauges of /metrics: name, meaning, value."""
        return [
            ("sessions", "Sessions that live.", lambda: len(self.sessions)),
            ("samplers", "Sampling sessions that live.", lambda: len(self.samplers)),
            ("models", "Models that are trained.", lambda: len(self.slots.trained)),
            (
                "samples_under_way",
                "Samples that were asked for and not answered.",
                lambda: sum(count for promise, count in self._sampling if promise.finished_at is None),
            ),
            (
                "requests_waiting",
                "Requests of models that wait for their turn.",
                lambda: self.slots.waiting,
            ),
        ]

    def register_future(self, request_id: str, promise: PendingAnswer) -> dict[str, Any]:
        self.promises.setdefault(request_id, promise)
        return {"request_id": request_id}

    async def end(self, session: str) -> None:
        """End a session: its models finish the requests that they run, and are closed."""
        self.sessions.pop(session, None)
        self.slots.withdraw(session)
        self._drop_samplers(lambda sampler: sampler.session == session)
        await self.slots.close(self._take_models_out([model.model_id for model in self.slots.all if model.session == session]))

    def unload_model(self, model_id: Any) -> dict[str, Any]:
        """Close a model after the request that it runs. A repeated request changes nothing. Raises 404 for a model that is not there."""
        request_id = f"{model_id}:unload"
        if request_id in self.promises:
            return {"request_id": request_id}
        if self.slots.find(model_id) is None:
            raise HTTPException(404, f"there is no model {model_id!r}, or it was closed")
        self._drop_samplers(lambda sampler: sampler.model_id == model_id)
        # its slot is free before the next request
        ending, promise = self._take_models_out([model_id]), PendingAnswer(asyncio.get_running_loop())

        async def close() -> None:
            await self.slots.close(ending)
            promise.set({"type": "unload_model", "model_id": model_id})

        unloading = asyncio.create_task(close())
        self._unloading.add(unloading)
        unloading.add_done_callback(self._unloading.discard)
        return self.register_future(request_id, promise)

    def release_polls(self) -> None:
        """Answer polls that are held, from any thread: their answers do not come any more."""
        for promise in list(self.promises.values()):
            promise.release()

    async def shut_down(self) -> None:
        """End all sessions and close all models, each after the request that it runs."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        # all at once: no model takes another request while one ends
        await asyncio.gather(*(self.end(session) for session in list(self.sessions)), *self._unloading)

    def _drop_samplers(self, ended: Callable[[SamplingSession], bool]) -> None:
        self.samplers = {name: sampler for name, sampler in self.samplers.items() if not ended(sampler)}

    def _take_models_out(self, model_ids: list[str]) -> list[LoadedModel]:
        """Take models out of their slots, and the base model if nobody samples from it."""

        def still_sampled(base_model: str) -> bool:
            return any(sampler.model_id is None and sampler.base_model == base_model for sampler in self.samplers.values())

        return self.slots.leave(model_ids, still_sampled=still_sampled)

    async def sweep(self) -> None:
        """Forget old answers, end sessions that gave no sign of life, and delete expired checkpoints."""
        swept = 0.0
        while True:
            await asyncio.sleep(min(5.0, self.settings.serve.session_seconds))
            try:
                await self._sweep_memory(time.monotonic())
                if time.monotonic() - swept > EXPIRY_SECONDS:
                    swept = time.monotonic()
                    await asyncio.to_thread(checkpoints.sweep, self.settings.directory)
            except Exception:  # told in the log: whatever went wrong with one session or checkpoint, the others end in their time
                logger.exception("a sweep failed; the next one is soon")

    async def _sweep_memory(self, now: float) -> None:
        for request_id, promise in list(self.promises.items()):
            if promise.finished_at is not None and now - promise.finished_at > KEPT_SECONDS:
                # the worker keeps the promise, to recognize the request when it is repeated
                promise.answer = {"error": "the answer is no longer kept", "category": "server"}
                del self.promises[request_id]
        for session, heard in list(self.sessions.items()):
            if now - heard > self.settings.serve.session_seconds:
                await self.end(session)
        self.slots.admit()
