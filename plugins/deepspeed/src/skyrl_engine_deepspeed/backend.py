"""The DeepSpeed backend: a Hugging Face causal language model under ZeRO stages 0 to 3 that scores, learns and saves."""

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_engine.contracts import (
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
from skyrl_engine.modeling.device_check import refuse_on_device
from skyrl_engine.modeling.device_memory import release_cached_memory
from skyrl_engine.modeling.exporting import collect_export_tensors, write_pretrained
from skyrl_engine.modeling.four_bit import refuse_four_bit_layers
from skyrl_engine.modeling.host_copies import HostCopies
from skyrl_engine.modeling.host_threads import share_cores
from skyrl_engine.modeling.lora import adapters_off, iterate_merged_weights
from skyrl_engine.modeling.micro_batch import compute_hidden_states, differentiable, gradient_not_finite, score
from skyrl_engine.modeling.optimizer import require_adamw, use_settings
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.teaching import TeacherStates
from skyrl_engine.modeling.weight_averages import WeightAverages
from skyrl_engine_deepspeed.checkpoint import ZeroState
from skyrl_engine_deepspeed.fragments import flats
from skyrl_engine_deepspeed.gradients import AccumulatedGradients
from skyrl_engine_deepspeed.library import set_local_rank
from skyrl_engine_deepspeed.loading import Loaded, load
from skyrl_engine_deepspeed.options import DeepSpeedConfig
from skyrl_engine_deepspeed.settings import refuse_unsupported


class DeepSpeedBackend:
    """`contracts.backend.Backend` over `deepspeed.initialize`. The default process group must exist before `setup`.

    A backend that only scores has nothing to divide below stage 3: it keeps the plain model and does not use DeepSpeed.
    """

    coords: RankCoords
    _loaded: Loaded
    _gradients: AccumulatedGradients | None

    def __init__(self, config: DeepSpeedConfig) -> None:
        self._config = config
        self.coords = RankCoords()
        self._environ = ExitStack()

    def setup(self, model: ModelConfig, optimizer: OptimizerSettings | None, environment: RankEnvironment) -> None:
        """Load the model, divide it over all ranks and make the optimizer. Raises ModelError, UnsupportedError."""
        optimizer = require_adamw(optimizer, "deepspeed")
        self.coords = RankCoords(rank=environment.rank, dp=environment.rank)
        self._device = torch.device(environment.device)
        refuse_on_device(model, environment.device, environment.rows)
        refuse_four_bit_layers(model, "deepspeed")
        refuse_unsupported(self._config, model.dtype, self._device, learns=optimizer is not None)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            if self._config.offload_optimizer and optimizer is not None:
                share_cores()
        self._settings = optimizer
        self._dtype, self._seed = model.dtype, environment.seed
        self._in_bfloat16: Scorer | None = None
        with ExitStack() as environ:
            environ.enter_context(set_local_rank(self._device))
            self._loaded = load(model, optimizer, self._config, self._device, environment.seed)
            self._loaded.scorer.refuse_rows_unless_supported(environment.rows)
            self._gradients = AccumulatedGradients(self._loaded.engine) if optimizer is not None else None
            self._averages = WeightAverages(None if optimizer is None else optimizer.ema_decay)
            self._steps_done = 0
            self._host_copies = HostCopies()
            self._environ = environ.pop_all()

    @torch.no_grad()
    def forward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score without gradients, in evaluation mode."""
        self._loaded.scorer.eval()
        parts = [objective(self._scores(micro_batch, objective), micro_batch)[1] for micro_batch in batch]
        return RankOutput.concat(parts, self.coords)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Score with the base model alone."""
        return adapters_off(self._loaded.model)

    @contextmanager
    def teaching(self, micro_batch: MicroBatch) -> Iterator[TeacherStates]:
        """Give this model's hidden states at the positions of a micro-batch, and its head, whole until the context is left."""
        scorer = self._loaded.scorer if self._loaded.engine else self._plain_scorer()
        call = self._loaded.engine or scorer
        hidden_NH = compute_hidden_states(
            call, scorer, micro_batch, vocabulary=self._loaded.vocabulary, device=self._device, images=scorer.images
        )
        # gathered after the forward pass, which releases a weight that it shares with the embedding
        with self._whole_head(scorer):
            yield TeacherStates.of(scorer.head, hidden_NH)

    def forward_backward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score, differentiate and accumulate gradients on this rank; `optim_step` and `gradients` sum them over ranks."""
        assert self._gradients is not None, "forward_backward on a backend that was set up for scoring only"
        self._loaded.scorer.train()
        parts = []
        for micro_batch in batch:
            scores = self._scores(micro_batch, objective)
            total, output = objective(scores, micro_batch)
            self._gradients.backward(differentiable(total, scores))
            parts.append(output)
        return RankOutput.concat(parts, self.coords)

    def optim_step(self, settings: OptimizerSettings | None = None) -> OptimStep:
        """Clip, step with `settings` (None: those of `setup`), clear the gradients.

        Raises ModelError if the gradient is not finite: weights and optimizer then stay as the previous step left them, and the gradient
        is cleared.
        """
        settings = settings or self._settings
        assert self._gradients is not None, "optim_step on a backend that was set up for scoring only"
        assert settings is not None
        engine: Any = self._loaded.engine
        norm = 0.0
        if self._gradients.any:
            self._gradients.reduce()
            norm = self._gradients.norm()
            if not norm < float("inf"):  # also true for NaN; every rank sees the same norm and stops alike
                names = self._gradients.non_finite(self._loaded.parameters)
                self._gradients.drop()
                raise gradient_not_finite(self._steps_done + 1, norm, self.coords.rank, names)
            use_settings(engine.basic_optimizer, settings)
            self._gradients.clip(norm, settings.max_grad_norm)
            engine.step()
            self._gradients.clear()
        self._averages.update(flats(engine))
        self._steps_done += 1
        return OptimStep(grad_norm=norm, learning_rate=settings.learning_rate)

    def zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        if self._gradients is not None:
            self._gradients.clear()

    def save(self, directory: Path) -> None:
        """Write this rank's part of the training state. Raises CheckpointError."""
        self._state().save(directory, self._steps_done)

    def stage_save(self, directory: Path) -> Callable[[], Collection[str]]:
        """Copy to host memory what `save` would write; return what writes it."""
        write = self._state().stage(directory, self._steps_done, self._host_copies.copy)
        self._host_copies.wait(self._device)
        return write

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote on any number of ranks; random states only on the same number. Raises CheckpointError."""
        self._steps_done = self._state().load(directory)
        self._in_bfloat16 = None
        self.zero_grad()

    def load_averages(self, directory: Path) -> None:
        """Restore the averages of weights. Raises CheckpointError."""
        self._state().load_averages(directory)
        self._in_bfloat16 = None

    def export(self, directory: Path) -> None:
        """Write weights, rounded to the precision that the run computes in, and configuration for `transformers`, or adapters for `peft`.

        Rank 0 writes. Raises ModelError.
        """
        writes = self.coords.rank == 0
        model = self._loaded.model
        # by the tensor's id: a parameter that several names share is gathered once
        whole: dict[int, Tensor] = {}
        weights: dict[str, Tensor] = {}
        for name, tensor in collect_export_tensors(model).items():
            if id(tensor) not in whole:
                value = self._on_cpu(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach().cpu()
                whole[id(tensor)] = value if writes else torch.empty(0)
            weights[name] = whole[id(tensor)]
        if writes:
            write_pretrained(model, directory, weights, precision=self._dtype)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights by name, one at a time, on the CPU; a tied weight appears once, under its first name."""
        yield from iterate_merged_weights(self._loaded.model, self._on_cpu)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full accumulated gradients by name, one at a time, on the CPU; zeros for a parameter that no gradient has reached."""
        if self._gradients is not None:
            yield from self._gradients.whole(self._loaded.parameters)

    def close(self) -> None:
        """Free model and optimizer."""
        loaded = self.__dict__.pop("_loaded", None)
        for name in ("_gradients", "_in_bfloat16", "_averages", "_host_copies"):
            self.__dict__.pop(name, None)
        if loaded is None:
            return
        if loaded.engine is not None:
            loaded.engine.destroy()
        del loaded
        release_cached_memory(self._device)
        self._environ.close()

    def _scores(self, micro_batch: MicroBatch, objective: Objective) -> dict[str, Tensor]:
        return score(
            self._loaded.engine or self._plain_scorer(),
            micro_batch,
            objective,
            computes=self._loaded.scorer.computes,
            vocabulary=self._loaded.vocabulary,
            device=self._device,
            backend="deepspeed",
            images=self._loaded.scorer.images,
            one_row=self._loaded.scorer.one_row,
        )

    def _plain_scorer(self) -> Scorer:
        """Return the scorer of a backend without an engine; for bfloat16 a rounded copy, unless it is rounded already."""
        if self._dtype != "bfloat16" or all(weight.dtype == torch.bfloat16 for weight in self._loaded.scorer.parameters()):
            return self._loaded.scorer
        if self._in_bfloat16 is None:
            self._in_bfloat16 = copy.deepcopy(self._loaded.scorer)
            for parameter in self._in_bfloat16.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        return self._in_bfloat16

    def _whole_head(self, scorer: Scorer) -> AbstractContextManager[Any]:
        """Gather the head's weights on every rank, where stage 3 divides them, until the context is left."""
        if self._loaded.engine is None:
            return nullcontext()
        import deepspeed

        gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(scorer.head.linear.parameters()))
        return gathered

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole weight on every rank: the float32 copy of a trained parameter, else the weight in the compute precision."""
        if self._loaded.engine is None or self._config.zero_stage == 0:
            return parameter
        import deepspeed

        if self._gradients is not None and parameter.requires_grad:
            whole: Tensor | None = deepspeed.utils.safe_get_full_fp32_param(parameter)
            return parameter if whole is None else whole
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def _on_cpu(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole weight in float32 on every rank's CPU."""
        return self._whole(parameter).detach().float().cpu()

    def _state(self) -> ZeroState:
        persistent = self._loaded.model.state_dict(keep_vars=True)
        buffers = {name: tensor for name, tensor in self._loaded.model.named_buffers() if name in persistent}
        return ZeroState(
            self._loaded.engine,
            self._loaded.parameters,
            self._loaded.frozen,
            buffers,
            self._averages,
            self._device,
            self.coords,
            self._seed,
        )
