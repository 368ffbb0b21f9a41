"""The Megatron backend: a Hugging Face model's weights in megatron-core's GPTModel, over tensor-, pipeline- and data-parallel ranks."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import (
    LOGPROBS_AT,
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
from skyrl_engine.modeling.exporting import write_pretrained
from skyrl_engine.modeling.loading import weight_dtype
from skyrl_engine.modeling.micro_batch import gradient_not_finite
from skyrl_engine.modeling.optimizer import require_adamw
from skyrl_engine.modeling.weight_averages import AVERAGE
from skyrl_engine_megatron import checkpoint, kernels
from skyrl_engine_megatron.agreement import check_agreement
from skyrl_engine_megatron.attention import DocumentAttention, attend_by
from skyrl_engine_megatron.building import build, transformer_config
from skyrl_engine_megatron.compiling import compile_decoders
from skyrl_engine_megatron.documents import RowShape
from skyrl_engine_megatron.gradients import clip, list_non_finite, preserve_gradients, sum_over_ranks
from skyrl_engine_megatron.groups import groups
from skyrl_engine_megatron.library import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    RotaryEmbedding,
    ignore_own_deprecations,
    parallel_random,
)
from skyrl_engine_megatron.limits import refuse_trees
from skyrl_engine_megatron.loading import ReadModel, distribute, read
from skyrl_engine_megatron.names import entries, own_parameters
from skyrl_engine_megatron.options import MegatronConfig
from skyrl_engine_megatron.pipeline import Pipeline
from skyrl_engine_megatron.router import RouterLosses
from skyrl_engine_megatron.state import ShardedState, list_sharded_pieces, whole_pieces

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
        optimizer = require_adamw(optimizer, "megatron")
        topology = self._config.topology(environment.world_size)
        self.coords = topology.coords(environment.rank)
        self._device = torch.device(environment.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        refuse_on_device(model, environment.device, environment.rows)
        self._settings, self._precision = optimizer, model.dtype
        self._steps_done = 0
        self._source = read(model, self._config)
        groups.take(topology, self._config.virtual_pipeline)
        self._holds_groups = True
        if self._device.type == "cuda":
            parallel_random.model_parallel_cuda_manual_seed(environment.seed)
        try:
            with self._runtime():
                self._place(model, self._source, optimizer, environment.rows, replicas=topology.dp * topology.cp)
        except BaseException:
            self.close()
            raise

    def _place(
        self, model: ModelConfig, source: ReadModel, optimizer: OptimizerSettings | None, rows: RowKind, *, replicas: int
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
            attention: Any = attend_by("sdpa" if model.attention == "auto" else model.attention)
        elif model.attention != "auto":
            attention = attend_by(model.attention)
        else:
            attention = kernels.choose_core_attention(self._config, config, self._device)
        decoders = build(source.architecture, config, self._config, attention)
        if model.compile:
            compile_decoders(decoders, model.path)
        sharded = self._config.distributed_optimizer and replicas > 1 and optimizer is not None
        if optimizer is not None:
            # A micro-batch without an image gives the vision tower no gradient, for which overlapped sums would wait.
            settings = DistributedDataParallelConfig(
                grad_reduce_in_fp32=compute == torch.bfloat16, use_distributed_optimizer=sharded, overlap_grad_reduce=False
            )
            self._learned = [DistributedDataParallel(config, settings, decoder) for decoder in decoders]
        parameters = own_parameters(decoders)
        self._state = ShardedState(
            entries(source.architecture, self._config),
            parameters,
            list_sharded_pieces(parameters, self._learned) if sharded else whole_pieces(parameters),
            sharded=sharded,
            optimizer=optimizer,
        )
        self._models: list[Any] = [*self._learned] or [*decoders]
        self._pipeline = Pipeline(
            self._models,
            decoders,
            stages=self._config.pipeline_parallel,
            shape=RowShape(self._config.tensor_parallel, self._config.context_parallel),
            sees=source.architecture.vision.tokens if source.architecture.vision is not None else None,
            vocabulary=source.architecture.vocabulary,
            logits_per_chunk=model.logits_per_chunk,
            device=self._device,
            kernels=not issubclass(attention, DocumentAttention),
            router=RouterLosses.of(self._config, source.architecture.layers),
        )
        distribute(source, self._state, self._device, weight_dtype(model.dtype))
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

    def forward_backward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score, differentiate and accumulate gradients on this rank; `optim_step` and `gradients` sum them over ranks."""
        assert self._learned, "forward_backward on a backend that was set up for scoring only"
        return self._run(batch, objective, learn=True)

    def _run(self, batch: RankBatch, objective: Objective, *, learn: bool) -> RankOutput:
        unknown = {need for need in objective.needs if model_score(need) not in (*VOCABULARY_SCORES, LOGPROBS_AT)}
        if unknown:
            raise UnsupportedError(
                f"the loss needs {', '.join(sorted(unknown))}, which the megatron backend does not compute",
                remedy="Choose another loss or backend",
            )
        for model in self._models:
            model.train(learn)
        with self._runtime():
            return RankOutput.concat(self._pipeline.run(batch, objective, learn=learn), self.coords)

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
            if self._state.sharded:
                for model in self._learned:
                    model.start_param_sync(force_sync=True)
            self.zero_grad()
        self._steps_done += 1
        return OptimStep(grad_norm=norm, learning_rate=settings.learning_rate)

    def zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        for model in self._learned:
            model.zero_grad_buffer()

    def save(self, directory: Path) -> None:
        """Write the training state of this rank's pipeline stage. Raises CheckpointError."""
        checkpoint.save(self._state, directory, self.coords, self._steps_done)

    def load(self, directory: Path) -> None:
        """Restore exactly what `save` wrote under any layout of ranks, and clear the gradient. Raises CheckpointError."""
        self._steps_done = checkpoint.load(self._state, directory, self.coords)
        self.zero_grad()

    def load_averages(self, directory: Path) -> None:
        """Restore the averages of weights in place of the weights, under any layout of ranks. Raises CheckpointError."""
        checkpoint.load(self._state, directory, self.coords, weight=AVERAGE)

    def export(self, directory: Path) -> None:
        """Write weights, rounded to the precision that the run computes in, and configuration for `transformers`, on rank 0.

        Raises ModelError.
        """
        weights = {name: tensor for name, tensor in self.weights() if self._source.model is not None}
        if self._source.model is None:
            return
        write_pretrained(self._source.model, directory, weights, precision=self._precision)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights by Hugging Face name, one at a time, on the CPU; a tied weight appears once, under its first name."""
        yield from self._state.everywhere(lambda piece: piece.master)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full accumulated gradients by name, one at a time, on the CPU. Accumulation can go on: it is restored after the sums."""
        with preserve_gradients(self._learned):
            with self._runtime():
                sum_over_ranks(self._learned)
            yield from self._state.everywhere(lambda piece: piece.gradient)

    def close(self) -> None:
        """Free model and optimizer and, with the last model of the process, megatron-core's process groups."""
        self._learned = []
        for name in ("_models", "_pipeline", "_state", "_source"):
            self.__dict__.pop(name, None)
        if self._holds_groups:
            # Its modules are held by each other and by a cache of embeddings, and hold the threads and sockets of their groups.
            RotaryEmbedding.forward.cache_clear()
            gc.collect()
            groups.give_back()
            self._holds_groups = False
        release_cached_memory(self.__dict__.get("_device", "cpu"))
