"""The FSDP2 backend: a Hugging Face causal language model sharded over data-parallel ranks that scores, learns and saves."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import (
    AdamWSettings,
    LoraConfig,
    MicroBatch,
    ModelConfig,
    Objective,
    OptimizerSettings,
    OptimStep,
    RankBatch,
    RankCoords,
    RankEnvironment,
    RankOutput,
)
from skyrl_engine.modeling import random_states
from skyrl_engine.modeling.device_check import refuse_on_device
from skyrl_engine.modeling.device_memory import Moved, move_back, move_optimizer_state, release_cached_memory
from skyrl_engine.modeling.exporting import collect_export_tensors, write_pretrained
from skyrl_engine.modeling.host_copies import HostCopies
from skyrl_engine.modeling.host_threads import share_cores
from skyrl_engine.modeling.lora import adapters_off, has_adapters, iterate_merged_weights
from skyrl_engine.modeling.micro_batch import compute_hidden_states, differentiable, gradient_not_finite, score
from skyrl_engine.modeling.optimizer import build_optimizer, refuse_empty_groups, use_settings
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.teaching import TeacherStates
from skyrl_engine.modeling.weight_averages import WeightAverages
from skyrl_engine_fsdp.checkpoint import ShardedTrainingState
from skyrl_engine_fsdp.context_limits import name_division
from skyrl_engine_fsdp.float8 import refuse_device, refuse_float8
from skyrl_engine_fsdp.gradients import clip_gradients, full, non_finite
from skyrl_engine_fsdp.meshes import Meshes
from skyrl_engine_fsdp.options import WHOLE_ROWS, FsdpConfig
from skyrl_engine_fsdp.placement import load_beside_sharded, load_sharded
from skyrl_engine_fsdp.sharding import (
    drop_partial_sums,
    hold_in_bfloat16,
    refuse_stochastic_rounding,
    require_whole_sums,
    reshard,
    stays_whole,
    sum_gradients_of,
)
from skyrl_engine_fsdp.vocabulary import VocabularyParallelHead

WRITE_TIMEOUT: Final = timedelta(hours=12)
"""The longest that ranks wait for the one that writes its part of a checkpoint last; one that died is noticed at once."""


class FsdpBackend:
    """`contracts.backend.Backend` over `fully_shard`. The default process group must exist before `setup`."""

    coords: RankCoords
    # a transformers.PreTrainedModel that shares its modules with the scorer
    _model: Any
    _scorer: Scorer
    _optimizer: torch.optim.Optimizer | None
    _device: torch.device
    _draws: Callable[[], AbstractContextManager[None]]

    def __init__(self, config: FsdpConfig) -> None:
        self._config = config
        self.coords = RankCoords()

    def setup(self, model: ModelConfig, optimizer: OptimizerSettings | None, environment: RankEnvironment) -> None:
        """Load the model, divide it over tensor-parallel ranks, shard it over data-parallel ranks, and make the optimizer.

        Raises ModelError, and UnsupportedError for a layout that the number of ranks, the model or the device does not allow.
        """
        topology = self._config.topology(environment.world_size)
        self._device = torch.device(environment.device)
        refuse_on_device(model, environment.device, environment.rows)
        if optimizer is not None and optimizer.use in WHOLE_ROWS and (topology.tp > 1 or self._config.cpu_offload):
            raise UnsupportedError(
                f"{optimizer.use} steps whole rows of weights on the ranks' devices, which tensor_parallel and cpu_offload do not leave there",
                remedy='Set optimizer.use = "adamw", or backend.tensor_parallel = 1 and backend.cpu_offload = false',
            )
        if optimizer is None and self._device.type == "cpu" and not self._config.float8_emulation:
            # a run on GPUs is being exported on CPUs: nothing is multiplied
            self._config = attrs.evolve(self._config, float8="off")
        refuse_float8(self._config, model)
        refuse_device(self._config, environment.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        elif self._config.cpu_offload:
            if optimizer is not None:
                raise UnsupportedError(
                    "backend.cpu_offload keeps in host memory what a GPU computes with, and this rank computes on the CPU",
                    remedy="Set backend.cpu_offload = false, or run on CUDA devices",
                )
            # a run on GPUs is being exported on CPUs: there is nothing to offload
            self._config = attrs.evolve(self._config, cpu_offload=False)
        meshes = Meshes.of(
            topology, replicate=self._config.replicate, device=self._device, expert_ranks=self._config.expert_parallel
        )
        rounds = isinstance(optimizer, AdamWSettings) and optimizer.stochastic_rounding
        if rounds:
            refuse_stochastic_rounding(model, self._config)
        loaded = load_sharded(model, meshes, self._device, self._config, environment.seed, learns=optimizer is not None)
        if rounds:
            hold_in_bfloat16(loaded[1])
        self.take(loaded, meshes, model, optimizer, environment)
        self._scorer.refuse_rows_unless_supported(environment.rows)
        if topology.cp > 1:
            self._scorer.refuse_divided_rows(name_division(self._config))
        # tensor-parallel ranks of one token must draw equal dropout masks
        if topology.tp > 1:
            random_states.reseed(environment.seed + self.coords.rank // topology.tp)
        if self._config.cpu_offload and optimizer is not None:
            share_cores()

    def take(
        self,
        loaded: tuple[Any, Scorer],
        meshes: Meshes,
        model: ModelConfig,
        optimizer: OptimizerSettings | None,
        environment: RankEnvironment,
        draws: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Go on with a model and its scorer in place on `meshes`, and make the optimizer.

        `draws` puts the random states in force from which it draws, where they are not the process's.
        """
        self._model, self._scorer = loaded
        self._meshes, self._spec, self._environment, self._draws = meshes, model, environment, draws
        self._device = torch.device(environment.device)
        self.coords = meshes.topology.coords(environment.rank)
        self._vocabulary = self._model.get_input_embeddings().weight.shape[0]
        self._settings = optimizer
        self._optimizer = None
        if optimizer is not None:
            refuse_empty_groups(self._parameters(), optimizer.groups)
            self._optimizer = build_optimizer(self._parameters(), optimizer, seed=environment.seed)
        self._averages = WeightAverages(None if optimizer is None else optimizer.ema_decay)
        self._steps_done = 0
        self._moved: Moved = ()
        self._host_copies = HostCopies()
        self._save_group: dist.ProcessGroup | None = None

    def adapter_set(self, lora: LoraConfig, optimizer: OptimizerSettings, seed: int) -> "FsdpBackend":
        """Set up a further product over the frozen weights of this one. Raises ModelError, and UnsupportedError for what cannot be shared."""
        spec, environment = attrs.evolve(self._spec, lora=lora), attrs.evolve(self._environment, seed=seed)
        loaded = load_beside_sharded(spec, self._model, self._scorer, self._meshes, self._device, self._config, seed)
        # tensor-parallel ranks of one token must draw equal dropout masks
        drawn = random_states.OwnRandomStates(seed + self.coords.rank // self._meshes.topology.tp, self._device)
        other = type(self)(self._config)
        other.take(loaded, self._meshes, spec, optimizer, environment, drawn.in_force)
        return other

    @torch.no_grad()
    def forward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score without gradients, in evaluation mode."""
        self._scorer.eval()
        parts = [objective(self._scores(micro_batch, objective), micro_batch)[1] for micro_batch in batch]
        reshard(self._scorer)
        return RankOutput.concat(parts, self.coords)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Score with the base model alone."""
        return adapters_off(self._model)

    @contextmanager
    def teaching(self, micro_batch: MicroBatch) -> Iterator[TeacherStates]:
        """Give this model's hidden states at the positions of a micro-batch, and its head, whole until the context is left."""
        hidden_NH = compute_hidden_states(
            self._scorer,
            self._scorer,
            micro_batch,
            vocabulary=self._vocabulary,
            device=self._device,
            images=self._scorer.images,
            context=self._meshes.context,
        )
        # the head is of the root's unit, which stays gathered after a forward pass without backward
        head = self._scorer.head
        yield head.teach(hidden_NH) if isinstance(head, VocabularyParallelHead) else TeacherStates.of(head, hidden_NH)
        reshard(self._scorer)

    def forward_backward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score, differentiate and accumulate gradients, which are summed over ranks when this returns.

        Copies of the model sum theirs with the last micro-batch alone, and so do the ranks of a copy with `gradient_sync = "pass"`.
        """
        self._scorer.train()
        parts = []
        with self._draws():
            for number, micro_batch in enumerate(batch, start=1):
                sum_gradients_of(self._scorer, self._config, last=number == len(batch))
                scores = self._scores(micro_batch, objective)
                total, output = objective(scores, micro_batch)
                torch.autograd.backward(differentiable(total, scores))
                parts.append(output)
        require_whole_sums(self._scorer)
        return RankOutput.concat(parts, self.coords)

    def optim_step(self, settings: OptimizerSettings | None = None) -> OptimStep:
        """Clip, step with `settings` (None: those of `setup`), clear the gradients.

        Raises ModelError if the gradient is not finite: weights and optimizer then stay as the previous step left them, and the gradient
        is cleared.
        """
        settings = settings or self._settings
        assert self._optimizer is not None, "optim_step on a backend that was set up for scoring only"
        assert settings is not None
        parameters = self._parameters()
        norm = clip_gradients(parameters.values(), settings.max_grad_norm, self._device)
        # also true for NaN; every rank sees the same norm, so all ranks raise
        if not norm < float("inf"):
            names = non_finite(parameters.items())
            self._optimizer.zero_grad(set_to_none=True)
            raise gradient_not_finite(self._steps_done + 1, norm, self.coords.rank, names)
        use_settings(self._optimizer, settings)
        self._optimizer.step()
        self._averages.update(parameters.values())
        self._optimizer.zero_grad(set_to_none=True)
        self._steps_done += 1
        return OptimStep(grad_norm=norm, learning_rate=settings.learning_rate)

    def zero_grad(self) -> None:
        """Drop the accumulated gradient, and what a failed pass gathered."""
        reshard(self._scorer)
        drop_partial_sums(self._scorer)
        for parameter in self._parameters().values():
            parameter.grad = None

    def save(self, directory: Path) -> None:
        """Write this rank's part of the training state. Raises CheckpointError."""
        with self._draws():
            self._state().save(directory, self._steps_done)

    def stage_save(self, directory: Path) -> Callable[[], Collection[str]]:
        """Copy to host memory what `save` would write; return what writes it."""
        if self._save_group is None:
            # a group of its own, so that its collectives never meet those of a pass
            self._save_group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        with self._draws():
            return self._state().stage(directory, self._steps_done, self._host_copies, self._save_group)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote on any layout of ranks, random states on the same one alone, and clear the gradient.

        Raises CheckpointError.
        """
        self.zero_grad()
        with self._draws():
            self._steps_done = self._state().load(directory)

    def load_averages(self, directory: Path) -> None:
        """Restore the averages of weights, and the weights that have none. Raises CheckpointError."""
        self._state().load_averages(directory)

    def export(self, directory: Path) -> None:
        """Write weights, rounded to the precision that the run computes in, and configuration for `transformers`, on rank 0.

        A model with adapters is written as its adapters alone, for `peft`. Raises ModelError.
        """
        reshard(self._scorer)
        writes = self.coords.rank == 0
        weights: dict[str, Tensor] = {}
        first_names: dict[int, str] = {}
        for name, tensor in collect_export_tensors(self._model).items():
            first = first_names.setdefault(id(tensor), name)
            # tied weights are one tensor, which is gathered once
            whole = full(tensor.detach()).cpu() if first == name else None
            if writes:
                weights[name] = weights[first] if whole is None else whole
        if writes:
            write_pretrained(self._model, directory, weights, precision=self._spec.dtype)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights by name, one at a time, on the CPU; a tied weight appears once, under its first name."""
        reshard(self._scorer)
        yield from iterate_merged_weights(self._model, lambda parameter: full(parameter.detach()).cpu())

    def weights_in(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield them rounded to `dtype`, each rank its part before it is gathered; with adapters, what they are merged into is rounded."""
        if has_adapters(self._model):
            yield from ((name, weight.to(dtype)) for name, weight in self.weights())
            return
        reshard(self._scorer)
        yield from ((name, full(parameter.detach().to(dtype)).cpu()) for name, parameter in self._model.named_parameters())

    def storage(self) -> dict[str, Tensor] | None:
        """Return parameters and buffers by name, tied ones under each; None if they are sharded, cast, moved or adapted to be used."""
        if not stays_whole(self._meshes.topology, self._spec.dtype, self._config) or has_adapters(self._model):
            return None
        named = [*self._model.named_parameters(remove_duplicate=False), *self._model.named_buffers(remove_duplicate=False)]
        return {name: tensor.detach() for name, tensor in named}

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full accumulated gradients by name, one at a time, on the CPU; parameters without a gradient are left out."""
        for name, parameter in self._parameters().items():
            if parameter.grad is not None:
                yield name, full(parameter.grad).cpu()

    def offload(self) -> None:
        """Move weights, gradients and the optimizer's state to host memory."""
        reshard(self._scorer)
        self._move("cpu")
        self._moved = move_optimizer_state(self._optimizer, self._device)
        self._averages.offload(self._device)
        release_cached_memory(self._device)

    def reload(self) -> None:
        """Move them back."""
        self._move(self._device)
        move_back(self._optimizer, self._moved, self._device)
        self._averages.reload(self._device)
        self._moved = ()

    def _move(self, device: torch.device | str) -> None:
        # the scorer is the unit that holds embeddings and head; the model may have modules that are not scored with
        self._scorer.to(device)
        self._model.to(device)

    def close(self) -> None:
        """Free model and optimizer."""
        group = self.__dict__.pop("_save_group", None)
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
        for name in ("_model", "_scorer", "_optimizer", "_averages", "_host_copies"):
            self.__dict__.pop(name, None)
        release_cached_memory(self.__dict__.get("_device", "cpu"))

    def _scores(self, micro_batch: MicroBatch, objective: Objective) -> dict[str, Tensor]:
        return score(
            self._scorer,
            micro_batch,
            objective,
            computes=self._scorer.computes,
            vocabulary=self._vocabulary,
            device=self._device,
            backend="fsdp",
            images=self._scorer.images,
            one_row=self._scorer.one_row,
            context=self._meshes.context,
        )

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters of decoder and heads by their Hugging Face names, tied ones once."""
        return {name: parameter for name, parameter in self._scored_parameters() if parameter.requires_grad}

    def _scored_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        scored = {id(parameter) for parameter in self._scorer.parameters()}
        return ((name, parameter) for name, parameter in self._model.named_parameters() if id(parameter) in scored)

    def _state(self) -> ShardedTrainingState:
        reshard(self._scorer)
        persistent = self._model.state_dict(keep_vars=True)
        buffers = {name: tensor for name, tensor in self._model.named_buffers() if name in persistent}
        topology, seed = self._meshes.topology, self._environment.seed
        # beside adapters the base model stays as it was read; else a checkpoint is a whole model, whatever is frozen
        saved = self._parameters() if has_adapters(self._model) else dict(self._scored_parameters())
        return ShardedTrainingState(saved, buffers, self._optimizer, self._averages, self._settings, self._device, topology, seed)
