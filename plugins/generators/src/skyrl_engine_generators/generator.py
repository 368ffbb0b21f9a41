"""The generator `hf`: samples from a transformers model in its own process, over the memory of the weights that are trained or a copy."""

from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, field

from skyrl_engine import ContractError, UnsupportedError
from skyrl_engine.contracts import POLICY, Completion, GenerationRequest, GeneratorStart, WeightSource
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.model_facts.tokenizer import Decode, load_decoder
from skyrl_engine.modeling.device_memory import release_cached_memory
from skyrl_engine.modeling.divided_sampler import HeldParts
from skyrl_engine.modeling.sampler_model import fill, load_sampler_model, make_divided_model, model_over
from skyrl_engine_generators.free_memory import plan_cache_tokens
from skyrl_engine_generators.kept import CacheBudget, Room
from skyrl_engine_generators.loop import SlotLoop
from skyrl_engine_generators.options import HfOptions
from skyrl_engine_generators.rows import CachedDecoder, TokenDecoder, UncachedDecoder
from skyrl_engine_generators.sampled_row import SampledRow
from skyrl_engine_generators.self_proof import make_proven_rows
from skyrl_engine_generators.stops import StopRule


@define(eq=False)
class _WeightSet:
    """One set of weights and the requests that are sampled from it."""

    model: Any
    rows: TokenDecoder
    loop: SlotLoop
    room: Room
    shared: bool
    parts: HeldParts | None
    """The part of the weights that this rank holds, where they are divided."""
    freed: dict[str, Any] = field(factory=dict)
    """While the generator sleeps, the shape of every parameter by name."""

    def free(self) -> None:
        """Free the memory of the weights."""
        for name, parameter in self.model.named_parameters():
            self.freed.setdefault(name, parameter.shape)
            parameter.data = parameter.data.new_empty(0)

    def make_room(self) -> None:
        """Take the memory again, for weights that follow."""
        for name, parameter in self.model.named_parameters():
            if name in self.freed:
                parameter.data = parameter.data.new_empty(self.freed.pop(name))


class HfGenerator:
    """`contracts.Generator`. It computes inside `poll`, and draws nothing but from the requests' own seeds."""

    def __init__(self, options: HfOptions) -> None:
        self._options = options
        self._sets: dict[str, _WeightSet] = {}
        self._ready: list[Completion] = []
        self._known: set[int] = set()
        self._decode: Decode | None = None

    def start(self, start: GeneratorStart) -> None:
        """Put a model over the backend's memory where it is shown, else load a copy; prove that cached rows are right for it."""
        self._start = start
        shared, parts = "module" in start.weights.forms, None
        if shared:
            model = model_over(start.model, start.weights.storage())
        else:
            model, parts = self._make_model(start.weights)
        self._limit = ModelFacts(start.model).longest_row
        self._budget = CacheBudget(self._options.cache_tokens or plan_cache_tokens(start.model, model, start.together))
        room = self._budget.open_room()
        rows = make_proven_rows(model, self._options.slots, name=start.model.path, limit=self._limit, memory=room)
        self._sets[POLICY] = self._make_set(POLICY, model, rows, room, start.version, shared=shared, parts=parts)

    def _make_model(self, weights: WeightSource) -> tuple[Any, HeldParts | None]:
        """Make a model of its own with these weights: a whole one, or this rank's part of one that several sample from."""
        start, parts = self._start, None
        if start.together is None:
            model = load_sampler_model(start.model, start.device)
        else:
            model, parts = make_divided_model(start.model, start.device, start.together)
        fill(model, weights.tensors(), start.model.path, parts)
        return model, parts

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests. Raises ContractError for ids that are taken, for prompts that are none, and for targets without weights."""
        for request in requests:
            self._refuse(request)
        if len({request.request_id for request in requests}) < len(requests):
            raise ContractError("two requests have one request_id", remedy="Count requests through")
        for request in requests:
            self._known.add(request.request_id)
            rule = StopRule.of(request.sampling, self._start.eos_token_ids, self._decoder)
            row = SampledRow(request, rule, request.prompt_ids.astype(np.int64))
            needed = len(request.prompt_ids) + request.sampling.max_tokens
            if self._limit is not None and needed > self._limit:
                cause = (
                    f"a prompt of {len(request.prompt_ids)} tokens leaves no room for {request.sampling.max_tokens} more: "
                    f"{self._start.model.path} takes {self._limit}"
                )
                self._ready.append(row.completion("error", error=cause))
            elif self._options.cache_tokens is not None and needed > self._options.cache_tokens:
                cause = (
                    f"a prompt of {len(request.prompt_ids)} tokens and {request.sampling.max_tokens} more have keys and values of {needed} "
                    f"tokens, and generator.cache_tokens is {self._options.cache_tokens}"
                )
                self._ready.append(row.completion("error", error=cause))
            else:
                self._sets[request.target].loop.add(row)

    def _refuse(self, request: GenerationRequest) -> None:
        prompt = request.prompt_ids
        if request.request_id in self._known:
            raise ContractError(f"request {request.request_id} is under way already", remedy="Give every request an id of its own")
        if request.target not in self._sets:
            raise ContractError(
                f"request {request.request_id} asks for the weights {request.target!r}, which nobody gave",
                remedy=f"Update that target first; there are {', '.join(self._sets)}",
            )
        if prompt.ndim != 1 or not len(prompt):
            raise ContractError(f"request {request.request_id} has no prompt", remedy="Give at least one token to begin with")
        vocabulary = self._sets[request.target].rows.vocabulary
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            place = int(np.argmax((prompt < 0) | (prompt >= vocabulary)))
            raise ContractError(
                f"request {request.request_id} has the token {prompt[place]} at place {place}, outside of the vocabulary of {vocabulary}",
                remedy="Encode the prompt with the model's own tokenizer",
            )
        most = max(request.top_logprobs, request.top_prompt_logprobs)
        if most > vocabulary:
            raise ContractError(
                f"request {request.request_id} asks for the {most} most likely tokens of a vocabulary of {vocabulary}",
                remedy="Ask for fewer",
            )

    def poll(self, timeout: float) -> list[Completion]:
        """Sample until something is finished, or for `timeout` seconds; at least one step."""
        until = monotonic() + timeout
        while not self._ready and (busy := [weight_set for weight_set in self._sets.values() if len(weight_set.loop)]):
            for weight_set in busy:
                self._ready += weight_set.loop.step()
            if monotonic() >= until:
                break
        ready, self._ready = self._ready, []
        self._known -= {completion.request_id for completion in ready}
        return ready

    def read_sampled(self, request_id: int) -> npt.NDArray[np.int32]:
        """int32[n]: the tokens sampled so far of a request that no poll has returned. Raises ContractError for any other."""
        for completion in self._ready:
            if completion.request_id == request_id:
                return completion.token_ids
        for weight_set in self._sets.values():
            if (row := weight_set.loop.find(request_id)) is not None:
                return np.array(row.tokens, dtype=np.int32)
        raise ContractError(f"request {request_id} is not under way", remedy="Ask for requests that no poll has returned yet")

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """End requests; the next poll returns them."""
        chosen = None if request_ids is None else set(request_ids)
        for weight_set in self._sets.values():
            self._ready += weight_set.loop.abort(lambda number: chosen is None or number in chosen)

    def update(self, weights: WeightSource, version: int, target: str = POLICY) -> None:
        """Take new weights; running rows go on with them, after a new prefill."""
        held = self._sets.get(target)
        if held is None:
            model, parts = self._make_model(weights)
            room = self._budget.open_room()
            self._sets[target] = self._make_set(target, model, self._rows_of(model, room), room, version, shared=False, parts=parts)
            return
        held.make_room()
        if not held.shared:
            fill(held.model, weights.tensors(), self._start.model.path, held.parts)
        held.loop.update(version)

    def release(self, target: str) -> None:
        """Drop a weight set; requests that are sampled from it end as aborted."""
        if target == POLICY:
            raise UnsupportedError(f"the weights {POLICY!r} are those that are trained", remedy="Close the generator")
        held = self._sets.pop(target, None)
        if held is not None:
            self._ready += held.loop.abort(lambda _number: True)
            self._budget.drop_target(target)
            held.room.close()

    def sleep(self) -> None:
        """Free weights, keys and values, until an `update` gives weights again; memory of the backend's stays. Raises ContractError while
        requests are under way.
        """
        if self._known:
            raise ContractError(
                f"the generator hf cannot sleep with {len(self._known)} requests under way", remedy="Take the completions first"
            )
        for target, held in self._sets.items():
            self._budget.drop_target(target)
            if not held.shared:
                held.free()
        release_cached_memory(self._start.device)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Free what is kept of sessions, for all weight sets."""
        self._budget.drop((target, session) for target in self._sets for session in sessions)

    def close(self) -> None:
        """Free models and caches; requests under way are forgotten."""
        for target in self._sets:
            self._budget.drop_target(target)
        self._sets.clear()
        self._ready.clear()
        self._known.clear()

    def _make_set(
        self, target: str, model: Any, rows: TokenDecoder, room: Room, version: int, *, shared: bool, parts: HeldParts | None
    ) -> _WeightSet:
        options = self._options
        loop = SlotLoop(
            rows,
            options.slots,
            version=version,
            prefill_tokens=options.prefill_tokens,
            target=target,
            budget=self._budget,
            room=room,
        )
        return _WeightSet(model, rows, loop, room, shared, parts)

    def _rows_of(self, model: Any, room: Room) -> TokenDecoder:
        """Rows of another copy of the model that was proven at the start."""
        proven = self._sets[POLICY].rows
        if isinstance(proven, UncachedDecoder):
            return UncachedDecoder(model, self._options.slots)
        rows = CachedDecoder(model, self._options.slots, room)
        rows.keeps, rows.keeps_sampled = proven.keeps, proven.keeps_sampled
        return rows

    def _decoder(self) -> Decode:
        """Decode as texts of actions are: without special tokens. The tokenizer is read when the first stop string is asked for."""
        if self._decode is None:
            self._decode = load_decoder(self._start.model)
        return self._decode
