"""`Sampler`: requests to the generators of a run, completions back; every one exactly once."""

from collections.abc import Collection, Sequence
from functools import partial

from skyrl_engine.cleanup import close_after
from skyrl_engine.contracts.kinds.generator import POLICY, Completion, GenerationRequest, GeneratorCapability, GeneratorDescription
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import ContractError, EngineError, UnsupportedError
from skyrl_engine.workers.future import Future
from skyrl_engine.workers.generator_hosts import GeneratorHost

PATIENCE_SECONDS = 60.0
"""Seconds that `generate` lets one rank sample without a word."""


class Sampler:
    """Samples from the model of an engine, wherever its generators live. `submit` and `poll` stream; `generate` waits for a list of requests.

    `version` is the number of optimizer steps of the weights that are sampled from; tokens carry it.
    """

    def __init__(
        self,
        host: GeneratorHost,
        label: str,
        description: GeneratorDescription,
        version: int,
        vocabulary: int | None = None,
    ) -> None:
        """Sample with the generators of `host`, which `label` names in errors; `vocabulary` counts the tokens that the model knows (None:
        nobody says).
        """
        self.label = label
        self.description = description
        self.version = version
        self._vocabulary = vocabulary
        self._host = host
        self._under_way: set[int] = set()
        self._awaited: set[int] = set()
        self._kept: dict[int, Completion] = {}
        self._ready: list[Completion] = []

    @property
    def concurrent(self) -> bool:
        """Say whether the generators sample while the ranks do something else."""
        return self._host.concurrent

    @property
    def on_ranks(self) -> bool:
        """Say whether the generators live in the ranks' processes, and end with them."""
        return self._host.on_ranks

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Send requests to the ranks: those of a session always to the same one. Returns at once.

        Raises UnsupportedError for what the generator does not claim, ContractError for a request that no generator could serve.
        """
        taken = {*self._under_way, *self._kept}
        for request in requests:
            self._refuse(request)
            if request.request_id in taken:
                raise ContractError(
                    f"the request_id {request.request_id} is given twice", remedy="Give every request of a run an id of its own"
                )
            taken.add(request.request_id)
        ids = {request.request_id for request in requests}
        try:
            self._host.submit(requests)
        except EngineError as error:
            # one of several generators refused its share; the others took theirs
            close_after(error, partial(self._take_back, ids))
            raise
        self._under_way |= ids

    def poll(self, timeout: float = PATIENCE_SECONDS) -> list[Completion]:
        """Return completions as they come, in any order: none after `timeout` seconds, and none where nothing is under way."""
        if not self._ready and self._under_way - self._awaited:
            self._gather(timeout)
        ready, self._ready = self._ready, []
        return ready

    def generate(self, requests: Sequence[GenerationRequest]) -> Future[list[Completion]]:
        """Send requests, and return a future of their completions in the order of the requests. Raises as `submit` does."""
        self.submit(requests)
        ids = [request.request_id for request in requests]
        self._awaited |= set(ids)

        def gather_completions() -> list[Completion]:
            while any(name not in self._kept for name in ids):
                self._gather(PATIENCE_SECONDS)
            return [self._kept.pop(name) for name in ids]

        return Future(gather_completions)

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """End requests (None: all). Each still comes back once, with what was sampled of it."""
        self._host.abort(request_ids)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Say that no turn of these sessions follows, so that generators free what they keep of them."""
        self._host.end_sessions(sessions)

    def update(self, version: int, target: str = POLICY) -> None:
        """Sample from the engine's present weights from now on: those of `version`, under the name `target`."""
        self.write(version, target)
        self.take(version, target)

    def write(self, version: int, target: str = POLICY) -> None:
        """Gather the engine's present weights as those of `version`, which `take` gives to the generators, now or later."""
        self._host.write(version, target)

    def take(self, version: int, target: str = POLICY) -> None:
        """Sample from the weights that `write` gathered from now on."""
        self._host.update(version, target)
        if target == POLICY:
            self.version = version

    def load(self, model: ModelConfig, target: str) -> None:
        """Sample from weights in files under the name `target`, next to the policy's; their tokens carry the version 0.

        Raises UnsupportedError for a generator that takes none, ModelError for weights that do not fit the model.
        """
        assert target != POLICY, "the policy's weights are those that are trained"
        self._host.load(model, target)

    def release(self, target: str) -> None:
        """Drop a weight set other than the policy's."""
        self._host.release(target)

    def close(self) -> None:
        """End the generators. Requests under way are forgotten."""
        self._host.close()
        self._under_way.clear()

    def _take_back(self, ids: Collection[int]) -> None:
        """End and forget requests that some ranks may have taken."""
        self._host.abort(list(ids))
        self._gather(0.0, forgotten=ids)

    def _gather(self, timeout: float, forgotten: Collection[int] = ()) -> None:
        """Wait for completions, and hand completions to the callers that wait for them; completions of `forgotten` requests are dropped."""
        for completion in self._host.poll(timeout):
            number = completion.request_id
            if number in forgotten:
                continue
            if number not in self._under_way:
                raise ContractError(
                    f"{self.label} answered request {number}, which is not under way: it was answered before, or never sent",
                    remedy="Return every request exactly once",
                )
            self._under_way.discard(number)
            self._require_known(completion)
            if number in self._awaited:
                self._awaited.discard(number)
                self._kept[number] = completion
            else:
                self._ready.append(completion)

    def _require_known(self, completion: Completion) -> None:
        """Refuse tokens that the model does not have: the generator samples from another one."""
        ids = completion.token_ids
        if self._vocabulary is None or not len(ids):
            return
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self._vocabulary:
            raise ContractError(
                f"{self.label} sampled the token {lowest if lowest < 0 else highest} for request {completion.request_id}, and the model's "
                f"vocabulary has {self._vocabulary:,}",
                remedy="Sample from the model that is trained",
            )

    def _refuse(self, request: GenerationRequest) -> None:
        """Refuse what the generator does not claim; it might leave it out without a word."""
        sampling = request.sampling
        requested: list[tuple[GeneratorCapability, bool]] = [
            ("filters", sampling.filtered),
            ("stop_strings", bool(sampling.stop_strings)),
            ("prompt_logprobs", request.prompt_logprobs),
            ("top_logprobs", request.top_logprobs > 0),
            ("top_prompt_logprobs", request.top_prompt_logprobs > 0),
        ]
        for capability, wanted in requested:
            if wanted and capability not in self.description.capabilities:
                raise UnsupportedError(
                    f"{self.label} does not declare the capability {capability!r}, which request {request.request_id} asks for",
                    remedy="Ask for less, or choose another generator",
                )
