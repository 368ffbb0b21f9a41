"""Samplers of a model: the weights that each samples from, and calls under way. On the thread of the model's worker.

A generator reads the memory that is trained, so a sampler has its weights from one of these:

    POLICY      the present weights, as long as no step was taken since the sampler was made
    a set       a copy: of a step that an unnamed sampler is pinned to, or of weights that were read from the disk
    INFLIGHT    the one copy that all in-flight samplers of the model share; publishing writes it over

`serve.weight_sets` copies are kept, in-flight weights aside, or as many as memory has room for. The least recently used one is replaced;
weights on the disk are read again.
"""

import logging
import secrets
from collections.abc import Callable

import numpy as np
from attrs import define

from skyrl_engine import Engine
from skyrl_engine.contracts import POLICY, Completion, GenerationRequest
from skyrl_engine_tinker.checkpoints import SavedWeights
from skyrl_engine_tinker.codecs import encode_samples
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.metrics import Counters
from skyrl_engine_tinker.model_worker import PendingAnswer
from skyrl_engine_tinker.sampling import SampleCall

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02
"""Seconds that the ranks sample before requests are checked again."""

INFLIGHT = "in flight"


@define(eq=False)
class _Waiting:
    """A call whose samples are under way."""

    session: str
    call: SampleCall
    promise: PendingAnswer
    numbers: list[int]
    target: str
    found: dict[int, Completion]


class Samplers:
    """Samplers over the generator of one engine. `base` are the weights that a fresh model begins with; None where it was not fresh."""

    def __init__(self, engine: Engine, weight_sets: int, base: SavedWeights | None, counters: Counters) -> None:
        self._engine, self._kept, self._base, self._counters = engine, weight_sets, base, counters
        self._waiting: list[_Waiting] = []
        self._number = 0
        self._pinned: dict[str, int] = {}
        self._inflight: set[str] = set()
        self._saved: dict[str, int] = {}
        # in the order of last use, the most recent last
        self._sets: dict[int | SavedWeights, str] = {}
        self._unused = [f"set {number}" for number in range(weight_sets)]

    def pin(self, sampler: str) -> None:
        """Make a sampler keep the present weights."""
        self._start_generator()
        self._pinned[sampler] = self._engine.step

    def publish(self, sampler: str) -> None:
        """Give the present weights to all in-flight samplers, this one included."""
        self._start_generator()
        self._engine.sampler.update(self._engine.step, INFLIGHT)
        self._inflight.add(sampler)

    def record_saved(self, path: str) -> None:
        """Note that the present weights are saved under `path`, so that they are not read from the disk while they are in memory."""
        self._saved[path] = self._engine.step

    def sample(self, sampler: str, session: str, stored: SavedWeights | None, call: SampleCall, promise: PendingAnswer) -> None:
        """Send the samples of a session's call to the ranks; `pump` answers them."""
        try:
            target = self._find_weight_set(sampler, stored)
            first, self._number = self._number, self._number + call.count
            numbers = list(range(first, self._number))
            seed = secrets.randbits(63) if call.seed is None else call.seed
            seeds = np.random.SeedSequence([abs(seed), int(seed < 0)]).generate_state(call.count, np.uint64)
            requests = [
                GenerationRequest(
                    number,
                    call.prompt,
                    call.sampling,
                    int(own),
                    session=number,
                    prefix_group=first,
                    target=target,
                    last_turn=True,
                    prompt_logprobs=call.prompt_logprobs and number == first,
                    top_logprobs=call.top_logprobs,
                    top_prompt_logprobs=call.top_prompt_logprobs if number == first else 0,
                )
                for number, own in zip(numbers, seeds, strict=True)
            ]
            self._engine.sampler.submit(requests)
            self._waiting.append(_Waiting(session, call, promise, numbers, target, {}))
        except BaseException as error:  # noqa: BLE001 - every error of a request is its answer
            promise.fail(error)

    def pump(self) -> bool:
        """Sample for a moment and answer the calls that are complete. Returns True while some are under way."""
        if not self._waiting:
            return False
        try:
            results = {result.request_id: result for result in self._engine.sampler.poll(POLL_SECONDS)}
        except BaseException as error:  # noqa: BLE001 - the ranks failed: every call under way is answered so
            for waiting in self._waiting:
                waiting.promise.fail(error)
            self._waiting.clear()
            return False
        for waiting in self._waiting:
            waiting.found |= {number: results[number] for number in waiting.numbers if number in results}
            if len(waiting.found) == len(waiting.numbers):
                self._counters.count_tokens("sample", sum(len(completion.token_ids) for completion in waiting.found.values()))
                _answer_call(waiting)
        self._waiting = [call for call in self._waiting if call.promise.finished_at is None]
        return bool(self._waiting)

    def before_step(self) -> None:
        """Finish samples of the present weights, and copy these for their samplers, before a step changes them in place."""
        self._finish(POLICY)
        engine = self._engine
        if engine.step in self._pinned.values() and self._kept:
            self._fill_set(engine.step, lambda target: engine.sampler.update(engine.step, target))

    def before_load(self) -> None:
        """Finish all samples and forget step numbers: after a load they count from another number."""
        for target in {call.target for call in self._waiting}:
            self._finish(target)
        self._pinned.clear()
        self._saved.clear()
        self._unused += self._sets.values()
        self._sets.clear()
        self._base = None

    def drop(self, session: str) -> None:
        """Answer the calls of a session with a refusal."""
        for waiting in [call for call in self._waiting if call.session == session]:
            self._waiting.remove(waiting)
            waiting.promise.fail(RequestError("the model was closed"))

    def close(self) -> None:
        """Answer calls under way with a refusal."""
        for waiting in self._waiting:
            waiting.promise.fail(RequestError("the model was closed"))
        self._waiting.clear()

    def _find_weight_set(self, sampler: str, stored: SavedWeights | None) -> str:
        """Return the weight set of a sampler, and start the generator if it does not run."""
        self._start_generator()
        engine = self._engine
        if sampler in self._inflight:
            return INFLIGHT
        step = self._pinned.get(sampler)
        if stored is not None:
            step = 0 if stored == self._base else self._saved.get(stored.path or "")
        if step is not None and step == engine.step:
            if engine.sampler.version != step:
                engine.sampler.update(step)
            return POLICY
        if stored is not None:
            return self._read(stored)
        if step is None:
            raise RequestError("this sampler's model was closed")
        if step not in self._sets:
            raise RequestError(
                f"the weights of step {step} are no longer kept; make a sampler of present weights, give it a name, or raise serve.weight_sets "
                f"({self._kept})"
            )
        return self._touch(step)

    def _read(self, stored: SavedWeights) -> str:
        """Return a set with weights from the disk; they are read unless a set holds them already."""
        if stored not in self._sets:
            if not self._kept:
                raise RequestError(
                    "a sampler of other weights than those that a model trains at this moment needs serve.weight_sets of 1 or more, and this "
                    "server's configuration says 0; sample before the model's next step, or have it raised"
                )
            self._fill_set(stored, lambda target: self._engine.add_weights(target, stored.model, stored.adapter))
        return self._touch(stored)

    def _touch(self, key: int | SavedWeights) -> str:
        target = self._sets[key] = self._sets.pop(key)
        return target

    def _fill_set(self, key: int | SavedWeights, fill: Callable[[str], None]) -> None:
        """Give weights to a set. Where memory has no room for another copy, one is dropped, another replaced, and no more are made: training
        needs the room of one.
        """
        target = self._free_weight_set()
        try:
            fill(target)
        except BaseException as error:
            if not self._sets or not _is_lack_of_memory(error):
                self._unused.append(target)
                raise
        else:
            self._sets[key] = target
            return
        logger.warning(
            "memory has room for %d copies of the model's weights, and serve.weight_sets is %d: samplers of older steps end earlier",
            len(self._sets),
            self._kept,
        )
        if len(self._sets) > 1:
            self._engine.sampler.release(self._take_oldest_set())
        self._kept, self._unused = len(self._sets), []
        self._fill_set(key, fill)

    def _free_weight_set(self) -> str:
        """Return a set to overwrite: a free one, or the least recently used."""
        return self._unused.pop() if self._unused else self._take_oldest_set()

    def _take_oldest_set(self) -> str:
        """Take out the least recently used set, after its samples are finished."""
        target = self._sets.pop(next(iter(self._sets)))
        self._finish(target)
        return target

    def _finish(self, target: str) -> None:
        while any(call.target == target for call in self._waiting):
            self.pump()

    def _start_generator(self) -> None:
        """Start the generator if it does not run: only then can a step's weights be copied before the next step changes them."""
        if not self._engine.has_sampler:
            self._engine.start_sampler(self._engine.assembly.plugins["generator"])


def _is_lack_of_memory(error: BaseException) -> bool:
    """Say whether a device had no memory: an error of torch, here or told by a rank elsewhere."""
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower()


def _answer_call(waiting: _Waiting) -> None:
    completions = [waiting.found[number] for number in waiting.numbers]
    failed = next((completion for completion in completions if completion.finish == "error"), None)
    if failed is not None:
        waiting.promise.fail(RequestError(failed.error or "the generator could not sample"))
        return
    waiting.promise.set(encode_samples(completions, last=waiting.call.last))
