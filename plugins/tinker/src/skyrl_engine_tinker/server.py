"""The state of the server: sessions, the one model, samplers, and promises of answers."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from attrs import define, field, frozen
from fastapi import HTTPException

from skyrl_engine_tinker import checkpoints
from skyrl_engine_tinker.checkpoints import Stored
from skyrl_engine_tinker.downloads import Downloads
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.lane import Answer, Lane, PendingAnswer, failure
from skyrl_engine_tinker.metrics import Counters
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.settings import Settings

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
    stored: Stored | None = None


@frozen(eq=False)
class _Newcomer:
    """A session that asks for a model while another one's is there."""

    session: str
    model: ServedModel
    work: Callable[[ServedModel], Answer]
    promise: PendingAnswer


@define(eq=False)
class Server:
    """Sessions, the one model, samplers and promises: all in memory, all touched on the event loop alone."""

    settings: Settings
    sessions: dict[str, float] = field(factory=dict)
    samplers: dict[str, SamplingSession] = field(factory=dict)
    promises: dict[str, PendingAnswer] = field(factory=dict)
    lane: Lane | None = None
    model: ServedModel | None = None
    downloads: Downloads = field(factory=Downloads)
    counters: Counters = field(factory=Counters)
    _ending: Lane | None = None
    _newcomers: list[_Newcomer] = field(factory=list)
    _sampling: list[tuple[PendingAnswer, int]] = field(factory=list)

    def heard_of(self, session: Any) -> str:
        """Note a sign of life. Raises 410 for a session that is not, or no longer."""
        if session not in self.sessions:
            raise HTTPException(410, "there is no such session, or it ended")
        self.sessions[session] = time.monotonic()
        if self.model is not None and self.model.session == session:
            for newcomer in self._newcomers:
                newcomer.promise.fail(self._taken())
            self._newcomers.clear()
        return str(session)

    def lane_of(self, model_id: Any) -> tuple[Lane, ServedModel]:
        if self.lane is None or self.model is None or self.model.model_id != model_id:
            raise HTTPException(404, f"there is no model {model_id!r}, or it was closed")
        if self.model.session in self.sessions:
            self.heard_of(self.model.session)
        return self.lane, self.model

    def opened(self, session: str, number: int, work: Callable[[ServedModel], Answer]) -> dict[str, Any]:
        """Make the one model; `work` opens it. The same request twice is one.

        While another session's model is there, the request waits: that session's next sign of life refuses it, and where none comes it has
        its turn, so that a loop which was killed can be started again at once.
        """
        model_id, loop = f"{session}:train:{number}", asyncio.get_running_loop()
        request_id = f"{model_id}:0"
        if (self.model is not None and self.model.model_id == model_id) or request_id in self.promises:
            return {"request_id": request_id}
        promise = PendingAnswer(loop)
        newcomer = _Newcomer(session, ServedModel(self.settings, model_id), work, promise)
        if not self._trains():
            self._open(newcomer)
        elif self.model is not None and self.model.session == session:
            promise.fail(self._taken())
        else:
            self._newcomers.append(newcomer)
        return self.promised(request_id, promise)

    def _taken(self) -> RequestError:
        assert self.model is not None
        return RequestError(f"this server has one model at a time, and {self.model.model_id} is there; close its client first")

    def _open(self, newcomer: _Newcomer) -> None:
        before = self.lane or self._ending
        model = self.model = newcomer.model

        def first() -> Answer:
            # two models at once may not fit
            if before is not None:
                before.close()
            try:
                return newcomer.work(model)
            except BaseException as error:
                model.failure = failure(error)["error"]
                raise

        lane = self.lane = Lane(
            asyncio.get_running_loop(),
            hole_seconds=self.settings.serve.hole_seconds,
            pump=model.pump,
            end=model.close,
            drains=not model.trained,
        )
        lane.submit(0, first, newcomer.promise)

    def sampled_by(self, sampler: SamplingSession) -> tuple[Lane, ServedModel]:
        """Return the model that a sampler samples from. Where none is there, its base model is opened for it.

        Raises 404 for a model that was closed, and RequestError where a model of another base is trained.
        """
        if sampler.session in self.sessions:
            self.heard_of(sampler.session)
        if sampler.model_id is not None:
            return self.lane_of(sampler.model_id)
        base, model = sampler.base_model, self.model
        if model is not None and self._trains() and model.base_model not in ("", base):
            raise RequestError(f"this server has one base model at a time, and trains {model.base_model}; close its client first")
        if model is None or model.failure is not None or (not model.trained and model.base_model != base):
            opened = ServedModel(self.settings, f"{sampler.session}:sample:{secrets.token_hex(4)}", trained=False, base_model=base)
            promise = PendingAnswer(asyncio.get_running_loop())
            self._open(_Newcomer(sampler.session, opened, lambda model: model.open(base, 0), promise))
        assert self.lane is not None
        assert self.model is not None
        return self.lane, self.model

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
            ("models", "Models on the ranks.", lambda: int(self.model is not None and self.model.failure is None)),
            (
                "samples_under_way",
                "Samples that were asked for and not answered.",
                lambda: sum(count for promise, count in self._sampling if promise.finished_at is None),
            ),
            (
                "requests_waiting",
                "Requests of the model that wait for their turn.",
                lambda: 0 if self.lane is None else self.lane.waiting,
            ),
        ]

    def promised(self, request_id: str, promise: PendingAnswer) -> dict[str, Any]:
        self.promises.setdefault(request_id, promise)
        return {"request_id": request_id}

    async def end(self, session: str) -> None:
        """End a session: its model finishes the request that it is at, and is closed."""
        self.sessions.pop(session, None)
        for newcomer in [each for each in self._newcomers if each.session == session]:
            self._newcomers.remove(newcomer)
            newcomer.promise.fail(RequestError("the session ended"))
        self.samplers = {name: sampler for name, sampler in self.samplers.items() if sampler.session != session}
        if self.model is not None and self.lane is not None and self.model.session == session:
            lane = self._ending = self.lane
            self.lane = self.model = None
            await asyncio.to_thread(lane.close)
        self._admit_newcomer()

    def _admit_newcomer(self) -> None:
        """Open the model that waits longest, if nothing is in its way."""
        if self._newcomers and not self._trains():
            self._open(self._newcomers.pop(0))

    def _trains(self) -> bool:
        return self.model is not None and self.model.failure is None and self.model.trained

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
                    # the lane keeps the promise, to know the request again
                    promise.answer = {"error": "the answer is no longer kept", "category": "server"}
                    del self.promises[request_id]
            for session, heard in list(self.sessions.items()):
                if now - heard > self.settings.serve.session_seconds:
                    await self.end(session)
            self._admit_newcomer()
