"""The generator `vllm`: requests go to vLLM servers over HTTP, from an event loop in a thread of its own.

Invariants: a request comes back exactly once. Its tokens are of weights that this run published and proved on that server, and of one answer:
what a server that failed had sampled is dropped, and the request is sent again with its seed. The turns of a session go to one server.
"""

import asyncio
import itertools
import os
import queue
import secrets
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import httpx
import numpy as np
from attrs import define, field

from skyrl_engine import ContractError, RolloutError, UnsupportedError
from skyrl_engine.contracts import (
    POLICY,
    Completion,
    GenerationRequest,
    GeneratorStart,
    VersionSpans,
    WeightSource,
)
from skyrl_engine.model_facts.tokenizer import Decode, load_decoder
from skyrl_engine.scratch import ScratchFolder
from skyrl_engine_vllm.client import describe_transport, read
from skyrl_engine_vllm.delivery import TOLERANCES
from skyrl_engine_vllm.errors import LostMeanwhile, Refusal, ServerFault
from skyrl_engine_vllm.options import FORMS, VllmOptions
from skyrl_engine_vllm.servers import Servers, VllmServer
from skyrl_engine_vllm.wire import GenerateAnswer, answer_of, body_of, is_cut_here, name_on_server

COLDEST, WARMEST = 0.01, 2.0
"""vLLM takes a temperature below the first one for it, and refuses those above the second."""

UNTAGGED = "default"
"""The version that a server tells before it was given weights: it was started again, and not by this run."""

_NAP, _ABORT_AGAIN = 0.005, 0.1


@define(eq=False)
class _Job:
    """A request under way. `name` is what its server knows it by, while it is there."""

    request: GenerationRequest
    is_aborted: bool = False
    server: VllmServer | None = None
    name: str = ""
    faults: list[str] = field(factory=list)
    task: "asyncio.Task[None] | None" = None


class VllmGenerator:
    """`contracts.Generator`. Nothing is computed here but the proofs of new weights."""

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._ready: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        self._known: set[int] = set()
        self._jobs: dict[int, _Job] = {}
        self._homes: dict[int, VllmServer] = {}
        self._count = itertools.count()
        # servers may still work for a run that was killed
        self._life = secrets.token_hex(4)
        self._beside: set[asyncio.Task[None]] = set()
        self._servers: Servers | None = None
        self._scratch: ScratchFolder | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._decode: Decode | None = None
        self._is_closing = False

    def __reduce__(self) -> "tuple[type[VllmGenerator], tuple[VllmOptions]]":
        """Travel as it was made: servers stay with the process that started them."""
        return type(self), (self._options,)

    # --- the contract ------------------------------------------------------------------------------------------------------------------

    def start(self, start: GeneratorStart) -> None:
        """Start or find servers, check them, and give them the weights. Raises ModelError or UnsupportedError for those that are not fit."""
        options = self._options
        accepted = FORMS if options.weights is None else (options.weights,)
        form = next((form for form in accepted if form in start.weights.forms), None)
        if form is None:
            raise UnsupportedError(
                f"vllm takes weights as {' or '.join(accepted)}, and {', '.join(sorted(start.weights.forms)) or 'nothing'} is on offer",
                remedy="Set generator.weights to a form that is on offer, or leave it out",
            )
        if (dtype := start.model.dtype) not in TOLERANCES:
            raise UnsupportedError(f"vLLM does not compute in {dtype}", remedy=f"Set model.dtype to {' or '.join(TOLERANCES)}")
        folder = start.folder
        if folder is None:
            self._scratch = ScratchFolder("vllm")
            folder = self._scratch.path
        folder.mkdir(parents=True, exist_ok=True)
        self._start = start
        try:
            servers = Servers(options, self._read_key(), start, form, folder)
            servers.open()
        except BaseException:
            self._end_scratch(keep=True)
            raise
        self._servers = servers
        self._vocabulary = start.vocabulary or servers.twin.vocabulary
        self._limit = min(server.facts.longest for server in servers.all)
        self._most_logprobs = min(server.facts.max_logprobs for server in servers.all)
        self._begin_loop(servers)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests. Raises ContractError for those that no server could serve, UnsupportedError for those that vLLM cannot."""
        servers = self._require_started()
        for request in requests:
            self._refuse(request)
        if len({request.request_id for request in requests}) < len(requests):
            raise ContractError("two requests have one request_id", remedy="Count requests through")
        servers.require_one()
        jobs = []
        for request in requests:
            self._known.add(request.request_id)
            needed = len(request.prompt_ids) + request.sampling.max_tokens
            if needed > self._limit:
                cause = (
                    f"a prompt of {len(request.prompt_ids)} tokens leaves no room for {request.sampling.max_tokens} more: "
                    f"the servers take {self._limit} (--max-model-len)"
                )
                self._ready.put(_empty(request, "error", cause))
            else:
                if is_cut_here(request.sampling) and request.sampling.stop_strings:
                    self._decoder()
                jobs.append(_Job(request))
        self._post(self._take, jobs)

    def poll(self, timeout: float) -> list[Completion]:
        """Return what has come back, after `timeout` seconds at the latest. Raises RolloutError where no server is left."""
        servers = self._require_started()
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
        if not completions:
            servers.require_one()
        return completions

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """End requests; they come back by `poll`."""
        if self._loop is not None:
            self._post(self._abort, None if request_ids is None else set(request_ids))

    def update(self, weights: WeightSource, version: int, target: str = POLICY) -> None:
        """Give new weights to the servers; running requests go on with them. Raises ModelError for weights that do not fit."""
        servers = self._require_started()
        if target != POLICY:
            raise UnsupportedError(
                f"vllm samples from the policy's weights alone, and not from {target!r}",
                remedy="Sample them with the generator hf",
            )
        if servers.twin.form not in weights.forms:
            raise ContractError(
                f"the generator vllm began with weights as {servers.twin.form}, and {', '.join(sorted(weights.forms))} is on offer",
                remedy="Offer the form of the start in every update",
            )
        servers.update(weights, version)

    def sleep(self) -> None:
        """Let the servers free their devices, weights, keys and values, until `update`. Raises UnsupportedError for one that cannot."""
        self._require_started().sleep()

    def release(self, target: str) -> None:
        """Refuse for the policy; there are no other weights."""
        if target == POLICY:
            raise UnsupportedError(f"the weights {POLICY!r} are those that are trained", remedy="Close the generator")

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Forget which servers sessions are on."""
        if self._loop is not None:
            self._post(self._forget, list(sessions))

    def close(self) -> None:
        """Abort what is under way, and end the servers that were started."""
        self._is_closing = True
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._end_jobs(), loop).result(timeout=10.0)
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(timeout=10.0)
            loop.close()
        servers, self._servers = self._servers, None
        if servers is not None:
            lost = any(not server.is_up for server in servers.all)
            servers.close()
            self._end_scratch(keep=lost)
        self._known.clear()

    def _end_scratch(self, *, keep: bool) -> None:
        """Delete the folder of logs that no run has, or leave it where an error or a warning named one of them."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            if keep:
                scratch.keep()
            scratch.close()

    # --- what is refused ---------------------------------------------------------------------------------------------------------------

    def _read_key(self) -> str | None:
        name = self._options.api_key_env
        if name is None:
            return None
        key = os.environ.get(name)
        if not key:
            cause = f"the environment variable {name}, which holds the servers' API key, is not set"
            raise UnsupportedError(cause, remedy=f"Export {name}, or set generator.api_key_env to another one")
        return key

    def _require_started(self) -> Servers:
        if self._servers is None:
            raise ContractError("the generator vllm is not started, or closed", remedy="Start it first")
        return self._servers

    def _refuse(self, request: GenerationRequest) -> None:
        prompt, number = request.prompt_ids, request.request_id
        if number in self._known:
            raise ContractError(f"request {number} is under way already", remedy="Give every request an id of its own")
        if request.target != POLICY:
            raise ContractError(
                f"request {number} asks for the weights {request.target!r}, which nobody gave", remedy="Sample from the policy"
            )
        if prompt.ndim != 1 or not len(prompt):
            raise ContractError(f"request {number} has no prompt", remedy="Give at least one token to begin with")
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            place = int(np.argmax((prompt < 0) | (prompt >= self._vocabulary)))
            raise ContractError(
                f"request {number} has the token {prompt[place]} at place {place}, outside of the vocabulary of {self._vocabulary}",
                remedy="Encode the prompt with the model's own tokenizer",
            )
        temperature = request.sampling.temperature
        if 0 < temperature < COLDEST:
            raise UnsupportedError(
                f"vLLM samples at {COLDEST} where a temperature of {temperature:g} is asked for",
                remedy=f"Ask for 0, or for {COLDEST} or more",
            )
        if temperature > WARMEST:
            raise UnsupportedError(
                f"vLLM samples at temperatures up to {WARMEST:g}, and request {number} asks for {temperature:g}",
                remedy="Ask for less",
            )
        if request.sampling.top_p < 1.0 and request.sampling.min_p > 0.0:
            raise UnsupportedError(
                f"request {number} asks for top_p and min_p, which vLLM applies in another order than the engine",
                remedy="Ask for one of them",
            )
        if request.prompt_logprobs and temperature != 1.0:
            raise UnsupportedError(
                f"vLLM tells log-probabilities of prompts at temperature 1 alone, and request {number} samples at {temperature:g}",
                remedy="Ask for them at temperature 1",
            )
        if request.prompt_logprobs and self._require_started().twin.form == "adapter":
            raise UnsupportedError(
                f"request {number} asks for log-probabilities of its prompt, at which vLLM ends while it serves adapters",
                remedy='Set generator.weights to "tensors"',
            )
        if request.top_prompt_logprobs:
            raise UnsupportedError(
                f"request {number} asks for top_prompt_logprobs, which vllm does not give", remedy="Use the generator hf"
            )
        if request.top_logprobs > min(self._most_logprobs - 1, self._vocabulary - 1):
            raise ContractError(
                f"request {number} asks for the {request.top_logprobs} most likely tokens, and the servers tell {self._most_logprobs - 1}",
                remedy="Ask for fewer, or start the servers with a larger --max-logprobs",
            )

    def _decoder(self) -> Decode:
        if self._decode is None:
            self._decode = load_decoder(self._start.model)
        return self._decode

    # --- the event loop ----------------------------------------------------------------------------------------------------------------

    def _begin_loop(self, servers: Servers) -> None:
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="vllm-requests", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open_clients(servers), loop).result()
        servers.on_lost = lambda server: self._post(self._drop_posts, server)

    async def _open_clients(self, servers: Servers) -> None:
        self._places = asyncio.Semaphore(self._options.concurrency)
        for server in servers.all:
            server.http = server.client.open_asynchronous(self._options.request_seconds)

    def _post(self, call: Any, *arguments: Any) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(call, *arguments)

    def _take(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            self._jobs[job.request.request_id] = job
            job.task = asyncio.get_running_loop().create_task(self._serve(job))
            job.task.add_done_callback(self._tell_error)

    def _abort(self, chosen: set[int] | None) -> None:
        for number, job in list(self._jobs.items()):
            if (chosen is None or number in chosen) and not job.is_aborted:
                job.is_aborted = True
                if job.server is not None:
                    self._run_beside(self._abort_on_server(job))
                elif job.task is not None:
                    # it waits for a place; its task may not have begun, and would then not even see that it is cancelled
                    job.task.cancel()
                    self._jobs.pop(number)
                    self._ready.put(_empty(job.request, "abort"))

    def _run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _abort_on_server(self, job: _Job) -> None:
        """Abort until the request is back: one that has just been sent is not known there yet."""
        while (server := job.server) is not None and not self._is_closing:
            try:
                await server.http.post(
                    "/inference/v1/abort_requests", json={"request_ids": [name_on_server(job.name)]}, timeout=10.0
                )
            except httpx.HTTPError:
                return
            await asyncio.sleep(_ABORT_AGAIN)

    def _forget(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            self._homes.pop(session, None)

    def _drop_posts(self, server: VllmServer) -> None:
        """End the waiting for a server that is lost."""
        if not server.is_up:
            for post in list(server.posts):
                post.cancel()

    async def _end_jobs(self) -> None:
        tasks = [job.task for job in self._jobs.values() if job.task is not None] + list(self._beside)
        for task in tasks:
            task.cancel()
        servers = [] if self._servers is None else self._servers.all
        await asyncio.gather(*tasks, *(post for server in servers for post in server.posts), return_exceptions=True)
        for server in servers:
            await server.http.aclose()
        # transports close in the next rounds of the loop
        await asyncio.sleep(_NAP)

    async def _serve(self, job: _Job) -> None:
        request = job.request
        try:
            async with self._places:
                self._ready.put(await self._complete(job))
        finally:
            self._jobs.pop(request.request_id, None)
            if request.last_turn:
                self._homes.pop(request.session, None)

    def _tell_error(self, task: "asyncio.Task[None]") -> None:
        """Let `poll` raise what ended the task of a request."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ready.put(error)

    async def _complete(self, job: _Job) -> Completion:
        servers = self._require_started()
        request = job.request
        while not job.is_aborted:
            server = await self._choose(servers, request)
            try:
                answer = await self._ask(job, server)
                return answer.with_versions(servers.published)
            except Refusal as refusal:
                return _empty(request, "error", f"the vLLM server at {server.url}: {refusal.cause}")
            except LostMeanwhile:
                # not counted: else one request that a server dies of would use up the attempts of all others
                continue
            except ServerFault as fault:
                servers.lose(server, fault)
                job.faults.append(f"the vLLM server at {server.url}: {fault.cause}")
                if len(job.faults) > self._options.retries:
                    return _empty(request, "error", f"{len(job.faults)} attempts failed, the last one so: {job.faults[-1]}")
        return _empty(request, "abort")

    async def _choose(self, servers: Servers, request: GenerationRequest) -> VllmServer:
        """Return the server of a session, else the one with the least to do, and wait while none is up. Raises RolloutError."""
        while True:
            home = self._homes.get(request.session)
            if home is not None and home.is_up:
                return home
            if up := [server for server in servers.all if server.is_up]:
                self._homes[request.session] = chosen = min(up, key=lambda server: server.load)
                return chosen
            servers.require_one()
            await asyncio.sleep(10 * _NAP)

    async def _ask(self, job: _Job, server: VllmServer) -> GenerateAnswer:
        """Send a request, and return the answer once the weights that it is of are proven. Raises ServerFault or Refusal."""
        request = job.request
        job.name = f"{self._life}-{request.request_id}-{next(self._count)}"
        body = body_of(request, name=job.name, model=server.delivery.model, eos_token_ids=self._start.eos_token_ids)
        post = asyncio.ensure_future(server.http.post("/inference/v1/generate", json=body))
        server.load += 1
        server.posts.add(post)
        job.server = server
        try:
            return await self._read_answer(job, server, post)
        finally:
            job.server = None
            server.load -= 1
            server.posts.discard(post)

    async def _read_answer(self, job: _Job, server: VllmServer, post: "asyncio.Future[httpx.Response]") -> GenerateAnswer:
        request = job.request
        try:
            response = await post
        except httpx.HTTPError as error:
            raise ServerFault(describe_transport("/inference/v1/generate", error)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise LostMeanwhile("it was lost while it sampled") from None
        answer = answer_of(
            request,
            read("/inference/v1/generate", response),
            name=job.name,
            eos_token_ids=self._start.eos_token_ids,
            decode=self._decode,
            vocabulary=self._vocabulary,
        )
        while server.is_unproven:  # noqa: ASYNC110 a thread sets it
            await asyncio.sleep(_NAP)
        if not server.is_up:
            raise LostMeanwhile("its weights were not proven")
        self._require_own(answer, server, is_aborted=job.is_aborted)
        server.faults = 0
        return answer

    def _require_own(self, answer: GenerateAnswer, server: VllmServer, *, is_aborted: bool) -> None:
        """Raise where tokens are of weights that this run did not publish, or were ended by somebody else."""
        published = self._require_started().published
        for _, tag in answer.tags:
            if tag == UNTAGGED:
                raise ServerFault("it was started again, and has weights of nobody")
            if tag not in published:
                raise RolloutError(
                    f"the vLLM server at {server.url} has weights that this run did not publish ({tag}): another run uses it too",
                    remedy="Give every run servers of its own",
                )
        if len(answer.completion.token_ids) and not answer.tags:
            raise ServerFault("it does not tell of which weights its tokens are")
        if answer.completion.finish == "abort" and not is_aborted:
            raise ServerFault("it ended a request that nobody aborted")


def _empty(request: GenerationRequest, finish: Any, error: str | None = None) -> Completion:
    nothing = np.zeros(0, dtype=np.int32)
    return Completion(request.request_id, nothing, nothing.astype(np.float32), VersionSpans.one(0, 0), finish, error=error)
