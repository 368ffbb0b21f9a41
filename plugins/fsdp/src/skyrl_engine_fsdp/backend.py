"""The FSDP2 backend: a Hugging Face causal language model sharded over data-parallel ranks that scores, learns and saves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from skyrl_engine.contracts.backend import MicroBatch, ModelSpec, Objective, OptimizerSpec, OptimStep, RankBatch, RankEnvironment
from skyrl_engine.contracts.outputs import RankOutput
from skyrl_engine.contracts.topology import RankCoords
from skyrl_engine.errors import DataError, ModelError, UnsupportedError
from skyrl_engine.modeling.loading import quiet_progress
from skyrl_engine.modeling.model_inputs import model_inputs
from skyrl_engine.modeling.optimizer import build_adamw, set_learning_rate
from skyrl_engine.modeling.schedule import learning_rate
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine_fsdp.checkpoint import TrainingState
from skyrl_engine_fsdp.gradients import clip_gradients, full, non_finite
from skyrl_engine_fsdp.placement import load_sharded
from skyrl_engine_fsdp.plugin import FsdpConfig
from skyrl_engine_fsdp.sharding import reshard

SCORES = frozenset({"logprobs", "entropy"})


class FsdpBackend:
    """`contracts.backend.Backend` over `fully_shard`. The default process group must exist before `setup`."""

    coords: RankCoords
    _model: Any  # transformers.PreTrainedModel; it and the scorer share their modules
    _scorer: Scorer
    _optimizer: torch.optim.AdamW | None
    _device: torch.device

    def __init__(self, config: FsdpConfig) -> None:
        self._config = config
        self.coords = RankCoords()

    def setup(self, model: ModelSpec, optimizer: OptimizerSpec | None, environment: RankEnvironment) -> None:
        """Load, shard over all ranks, and make the optimizer. Raises ModelError."""
        self.coords = RankCoords(rank=environment.rank, dp=environment.rank)
        self._device = torch.device(environment.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        mesh = init_device_mesh(self._device.type, (environment.world_size,), mesh_dim_names=("dp",))
        self._model, self._scorer = load_sharded(
            model, mesh, self._device, reshard_after_forward=self._config.reshard_after_forward
        )
        self._vocabulary = self._model.get_input_embeddings().weight.shape[0]
        self._specification = optimizer
        self._optimizer = build_adamw(self._parameters().values(), optimizer) if optimizer is not None else None
        self._steps_done = 0

    @torch.no_grad()
    def forward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score without gradients, in evaluation mode."""
        self._scorer.eval()
        parts = [objective(self._scores(micro_batch, objective), micro_batch)[1] for micro_batch in batch]
        reshard(self._scorer)
        return RankOutput.concat(parts, self.coords)

    def forward_backward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score, differentiate and accumulate; every micro-batch's gradient is summed over ranks at once, so any cut adds up alike."""
        self._scorer.train()
        parts = []
        for micro_batch in batch:
            scores = self._scores(micro_batch, objective)
            total, output = objective(scores, micro_batch)
            if (
                not total.requires_grad
            ):  # an objective without terms: backward must run all the same, other ranks wait in its collectives
                total = total + 0.0 * scores["logprobs"].nan_to_num(0.0, 0.0, 0.0).sum()
            torch.autograd.backward(total)
            parts.append(output)
        return RankOutput.concat(parts, self.coords)

    def optim_step(self) -> OptimStep:
        """Clip, step, advance the schedule, clear the gradients.

        Raises ModelError where the gradient is not finite: then the weights, the optimizer and the schedule stay as the step before left
        them, and the gradient is cleared.
        """
        assert self._optimizer is not None, "optim_step on a backend that was set up for scoring only"
        assert self._specification is not None
        parameters = self._parameters()
        norm = clip_gradients(parameters.values(), self._specification.max_grad_norm)
        if not norm < float("inf"):  # also true for NaN; every rank sees the same norm and stops alike
            details = [
                f"rank {self.coords.rank}: the gradient of {name} is not finite" for name in non_finite(parameters.items())[:5]
            ]
            self._optimizer.zero_grad(set_to_none=True)
            raise ModelError(
                f"the gradient of optimizer step {self._steps_done + 1} is not finite (norm {norm})",
                remedy="Lower optimizer.learning_rate or inspect this step's samples; the weights are those of the step before",
                details=details,
            )
        rate = learning_rate(self._specification, self._steps_done)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps_done += 1
        return OptimStep(grad_norm=norm, learning_rate=rate)

    def save(self, directory: Path) -> None:
        """Write this rank's part of the training state. Raises CheckpointError."""
        self._state().save(directory, self._steps_done)

    def load(self, directory: Path) -> None:
        """Restore exactly what `save` wrote, on as many ranks. Raises CheckpointError."""
        reshard(self._scorer)
        self._steps_done = self._state().load(directory)

    def export(self, directory: Path) -> None:
        """Write weights (as they are kept: float32, or float64) and configuration for `transformers`; rank 0 writes. Raises ModelError."""
        reshard(self._scorer)
        writes = self.coords.rank == 0
        weights: dict[str, Tensor] = {}
        for name, tensor in self._model.state_dict().items():
            whole = full(tensor.detach()).cpu()
            if writes:
                weights[name] = whole
        if not writes:
            return
        try:
            with quiet_progress():
                self._model.save_pretrained(directory, state_dict=weights)
        except OSError as error:
            raise ModelError(
                f"the model cannot be written to {directory}: {error}", remedy="Make room there or choose another place"
            ) from error

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full weights by name, one at a time, on CPU; a weight that is tied appears once, under its first name."""
        reshard(self._scorer)
        for name, parameter in self._model.named_parameters():
            yield name, full(parameter.detach()).cpu()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Full accumulated gradients by name, one at a time, on CPU; parameters without one are left out."""
        for name, parameter in self._parameters().items():
            if parameter.grad is not None:
                yield name, full(parameter.grad).cpu()

    def close(self) -> None:
        """Free model and optimizer."""
        for name in ("_model", "_scorer", "_optimizer"):
            self.__dict__.pop(name, None)
        if self.__dict__.get("_device", torch.device("cpu")).type == "cuda":
            torch.cuda.empty_cache()

    def _scores(self, micro_batch: MicroBatch, objective: Objective) -> dict[str, Tensor]:
        unknown = objective.needs - SCORES
        if unknown:
            raise UnsupportedError(
                f"the loss needs {', '.join(sorted(unknown))}, which the fsdp backend does not compute",
                remedy="Choose another loss or backend",
            )
        self._check_tokens(micro_batch)
        arguments = model_inputs(micro_batch)
        return self._scorer(  # type: ignore[no-any-return] # nn.Module.__call__ is untyped
            {name: self._moved(tensor) for name, tensor in arguments.inputs.items()},
            self._moved(arguments.positions),
            self._moved(micro_batch.labels),
            temperature=objective.temperature,
            entropy="entropy" in objective.needs,
            segments=arguments.segments,
        )

    def _check_tokens(self, micro_batch: MicroBatch) -> None:
        """Tokens outside the vocabulary would read foreign memory or end a CUDA context without a word."""
        for tokens in (micro_batch.inputs["input_ids"], micro_batch.labels):
            largest = int(tokens.max()) if tokens.numel() else 0
            if largest >= self._vocabulary:
                raise DataError(
                    f"a micro-batch holds token id {largest}, the model's vocabulary has {self._vocabulary}",
                    remedy="Use the tokenizer that belongs to the model",
                )

    def _moved(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by their Hugging Face names: those of decoder and head, tied ones once."""
        scored = {id(parameter) for parameter in self._scorer.parameters()}
        return {name: parameter for name, parameter in self._model.named_parameters() if id(parameter) in scored}

    def _state(self) -> TrainingState:
        reshard(self._scorer)
        persistent = self._model.state_dict(keep_vars=True)
        buffers = {name: tensor for name, tensor in self._model.named_buffers() if name in persistent}
        return TrainingState(self._parameters(), buffers, self._optimizer, self._device)
