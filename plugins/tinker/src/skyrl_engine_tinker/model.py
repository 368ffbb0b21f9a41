"""A model that is trained and sampled from: requests of the API as calls of `skyrl_engine.Engine`, on the thread of its lane."""

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define

from skyrl_engine import Engine, EngineError
from skyrl_engine.contracts import POLICY, Completion, GenerationRequest
from skyrl_engine_tinker.asked import AskedLoss, LossInForce
from skyrl_engine_tinker.codecs import encoded_outputs, encoded_samples
from skyrl_engine_tinker.datums import DatumBatch, DatumLimits, wire_metrics
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.lane import PendingAnswer
from skyrl_engine_tinker.sampling import SampleCall
from skyrl_engine_tinker.settings import FACTS, PARTIAL, Settings

POLL_SECONDS = 0.02
"""How long the ranks sample before requests are looked at again."""


@define(eq=False)
class _Waiting:
    """A call whose samples are under way."""

    call: SampleCall
    promise: PendingAnswer
    numbers: list[int]
    target: str
    found: dict[int, Completion]


class ServedModel:
    """An engine with one model; `open` starts it. Samplers are pinned to the step whose weights they sample from."""

    def __init__(self, settings: Settings, model_id: str) -> None:
        self.settings, self.model_id = settings, model_id
        self.base_model, self.rank = "", 0
        self.failed = False
        """Whether the first request failed, so that there is nothing to close."""
        self._engine: Engine | None = None
        self._loss: LossInForce | None = None
        self._spoiled = False
        self._waiting: list[_Waiting] = []
        self._number = 0
        self._pinned: dict[str, int] = {}
        self._sets: dict[int, str] = {}

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RequestError("the model could not be opened; see the answer to its first request")
        return self._engine

    def open(self, base_model: str, rank: int, seed: int | None = None, start: Path | None = None) -> dict[str, Any]:
        """Start the ranks. Answers `create_model`."""
        self.base_model, self.rank = base_model, rank
        engine = self._engine = Engine.open(self.settings.engine(base_model, rank, seed, start))
        if engine.assembly.description.means_over_step:
            self.close()
            raise RequestError(
                "the backend adds losses of routers, which are means over an optimizer step, and a step's requests are added up one by one; "
                "the server's configuration must set router_balance_coefficient and router_z_coefficient to 0"
            )
        self._loss = LossInForce(engine)
        return {"type": "create_model", "model_id": self.model_id}

    def load(self, path: str, optimizer: bool, *, create: bool) -> dict[str, Any]:
        """Go on from a checkpoint: with `create` as a model's first request, otherwise in the engine that is there."""
        folder = self.settings.addressed(path)
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        self._spoiled = False
        if create or not optimizer:
            self.close()
            self.open(facts["base_model"], facts["lora_rank"], start=None if optimizer else folder / "model")
        elif (self.base_model, self.rank) != (facts["base_model"], facts["lora_rank"]):
            raise RequestError(f"the checkpoint is of {facts['base_model']} with rank {facts['lora_rank']}")
        if optimizer:
            # steps count from another place now, and samplers are pinned to steps
            self._pinned.clear()
            self._sets.clear()
            self.engine.load(folder / "state")
        return {"type": "load_weights", "path": path}

    def forward_backward(self, request: Any) -> bytes:
        """Answer a ForwardBackwardRequest: log-probabilities and the summed loss; the gradient is added up, but for `forward_only`."""
        engine, serve = self.engine, self.settings.serve
        asked = AskedLoss.of(request, serve.losses)
        assert self._loss is not None, "an engine has a loss in force"
        reads = self._loss.put(asked)
        batch = DatumBatch.of(request, asked, reads, DatumLimits(serve.longest, serve.body_bytes // 4, engine.vocabulary_size))
        plan = engine.plan(batch.columns)
        if request.forward_only:
            result = engine.evaluate(plan, tokens="actions", labels=batch.labels).result()
        else:
            try:
                result = engine.forward_backward(plan, tokens="actions", labels=batch.labels).result()
            except EngineError:
                self._spoiled = True
                raise
        return encoded_outputs(batch.logprobs(result.output), wire_metrics(result.output.metrics))

    def optim_step(self, adam: dict[str, Any]) -> dict[str, Any]:
        """Take one AdamW step with the request's numbers; samplers of the step before keep its weights."""
        if self._spoiled:
            self._spoiled = False
            self.engine.discard()
            raise RequestError("a forward_backward of this step failed, so its gradient was dropped; send the step's data again")
        self._keep_pinned()
        clip = float(adam.get("grad_clip_norm") or 0.0)
        step = self.engine.optim_step(
            learning_rate=adam.get("learning_rate", 1e-4),
            betas=(adam.get("beta1", 0.9), adam.get("beta2", 0.95)),
            epsilon=adam.get("eps", 1e-12),
            weight_decay=adam.get("weight_decay", 0.0),
            max_grad_norm=clip if clip > 0 else None,
        ).result()
        return {"type": "optim_step", "metrics": {"grad_norm": step.grad_norm, "learning_rate": step.learning_rate}}

    def save(self, name: str, *, overwrite: bool) -> dict[str, Any]:
        """Write a checkpoint: `state` as the engine saves it, `model` as it exports it, and what the model is."""
        folder = self.settings.checkpoint(self.model_id, "weights", name)
        if folder.exists() and not overwrite:
            raise RequestError(f"there is a checkpoint {name!r} already; give another name, or overwrite")
        aside = folder.with_name(f"{name}{PARTIAL}")
        shutil.rmtree(aside, ignore_errors=True)
        self.engine.save(aside / "state")
        self.engine.export(aside / "model")
        facts = {"base_model": self.base_model, "lora_rank": self.rank, "step": self.engine.step}
        (aside / FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        return {"type": "save_weights", "path": f"tinker://{self.model_id}/weights/{name}"}

    def pin(self, sampler: str) -> None:
        """Have a sampler stay with the weights of this moment."""
        self._start_generator()
        self._pinned[sampler] = self.engine.step

    def sample(self, sampler: str, call: SampleCall, promise: PendingAnswer) -> None:
        """Send the samples of a call to the ranks; `pump` answers them."""
        try:
            target = self._target(sampler)
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
                    prompt_logprobs=call.prompt_logprobs and number == first,
                    top_logprobs=call.top_logprobs,
                )
                for number, own in zip(numbers, seeds, strict=True)
            ]
            self.engine.sampler.submit(requests)
            self._waiting.append(_Waiting(call, promise, numbers, target, {}))
        except BaseException as error:  # noqa: BLE001 - whatever a request meets is its answer
            promise.fail(error)

    def pump(self) -> bool:
        """Sample for a moment and answer the calls that are complete. Returns True while some are under way."""
        if not self._waiting:
            return False
        try:
            found = {each.request_id: each for each in self.engine.sampler.poll(POLL_SECONDS)}
        except BaseException as error:  # noqa: BLE001 - the ranks failed: every call under way is answered so
            for waiting in self._waiting:
                waiting.promise.fail(error)
            self._waiting.clear()
            return False
        for waiting in self._waiting:
            waiting.found |= {number: found[number] for number in waiting.numbers if number in found}
            if len(waiting.found) == len(waiting.numbers):
                _answer(waiting)
        self._waiting = [each for each in self._waiting if each.promise.finished_at is None]
        return bool(self._waiting)

    def close(self) -> None:
        """End the ranks; calls under way are answered with a refusal."""
        for waiting in self._waiting:
            waiting.promise.fail(RequestError("the model was closed"))
        self._waiting.clear()
        self._sets.clear()
        self._pinned.clear()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _target(self, sampler: str) -> str:
        """Return the weight set of a sampler, and start the generator where it is not there."""
        engine, step = self.engine, self._pinned.get(sampler)
        if step is None:
            raise RequestError("this sampler's model was closed")
        if step == engine.step:
            if engine.sampler.version != step:
                engine.sampler.update(step)
            return POLICY
        if step not in self._sets:
            raise RequestError(
                f"the weights of step {step} are no longer kept; make a sampler of present weights, or raise serve.weight_sets "
                f"({self.settings.serve.weight_sets})"
            )
        return self._sets[step]

    def _start_generator(self) -> None:
        """Start the generator where it is not there: only then can a step's weights be copied before the next one changes them."""
        if not self.engine.has_sampler:
            self.engine.start_sampler(self.engine.assembly.plugins["generator"])

    def _keep_pinned(self) -> None:
        """Finish samples of the present weights, and copy these for their samplers, before a step changes them in place."""
        engine = self.engine
        if engine.step not in self._pinned.values():
            return
        while any(each.target == POLICY for each in self._waiting):
            self.pump()
        kept = self.settings.serve.weight_sets
        if kept < 1:
            return
        target = f"set {len(self._sets)}"
        if len(self._sets) >= kept:
            # the memory of the oldest is written over, when nobody samples from it
            target = self._sets.pop(min(self._sets))
            while any(each.target == target for each in self._waiting):
                self.pump()
        engine.sampler.update(engine.step, target)
        self._sets[engine.step] = target


def _answer(waiting: _Waiting) -> None:
    completions = [waiting.found[number] for number in waiting.numbers]
    wrong = next((each for each in completions if each.finish == "error"), None)
    if wrong is not None:
        waiting.promise.fail(RequestError(wrong.error or "the generator could not sample"))
        return
    waiting.promise.set(encoded_samples(completions, prompt_logprobs=waiting.call.prompt_logprobs))
