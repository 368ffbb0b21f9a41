"""A model that is trained and sampled from: requests of the API as calls of `skyrl_engine.Engine`, on the thread of its worker."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import define

from skyrl_engine import Engine, ModelError
from skyrl_engine.contracts import LoraConfig
from skyrl_engine_tinker.adapted import EVERYWHERE, AdaptedLayers
from skyrl_engine_tinker.checkpoints import Address, Facts, expiry, write_checkpoint
from skyrl_engine_tinker.client_lists import ClientLists
from skyrl_engine_tinker.codecs import encode_outputs
from skyrl_engine_tinker.datums import DatumBatch, DatumLimits, wire_metrics
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.loss_request import LossInForce, LossRequest
from skyrl_engine_tinker.metrics import Counters
from skyrl_engine_tinker.model_worker import describe_failure
from skyrl_engine_tinker.requests import AdamParams
from skyrl_engine_tinker.samplers import Samplers
from skyrl_engine_tinker.settings import ALPHA, Settings


@define
class PassSums:
    """The passes of one optimizer step together: seconds of work, tokens, and loss."""

    seconds: float = 0.0
    tokens: int = 0
    loss: float = 0.0

    def add(self, seconds: float, tokens: int, loss: float) -> None:
        """Add a pass."""
        self.seconds += seconds
        self.tokens += tokens
        self.loss += loss


class ServedModel:
    """A model of `base_model`, of full weights (`rank` 0) or adapters; `open` starts its engine.

    One that is not trained samples from its base model, or for checkpoints of it, and is the `host` of sets of adapters.
    """

    def __init__(
        self,
        settings: Settings,
        model_id: str,
        base_model: str,
        rank: int,
        layers: AdaptedLayers = EVERYWHERE,
        *,
        trained: bool = True,
        counters: Counters | None = None,
    ) -> None:
        self.settings, self.model_id, self.base_model, self.trained = settings, model_id, base_model, trained
        self.counters = counters or Counters()
        self.slot = 0
        """Number of the model among those that are trained, for metrics: it says nothing of the client."""
        self.rank, self.layers = rank, layers
        self.session = model_id.split(":", maxsplit=1)[0]
        self.host: ServedModel | None = None
        """The model on whose engine this one is a set of adapters; None where it has an engine of its own."""
        self.not_opened: str | None = None
        """Why the first request failed, so that there is nothing to close."""
        self.metadata: Mapping[str, str] | None = None
        """The client's own words about the model, from when it was made."""
        self._engine: Engine | None = None
        self._loss: LossInForce | None = None
        self._samplers: Samplers | None = None
        self._passes = PassSums()
        """Seconds, tokens and loss of the passes of the step so far."""
        self._spoiled: str | None = None
        """Why the gradient is not that of all data of the step, so that no step may be taken on it."""
        self._lists = ClientLists()
        # why a checkpoint could not be opened in the place of what was there; another one may be
        self._lost: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the model is of no use to anybody: it could not be opened, or its ranks ended. None where it is of use."""
        return self.not_opened or (None if self._engine is None else self._engine.ended)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RequestError(f"the model could not be opened: {self.failure or self._lost}")
        if (ended := self._engine.ended) is not None:
            raise RequestError(f"the model takes no requests any more: {ended}; create it again, and load its last checkpoint")
        return self._engine

    @property
    def samplers(self) -> Samplers:
        if self._samplers is None:
            raise RequestError(f"the model could not be opened: {self.failure or self._lost}")
        return self._samplers

    def open(self, seed: int | None = None, start: Path | None = None) -> dict[str, Any]:
        """Start the ranks, or a set of adapters on those of the host. Answers `create_model`. A host is opened once, by whoever comes first."""
        if self._engine is None:
            self._engine = self._open_engine(seed, start)
            self._refuse_means_over_steps()
            self._loss = LossInForce(self._engine)
            fresh = self.settings.find_weights(self.base_model) if start is None and self.host is None else None
            self._samplers = Samplers(self._engine, self.settings.serve.weight_sets, fresh, self.counters)
        return {"type": "create_model", "model_id": self.model_id}

    def _open_engine(self, seed: int | None, start: Path | None) -> Engine:
        if self.host is not None:
            self.host.open()
        try:
            if self.host is None:
                return Engine.open(self.settings.engine(self.base_model, self.rank, seed, start, self.layers))
            targets = self.layers.targets
            lora = LoraConfig(rank=self.rank, alpha=ALPHA, targets=targets) if start is None else LoraConfig(path=str(start))
            return self.host.engine.add_adapters(lora, seed=seed)
        except ModelError as error:
            if self.layers == EVERYWHERE or start is not None:
                raise
            raise RequestError(
                f"adapters of {self.base_model} cannot be on {self.layers}: {error.cause}; leave train_attn and train_mlp out"
            ) from error

    def _refuse_means_over_steps(self) -> None:
        if self.engine.assembly.description.means_over_step:
            self.close()
            raise RequestError(
                "the backend adds losses of routers, which are means over an optimizer step, and a step's requests are added up one by one; "
                "the server's configuration must set router_balance_coefficient and router_z_coefficient to 0"
            )

    def load(self, path: str, optimizer: bool, *, create: bool) -> dict[str, Any]:
        """Go on from a checkpoint: with `create` as a model's first request, otherwise in the engine that is there."""
        address = Address.read(path, ("weights",))
        facts = Facts.of(self.settings.directory, address)
        folder = address.folder(self.settings.directory)
        if (facts.base_model, facts.lora_rank, facts.layers) != (self.base_model, self.rank, self.layers):
            where = f", adapters on {facts.layers}" if facts.lora_rank else ""
            raise RequestError(f"the checkpoint is of {facts.base_model} with rank {facts.lora_rank}{where}")
        self._spoiled, self._passes = None, PassSums()
        if create or not optimizer:
            self.close()
            self.metadata = self.metadata or facts.run_metadata
            try:
                self.open(start=None if optimizer else folder / "model")
            except BaseException as error:
                self._lost = describe_failure(error)["error"]
                raise
        if optimizer:
            self.samplers.before_load()
            self.engine.load(folder / "state")
        return {"type": "load_weights", "path": path}

    def arrive(self, request: Any) -> None:
        """Note a ForwardBackwardRequest that arrives and waits for its turn, perhaps as a part of a longer list."""
        self._lists.arrive(request.seq_id, len(request.data))

    def miss(self, first: int, last: int) -> None:
        """Note requests that never came, and whose turn is over: they may have held data of the step."""
        self._spoil(f"request {first} did not arrive" if first == last else f"requests {first} to {last} did not arrive")

    def forward_backward(self, request: Any) -> bytes:
        """Answer a ForwardBackwardRequest: log-probabilities and the summed loss; the gradient is added up, but for `forward_only`.

        Errors count datums in the client's list, of which the request may be a part. Data that is refused, for whatever reason, spoils the
        step: the next `optim_step` is refused.
        """
        number = request.seq_id
        try:
            return self._run_pass(request, self._lists.before(number))
        except BaseException as error:
            # also of torch: memory that ran out
            if not request.forward_only:
                self._spoil(f"a forward_backward of it failed: {describe_failure(error)['error']}")
            raise
        finally:
            self._lists.forget_before(number)

    def _spoil(self, why: str) -> None:
        # the first reason: the others may follow from it
        self._spoiled = self._spoiled or why

    def _run_pass(self, request: Any, before: int) -> bytes:
        engine, serve, begun = self.engine, self.settings.serve, time.monotonic()
        loss_request = LossRequest.of(request, serve.losses)
        assert self._loss is not None, "an engine has a loss in force"
        reads = self._loss.put(loss_request)
        limits = DatumLimits(self.settings.longest_of(self.base_model), serve.body_bytes // 4, engine.vocabulary_size)
        batch = DatumBatch.of(request, loss_request, reads, limits, before=before)
        plan = engine.plan(batch.columns)
        if request.forward_only:
            result = engine.evaluate(plan, tokens="actions", labels=batch.labels).result()
        else:
            result = engine.forward_backward(plan, tokens="actions", labels=batch.labels).result()
        metrics, tokens = wire_metrics(result.output.metrics), int(batch.columns.action_offsets[-1])
        self.counters.count_tokens("forward" if request.forward_only else "forward_backward", tokens)
        if not request.forward_only:
            self._passes.add(time.monotonic() - begun, tokens, metrics["loss:sum"])
        return encode_outputs(batch.logprobs(result.output), metrics)

    def optim_step(self, adam: AdamParams) -> dict[str, Any]:
        """Take one AdamW step with the request's numbers; samplers of the step before keep its weights."""
        passes, self._passes, begun = self._passes, PassSums(), time.monotonic()
        if self._spoiled is not None:
            why, self._spoiled = self._spoiled, None
            self.engine.discard()
            raise RequestError(
                f"no step was taken, and its gradient was dropped: {why.rstrip('.')}. Send all data of the step again"
            )
        self.samplers.before_step()
        step = self.engine.optim_step(
            learning_rate=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            epsilon=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm if adam.grad_clip_norm > 0 else None,
        ).result()
        self.counters.record_step(self.slot, passes.seconds + time.monotonic() - begun, passes.tokens, passes.loss)
        return {"type": "optim_step", "metrics": {"grad_norm": step.grad_norm, "learning_rate": step.learning_rate}}

    def save(self, address: Address, *, overwrite: bool, ttl: int | None, metadata: Mapping[str, str] | None) -> dict[str, Any]:
        """Write a checkpoint: `model` as the engine exports it, `state` as it saves it if training may go on from there."""
        facts = Facts(
            self.base_model,
            self.rank,
            self.engine.step,
            time.time(),
            expiry(ttl),
            metadata,
            self.metadata,
            self.layers.attention,
            self.layers.mlp,
        )
        with write_checkpoint(self.settings.directory, address, facts, overwrite=overwrite) as folder:
            if address.kind == "weights":
                self.engine.save(folder / "state")
            self.engine.export(folder / "model")
            self._name_base(folder / "model")
        self.samplers.record_saved(address.path)
        return {"path": address.path}

    def _name_base(self, folder: Path) -> None:
        """Write the base model's name in the place of its folder on this machine, which clients that download the files do not have."""
        path = self.settings.serve.models[self.base_model]
        for file in (folder / name for name in ("adapter_config.json", "config.json", "tokenizer_config.json")):
            known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            named = {key: self.settings.tokenizer_of(self.base_model) if value == path else value for key, value in known.items()}
            if named != known:
                file.write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")

    def pump(self) -> bool:
        """Sample for a moment. Returns True while samples are under way."""
        return self._samplers is not None and self._samplers.pump()

    def drop_samples(self) -> None:
        """End the samples of the session that ends; those of others, who sample from the base model, are taken before the model is closed."""
        if self.trained and self._samplers is not None:
            self._samplers.drop(self.session)

    def close(self) -> None:
        """End the ranks; calls under way are answered with a refusal."""
        if self._samplers is not None:
            self._samplers.close()
            self._samplers = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None
