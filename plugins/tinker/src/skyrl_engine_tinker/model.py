"""A model that is trained and sampled from: requests of the API as calls of `skyrl_engine.Engine`, on the thread of its lane."""

import time
from pathlib import Path
from typing import Any

from skyrl_engine import Engine, EngineError
from skyrl_engine_tinker.asked import AskedLoss, LossInForce
from skyrl_engine_tinker.checkpoints import Address, Facts, expiry, written
from skyrl_engine_tinker.codecs import encoded_outputs
from skyrl_engine_tinker.datums import DatumBatch, DatumLimits, wire_metrics
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.samplers import Samplers
from skyrl_engine_tinker.settings import Settings


class ServedModel:
    """An engine with one model; `open` starts it. One that is not trained samples from its base model, or for checkpoints of it."""

    def __init__(self, settings: Settings, model_id: str, *, trained: bool = True, base_model: str = "") -> None:
        self.settings, self.model_id, self.trained = settings, model_id, trained
        self.session = model_id.split(":", maxsplit=1)[0]
        self.base_model, self.rank = base_model, 0
        self.failure: str | None = None
        """Why the first request failed, so that there is nothing to close."""
        self.metadata: dict[str, str] | None = None
        """The client's own words about the model, from when it was made."""
        self._engine: Engine | None = None
        self._loss: LossInForce | None = None
        self._samplers: Samplers | None = None
        self._spoiled = False

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RequestError(f"the model could not be opened: {self.failure}")
        return self._engine

    @property
    def samplers(self) -> Samplers:
        if self._samplers is None:
            raise RequestError(f"the model could not be opened: {self.failure}")
        return self._samplers

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
        fresh = self.settings.stored(base_model) if start is None else None
        self._samplers = Samplers(engine, self.settings.serve.weight_sets, fresh)
        return {"type": "create_model", "model_id": self.model_id}

    def load(self, path: str, optimizer: bool, *, create: bool) -> dict[str, Any]:
        """Go on from a checkpoint: with `create` as a model's first request, otherwise in the engine that is there."""
        address = Address.read(path, ("weights",))
        facts = Facts.of(self.settings.directory, address)
        folder = address.folder(self.settings.directory)
        self._spoiled = False
        if create or not optimizer:
            self.close()
            self.metadata = self.metadata or facts.run_metadata
            self.open(facts.base_model, facts.lora_rank, start=None if optimizer else folder / "model")
        elif (self.base_model, self.rank) != (facts.base_model, facts.lora_rank):
            raise RequestError(f"the checkpoint is of {facts.base_model} with rank {facts.lora_rank}")
        if optimizer:
            self.samplers.before_load()
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
        self.samplers.before_step()
        clip = float(adam.get("grad_clip_norm") or 0.0)
        step = self.engine.optim_step(
            learning_rate=adam.get("learning_rate", 1e-4),
            betas=(adam.get("beta1", 0.9), adam.get("beta2", 0.95)),
            epsilon=adam.get("eps", 1e-12),
            weight_decay=adam.get("weight_decay", 0.0),
            max_grad_norm=clip if clip > 0 else None,
        ).result()
        return {"type": "optim_step", "metrics": {"grad_norm": step.grad_norm, "learning_rate": step.learning_rate}}

    def save(self, address: Address, *, overwrite: bool, ttl: float | None, metadata: dict[str, str] | None) -> dict[str, Any]:
        """Write a checkpoint: `model` as the engine exports it, `state` as it saves it if training may go on from there."""
        facts = Facts(self.base_model, self.rank, self.engine.step, time.time(), expiry(ttl), metadata, self.metadata)
        with written(self.settings.directory, address, facts, overwrite=overwrite) as folder:
            if address.kind == "weights":
                self.engine.save(folder / "state")
            self.engine.export(folder / "model")
        self.samplers.saved(address.path)
        return {"path": address.path}

    def pump(self) -> bool:
        """Sample for a moment. Returns True while samples are under way."""
        return self._samplers is not None and self._samplers.pump()

    def close(self) -> None:
        """End the ranks; calls under way are answered with a refusal."""
        if self._samplers is not None:
            self._samplers.close()
            self._samplers = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None
