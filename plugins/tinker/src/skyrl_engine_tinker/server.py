"""What the server knows: sessions, the one model, samplers, and promises of answers."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from attrs import define, field
from fastapi import HTTPException

from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.lane import Answer, Lane, PendingAnswer
from skyrl_engine_tinker.model import ServedModel
from skyrl_engine_tinker.settings import Settings

KEPT_SECONDS = 600.0
"""How long an answer is kept behind its arrival."""


@define(eq=False)
class Server:
    """Sessions, the one model, samplers and promises: all in memory, all touched on the event loop alone."""

    settings: Settings
    sessions: dict[str, float] = field(factory=dict)
    samplers: dict[str, str] = field(factory=dict)
    promises: dict[str, PendingAnswer] = field(factory=dict)
    lane: Lane | None = None
    model: ServedModel | None = None
    _ending: Lane | None = None
    _sampling: list[tuple[PendingAnswer, int]] = field(factory=list)

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
        model_id, loop = f"{session}:train:{number}", asyncio.get_running_loop()
        if self.model is not None and self.model.model_id == model_id:
            return {"request_id": f"{model_id}:0"}
        if self.model is not None and not self.model.failed:
            promise = PendingAnswer(loop)
            promise.fail(
                RequestError(f"this server has one model at a time, and {self.model.model_id} is there; close its client first")
            )
            return self.promised(f"{model_id}:0", promise)
        before = self.lane or self._ending
        model = self.model = ServedModel(self.settings, model_id)

        def first() -> Answer:
            # two models at once may not fit
            if before is not None:
                before.close()
            try:
                return work(model)
            except BaseException:
                model.failed = True
                raise

        lane = self.lane = Lane(loop, hole_seconds=self.settings.serve.hole_seconds, pump=model.pump, end=model.close)
        return self.promised(f"{model_id}:0", lane.submit(0, first))

    def admit(self, promise: PendingAnswer, count: int) -> None:
        """Note `count` samples as under way until `promise` is kept. Raises 429 where they are too many beside those that are."""
        self._sampling = [each for each in self._sampling if each[0].finished_at is None]
        under_way = sum(each for _, each in self._sampling)
        if under_way + count > self.settings.serve.samples:
            raise HTTPException(
                429, f"{under_way} samples are under way, and {count} more are too many (serve.samples); come again"
            )
        self._sampling.append((promise, count))

    def promised(self, request_id: str, promise: PendingAnswer) -> dict[str, Any]:
        self.promises.setdefault(request_id, promise)
        return {"request_id": request_id}

    async def end(self, session: str) -> None:
        """End a session: its model finishes the request that it is at, and is closed."""
        self.sessions.pop(session, None)
        if self.model is not None and self.lane is not None and self.model.model_id.startswith(f"{session}:"):
            ended = self.model.model_id
            self.samplers = {sampler: model for sampler, model in self.samplers.items() if model != ended}
            lane = self._ending = self.lane
            self.lane = self.model = None
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
