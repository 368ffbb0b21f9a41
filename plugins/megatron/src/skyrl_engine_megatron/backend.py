"""The Megatron backend: a Hugging Face model's weights in megatron-core's GPTModel, over tensor-, pipeline- and data-parallel ranks."""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import (
    LOGPROBS_AT,
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
    RowKind,
    model_score,
)
from skyrl_engine.modeling.chunked_head import VOCABULARY_SCORES
from skyrl_engine.modeling.device_check import refuse_on_device
from skyrl_engine.modeling.device_memory import release_cached_memory
from skyrl_engine.modeling.embedding_noise import refuse_noise
from skyrl_engine.modeling.exporting import write_pretrained
from skyrl_engine.modeling.host_copies import HostCopies
from skyrl_engine.modeling.loading import weight_dtype
from skyrl_engine.modeling.lora import has_adapter_name
from skyrl_engine.modeling.micro_batch import gradient_not_finite
from skyrl_engine.modeling.optimizer import refuse_empty_groups, require_adamw
from skyrl_engine.modeling.teaching import COMPARED
from skyrl_engine.modeling.vocabulary_parallel_teaching import DividedTeacherStates
from skyrl_engine.modeling.weight_averages import AVERAGE
from skyrl_engine_megatron import checkpoint, kernels
from skyrl_engine_megatron.adapter_limits import refuse_dropout_in_trees
from skyrl_engine_megatron.adapters import adapter_entries, adapters_off, attach_adapters, merge, share_frozen
from skyrl_engine_megatron.agreement import check_agreement
from skyrl_engine_megatron.attention import DocumentAttention, attend_by
from skyrl_engine_megatron.building import build, let_first_layer_differentiate, transformer_config
from skyrl_engine_megatron.compiling import compile_decoders
from skyrl_engine_megatron.decoder import Decoder
from skyrl_engine_megatron.documents import RowShape
from skyrl_engine_megatron.experts import list_router_biases
from skyrl_engine_megatron.gradients import clip, list_non_finite, preserve_gradients, sum_over_ranks
from skyrl_engine_megatron.groups import groups
from skyrl_engine_megatron.heads import add_value_head, value_head_entries
from skyrl_engine_megatron.kept_states import KeptStates
from skyrl_engine_megatron.library import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    RotaryEmbedding,
    ignore_own_deprecations,
    parallel_random,
)
from skyrl_engine_megatron.limits import refuse_trees
from skyrl_engine_megatron.loading import ReadModel, distribute, read
from skyrl_engine_megatron.names import entries, freeze_entries, own_parameters
from skyrl_engine_megatron.options import MegatronConfig
from skyrl_engine_megatron.pipeline import Pipeline
from skyrl_engine_megatron.router import BiasSteps, RouterLosses
from skyrl_engine_megatron.state import ShardedState, freeze

_COMPUTE = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronBackend:
    """`contracts.backend.Backend` over megatron-core. The default process group must exist before `setup`."""

    coords: RankCoords
    _learned: list[DistributedDataParallel]

    def __init__(self, config: MegatronConfig) -> None:
        self._config = config
        self.coords = RankCoords()
        self._learned = []
        self._holds_groups = False

    def setup(self, model: ModelConfig, optimizer: OptimizerSettings | None, environment: RankEnvironment) -> None:
        """Read, divide and place the model. Raises ModelError, or UnsupportedError for what it cannot be built or divided into."""
        refuse_on_device(model, environment.device, environment.rows)
        self.take(model, optimizer, environment)

    def adapter_set(self, lora: LoraConfig, optimizer: OptimizerSettings, seed: int) -> "MegatronBackend":
        """Set up a further product over the frozen weights of this one. Raises ModelError, and UnsupportedError for what cannot be shared."""
        other = type(self)(self._config)
        other.take(evolve(self._spec, lora=lora), optimizer, evolve(self._environment, seed=seed), self._pipeline.pieces)
        return other

    def take(
        self,
        model: ModelConfig,
        optimizer: OptimizerSettings | None,
        environment: RankEnvironment,
        shared: Sequence[Decoder] | None = None,
    ) -> None:
        """Set up as `setup` does, over the frozen weights of the pieces `shared` of the same model where there are some."""
        optimizer = require_adamw(optimizer, "megatron", groups=True)
        self._topology = topology = self._config.topology(environment.world_size)
        self.coords = topology.coords(environment.rank)
        self._device = torch.device(environment.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._settings, self._spec, self._environment = optimizer, model, environment
        self._computes = (*VOCABULARY_SCORES, LOGPROBS_AT, *COMPARED, *(("values",) if model.value_head else ()))
        self._steps_done = 0
        self._host_copies = HostCopies()
        self._source = read(model, self._config, environment.seed, beside=shared is not None)
        first_of_process = groups.take(topology, self._config.virtual_pipeline, self._config.expert_parallel)
        self._holds_groups = True
        if self._device.type == "cuda" and first_of_process:
            # seeding anew would change what a model beside this one draws
            parallel_random.model_parallel_cuda_manual_seed(environment.seed)
        try:
            with self._runtime():
                replicas = topology.dp * topology.cp
                self._place(model, self._source, optimizer, environment.rows, shared, replicas=replicas)
        except BaseException:
            self.close()
            raise

    def _place(
        self,
        model: ModelConfig,
        source: ReadModel,
        optimizer: AdamWSettings | None,
        rows: RowKind,
        shared: Sequence[Decoder] | None,
        *,
        replicas: int,
    ) -> None:
        compute = _COMPUTE[model.dtype]
        config = transformer_config(
            source.architecture,
            self._config,
            compute,
            recompute=model.activation_checkpointing,
            cpu=self._device.type == "cpu",
        )
        if rows == "tree":
            refuse_trees(self._config)
            refuse_noise(model)
            refuse_dropout_in_trees(model)
            attention: Any = attend_by("sdpa" if model.attention == "auto" else model.attention)
        elif model.attention != "auto":
            attention = attend_by(model.attention)
        elif not source.architecture.plain_attention:
            attention = DocumentAttention
        else:
            attention = kernels.choose_core_attention(self._config, config, self._device)
        decoders = build(source.architecture, config, self._config, attention)
        if model.value_head and decoders[-1].post_process:
            add_value_head(decoders[-1], model)
        if model.compile:
            compile_decoders(decoders, model.path)
        base = entries(source.architecture, self._config)
        trained = value_head_entries(model, source.architecture.hidden, stage=self._config.pipeline_parallel - 1)
        if source.adapters is None:
            trained = (*base, *trained)
        else:
            trained = (*adapter_entries(source.adapters, base, model.path), *trained)
            attach_adapters(decoders, source.adapters, base)
            if shared is not None:
                share_frozen(decoders, shared)
        trained = freeze_entries(trained, model.freeze, tied=source.architecture.tied)
        parameters = own_parameters(decoders)
        if optimizer is not None:
            refuse_empty_groups([name for entry in trained for name in entry.trainable_names], optimizer.groups)
            freeze(trained, parameters)
            if source.adapters is not None or model.freeze:
                let_first_layer_differentiate(decoders)
        sharded = self._config.distributed_optimizer and replicas > 1 and optimizer is not None
        if optimizer is not None:
            # A micro-batch without an image gives the vision tower no gradient, for which overlapped sums would wait.
            settings = DistributedDataParallelConfig(
                grad_reduce_in_fp32=compute == torch.bfloat16, use_distributed_optimizer=sharded, overlap_grad_reduce=False
            )
            self._learned = [DistributedDataParallel(config, settings, decoder) for decoder in decoders]
        self._frozen = None
        if source.adapters is not None:
            frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
            parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
            self._frozen = ShardedState(base, frozen, dtype=compute, optimizer=None)
        self._state = ShardedState(
            trained,
            parameters,
            dtype=compute,
            optimizer=optimizer,
            sharded_over=self._learned if sharded else (),
            exact=source.adapters is not None,
        )
        self._bias_steps = BiasSteps(self._config.router_bias_rate, list_router_biases(decoders))
        self._models: list[Any] = [*self._learned] or [*decoders]
        self._pipeline = Pipeline(
            self._models,
            decoders,
            stages=self._config.pipeline_parallel,
            shape=RowShape(self._config.tensor_parallel, self._config.context_parallel),
            sees=source.architecture.vision.tokens if source.architecture.vision is not None else None,
            vocabulary=source.architecture.vocabulary,
            longest_row=source.architecture.longest_row,
            logits_per_chunk=model.logits_per_chunk,
            device=self._device,
            kernels=not issubclass(attention, DocumentAttention),
            router=RouterLosses.of(self._config, source.architecture.mixture),
            bias_steps=self._bias_steps,
            dropout_seed=self._environment.seed if model.lora is not None and model.lora.dropout else None,
        )
        distribute(source, self._state, self._device, weight_dtype(model.dtype))
        if shared is None:
            if self._frozen is not None:
                distribute(source, self._frozen, self._device, weight_dtype(model.dtype))
            check_agreement(self._pipeline, source, model.path, model.dtype)
        if source.model is not None:
            # without its weights it is kept as the template for exports
            source.model.to("meta")

    @contextmanager
    def _runtime(self) -> Iterator[None]:
        """Run megatron-core inside this context: without its own deprecation warnings, and with stand-ins for CUDA on a CPU rank."""
        with ignore_own_deprecations():
            if self._device.type == "cuda":
                yield
                return
            from skyrl_engine_megatron.cpu import without_cuda

            with without_cuda(self._device):
                yield

    @torch.no_grad()
    def forward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score without gradients, in evaluation mode."""
        return self._run(batch, objective, learn=False)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Score with the base model alone."""
        return adapters_off(self._pipeline.pieces)

    @contextmanager
    def teaching(self, micro_batch: MicroBatch) -> Iterator[DividedTeacherStates | None]:
        """Give, on the last stage, this model's hidden states at the positions of a micro-batch, and this rank's part of its head."""
        keep = KeptStates()
        for model in self._models:
            model.eval()
        with self._runtime(), torch.no_grad():
            self._pipeline.run([evolve(micro_batch, noise=None, teacher=None)], keep, learn=False)
        yield None if keep.states is None else self._pipeline.pieces[-1].teach(keep.states)

    def forward_backward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score, differentiate and accumulate gradients on this rank; `optim_step` and `gradients` sum them over ranks."""
        assert self._learned, "forward_backward on a backend that was set up for scoring only"
        return self._run(batch, objective, learn=True)

    def _run(self, batch: RankBatch, objective: Objective, *, learn: bool) -> RankOutput:
        unknown = {need for need in objective.needs if model_score(need) not in self._computes}
        if unknown:
            raise UnsupportedError(
                f"the loss needs {', '.join(sorted(unknown))}, which the megatron backend does not compute",
                remedy="Choose another loss or backend",
            )
        for model in self._models:
            model.train(learn)
        with self._runtime():
            return RankOutput.concat(self._pipeline.run(batch, objective, learn=learn, steps_done=self._steps_done), self.coords)

    def optim_step(self, settings: OptimizerSettings | None = None) -> OptimStep:
        """Sum over ranks, clip, step with `settings` (None: those of `setup`), clear the gradients.

        Raises ModelError if the gradient is not finite: weights and optimizer then stay as the previous step left them, and the gradient
        is cleared.
        """
        settings = settings or self._settings
        assert settings is not None, "optim_step on a backend that was set up for scoring only"
        with self._runtime():
            sum_over_ranks(self._learned)
            norm = clip(self._state, settings.max_grad_norm)
            # also true for NaN; every rank sees the same norm, so all ranks raise
            if not norm < float("inf"):
                error = gradient_not_finite(self._steps_done + 1, norm, self.coords.rank, list_non_finite(self._state))
                self.zero_grad()
                raise error
            self._state.step(settings)
            self._bias_steps.step()
            if self._state.sharded:
                for model in self._learned:
                    model.start_param_sync(force_sync=True)
            self.zero_grad()
        self._steps_done += 1
        return OptimStep(grad_norm=norm, learning_rate=settings.learning_rate)

    def zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        self._bias_steps.clear()
        for model in self._learned:
            model.zero_grad_buffer()

    def save(self, directory: Path) -> None:
        """Write the training state of this rank's pipeline stage. Raises CheckpointError."""
        checkpoint.save(self._state, directory, self._topology, self.coords, self._steps_done)

    def stage_save(self, directory: Path) -> Callable[[], Collection[str]]:
        """Copy to host memory what `save` would write of this rank's parts; return what writes it."""
        write = checkpoint.stage(self._state, directory, self._topology, self.coords, self._steps_done, self._host_copies.copy)
        self._host_copies.wait(self._device)
        return write

    def load(self, directory: Path) -> None:
        """Restore exactly what `save` wrote under any layout of ranks, and clear the gradient. Raises CheckpointError."""
        self._steps_done = checkpoint.load(self._state, directory, self.coords)
        self.zero_grad()

    def load_averages(self, directory: Path) -> None:
        """Restore the averages of weights in place of the weights, under any layout of ranks. Raises CheckpointError."""
        checkpoint.load(self._state, directory, self.coords, weight=AVERAGE)

    def export(self, directory: Path) -> None:
        """Write weights, rounded to the precision that the run computes in, and configuration for `transformers`, on rank 0.

        A model with adapters is written as its adapters alone, for `peft`. Raises ModelError.
        """
        adapters = self._state.everywhere(lambda piece: piece.master)
        buffers = () if self._config.router_bias_rate else self._buffers()
        whole = chain(self.weights(), buffers) if self._frozen is None else adapters
        weights = {name: tensor for name, tensor in whole if self._source.model is not None}
        if self._source.model is None:
            return
        write_pretrained(self._source.model, directory, weights, precision=self._spec.dtype)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights by Hugging Face name, one at a time, on the CPU, adapters merged; a tied weight appears once, under its first
        name. Biases of routers are among them where steps move them.
        """
        trained = self._state.everywhere(lambda piece: piece.master)
        if self._frozen is None:
            yield from trained
            if self._config.router_bias_rate:
                yield from self._buffers()
            return
        assert self._source.adapters is not None
        values = dict(trained)
        for name, weight in self._frozen.everywhere(lambda piece: piece.master):
            yield name, merge(name, weight, self._source.adapters, values)
        yield from ((name, value) for name, value in values.items() if not has_adapter_name(name))

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self._state.everywhere(lambda piece: piece.master, kind="buffers")

    def weights_in(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield them rounded to `dtype`; that of the computation has rounded them already. With adapters, what they are merged into is."""
        if self._frozen is None and dtype == _COMPUTE[self._spec.dtype]:
            yield from self._state.everywhere(None, dtype=dtype)
        else:
            yield from ((name, weight.to(dtype)) for name, weight in self.weights())

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full accumulated gradients by name, one at a time, on the CPU. Accumulation can go on: it is restored after the sums."""
        with preserve_gradients(self._learned):
            with self._runtime():
                sum_over_ranks(self._learned)
            yield from self._state.everywhere(lambda piece: piece.gradient, kind="learned")

    def close(self) -> None:
        """Free model and optimizer and, with the last model of the process, megatron-core's process groups."""
        self._learned = []
        for name in ("_models", "_pipeline", "_state", "_frozen", "_source", "_bias_steps", "_host_copies"):
            self.__dict__.pop(name, None)
        if self._holds_groups:
            # Its modules are held by each other and by a cache of embeddings, and hold the threads and sockets of their groups.
            RotaryEmbedding.forward.cache_clear()
            gc.collect()
            groups.give_back()
            self._holds_groups = False
        release_cached_memory(self.__dict__.get("_device", "cpu"))
