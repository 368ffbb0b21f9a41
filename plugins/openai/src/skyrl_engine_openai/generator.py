"""The generator `openai`: requests go to an endpoint over HTTP, from an event loop in a thread of its own. Each comes back exactly once."""

import asyncio
import queue
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from skyrl_engine import ContractError, UnsupportedError
from skyrl_engine.contracts import POLICY, Completion, GenerationRequest, GeneratorStart, WeightSource
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine_openai.client import EndpointClient, EndpointError, read_key
from skyrl_engine_openai.options import OpenaiOptions
from skyrl_engine_openai.wire import Wire, empty, refuse_unsupported

_ENDING_SECONDS = 10.0


class OpenaiGenerator:
    """`contracts.Generator`. It takes no weights: what it samples is of the endpoint's model, under the version of its start."""

    def __init__(self, options: OpenaiOptions) -> None:
        self._options = options
        self._ready: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        self._known: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> "tuple[type[OpenaiGenerator], tuple[OpenaiOptions]]":
        """Travel as it was made: connections stay with their process."""
        return type(self), (self._options,)

    def start(self, start: GeneratorStart) -> None:
        """Load the tokenizer; nothing is asked of the endpoint yet. Raises ModelError, UnsupportedError where the key is not set."""
        options = self._options
        key = read_key(options.api_key_env, "generator.api_key_env")
        self._client = EndpointClient(options.url, key, options.request_seconds, options.retries)
        tokenizer = load_tokenizer(start.model)
        self._wire = Wire.open(options, tokenizer, start.eos_token_ids, start.version, start.vocabulary)
        self._places = asyncio.Semaphore(options.concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-requests", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests. Raises UnsupportedError for what the endpoint's dialect has no word for."""
        loop = self._require_started()
        for request in requests:
            if request.request_id in self._known or request.target != POLICY or not len(request.prompt_ids):
                raise ContractError(
                    f"request {request.request_id} is under way already, has no prompt, or is not to the weights {POLICY!r}",
                    remedy="Give every request an id of its own and a prompt, and sample from the policy",
                )
            refuse_unsupported(request, self._options)
            self._wire.require_plain(request)
        self._known |= {request.request_id for request in requests}
        loop.call_soon_threadsafe(self._take, list(requests))

    def poll(self, timeout: float) -> list[Completion]:
        """Return what has come back, after `timeout` seconds at the latest."""
        self._require_started()
        items: list[Completion | BaseException] = []
        try:
            items.append(self._ready.get(timeout=timeout) if timeout > 0 else self._ready.get_nowait())
            while True:
                items.append(self._ready.get_nowait())
        except queue.Empty:
            pass
        completions = []
        for item in items:
            if isinstance(item, BaseException):
                raise item
            completions.append(item)
        self._known -= {completion.request_id for completion in completions}
        return completions

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """End requests; they come back without tokens, as an endpoint shows nothing of what it has begun."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._abort, None if request_ids is None else set(request_ids))

    def update(self, weights: WeightSource, version: int, target: str = POLICY) -> None:  # noqa: ARG002 the contract's
        """Refuse: an endpoint takes no weights."""
        raise UnsupportedError("an endpoint takes no weights", remedy="Train with the generator hf or vllm")

    def release(self, target: str) -> None:
        """Do nothing: there are no weights."""

    def close(self) -> None:
        """End what is under way."""
        loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(timeout=_ENDING_SECONDS)
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(timeout=_ENDING_SECONDS)
            loop.close()
        self._known.clear()

    def _require_started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise ContractError("the generator openai is not started, or closed", remedy="Start it first")
        return self._loop

    # --- the event loop ----------------------------------------------------------------------------------------------------------------

    def _take(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            task = self._tasks[request.request_id] = asyncio.get_running_loop().create_task(self._serve(request))
            task.add_done_callback(partial(self._finish, request))

    async def _serve(self, request: GenerationRequest) -> None:
        try:
            async with self._places:
                answer = await self._client.post_in_loop(self._wire.path, self._wire.body_of(request))
            self._ready.put(self._wire.completion_of(request, answer))
        except EndpointError as error:
            self._ready.put(empty(request, "error", f"the endpoint {self._options.url} {error.cause}"))

    def _finish(self, request: GenerationRequest, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(request.request_id, None)
        if task.cancelled():
            self._ready.put(empty(request, "abort"))
        elif (error := task.exception()) is not None:
            self._ready.put(error)

    def _abort(self, chosen: set[int] | None) -> None:
        for number, task in list(self._tasks.items()):
            if chosen is None or number in chosen:
                task.cancel()

    async def _end(self) -> None:
        tasks: list[Any] = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close_in_loop()
        # transports close in the next round of the loop
        await asyncio.sleep(0.005)
