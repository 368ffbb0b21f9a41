"""Backend: a model on this rank that can score, learn, save. It owes one promise: gradients are SUMS.

After any number of `forward_backward` calls, the gradient seen by `optim_step` equals the sum over all ranks, micro-batches and calls.
The import of this file needs no torch.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attrs import Factory, field, frozen
from attrs.validators import ge, instance_of

from skyrl_engine.contracts.kinds.optimizer_settings import OptimizerSettings
from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.contracts.values.outputs import RankOutput
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.contracts.values.prefixes import PrefixTree
from skyrl_engine.contracts.values.ragged import IntArray, Ragged
from skyrl_engine.contracts.values.returned import describe_returned, require_returned
from skyrl_engine.contracts.values.state_layout import StateLayout
from skyrl_engine.contracts.values.topology import RankCoords, Topology
from skyrl_engine.errors import ResultError

if TYPE_CHECKING:
    import torch

Capability = Literal[
    "padded",
    "packed",
    "tree",
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "vision",
    "router_replay",
    "value_head",
    "lora",
    "load_in_4bit",
    "logits",
    "logsumexp",
    "mean_logprob",
    "log_sum_squares",
    "logprobs_at",
    "divergence",
    "second_model",
    "reference_by_adapters",
    "adapter_sets",
    "sgd",
    "adamw_8bit",
    "adafactor",
    "lion",
    "muon",
    "parameter_groups",
    "freeze",
    "ema",
    "stochastic_rounding",
    "compile",
    "attention",
    "embedding_noise",
    "offload",
    "asynchronous_saves",
]
OPTIONAL_SCORES: tuple[Capability, ...] = ("logits", "logsumexp", "mean_logprob", "log_sum_squares", "logprobs_at")
"""Scores of the model that a backend may lack, each a capability of that name."""
PARALLEL_SIZES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "virtual_pipeline", "replicate")
"""Options by which backends divide the world among parallel dimensions, under these names in all of them; one rank alone has none."""


def refuse_no_model(_config: Any, _model: ModelConfig) -> None:
    """Refuse nothing: the backend takes whatever can be loaded."""


def refuse_no_device(_model: ModelConfig, _device: str) -> None:
    """Refuse nothing: the backend's options ask for nothing that a device may lack."""


def rehearse_nothing(_model: ModelConfig, _rows: RowKind) -> None:
    """Refuse nothing: what the backend cannot load shows when it is loaded."""


def hold_whole_state(_model: ModelConfig) -> StateLayout:
    """Return the layout of a backend whose ranks divide nothing but what their topology divides."""
    return StateLayout()


@frozen
class BackendDescription:
    """A backend as the controller knows it before torch is imported: its layout of ranks, and what it declares to support.

    `refuse_model` gets a model's `transformers` configuration and how it is to be trained, and raises UnsupportedError for what the backend
    does not build or its layout does not divide. Planning calls it before a rank starts, so it needs no torch; backends call it again when
    they load a model, for callers that did not plan. `rehearse` gets the same model and `RankEnvironment.rows`, and raises the
    ModelError or UnsupportedError of `setup` as far as that shows without weights and without a rank; it may import torch, on the controller,
    and is not asked about `packed` rows of a model whose `tree` rows it has not refused.
    Backends that load by `skyrl_engine.modeling` use `modeling.load_check.check_loading`. `means_over_step` declares terms inside the model
    that are means over an optimizer step, such as losses of routers: gradients of several mini-batches then do not add up to that of one.
    `describe_state` gets the model as it is to be trained, and says what each rank holds of its state. `layout_choices` are values of the
    backend's own options that lay out these ranks in other ways, by the option's name: sizes that divide the model, and parts that move off the
    device. `plan --fit` tries every combination of them, and leaves out those that the backend refuses.
    `refuse_device` gets the model and a rank's device ("cpu", "cuda:0"), and raises UnsupportedError for options that need another device or
    a package that is not there. Planning calls it where all ranks are on this machine; backends call it again in `setup`. It may import torch.
    `environment` are variables that ranks on CUDA devices have from their start, because CUDA reads them once; those that the controller's own
    environment sets keep its values.

    The capability `second_model` says that a further product of the plugin can be set up on the same ranks, with `optimizer=None`, and that
    neither changes what the other computes; `reference_by_adapters` that products are `SwitchesAdapters`; `adapter_sets` that products of a
    model with adapters are `HasAdapterSets`; `load_in_4bit` that they hold the linear layers under adapters in 4 bits where
    `LoraConfig.load_in_4bit` says so; `divergence` that products are `Teaches`, and that another one scores `top_1_agreement` and the needs
    of `contracts.kinds.needs.Divergence` with what they give; `sgd`, `adamw_8bit`, `adafactor`, `lion` and `muon` that products step by the
    settings of that name, as all do by `AdamWSettings`; `parameter_groups` that they take settings with groups; `freeze` that what
    `ModelConfig.freeze` names has no gradient, no moments and no part in the norm, and is whole in checkpoints and exports; `ema` that they
    take settings with `ema_decay` and are `KeepsAverages`; `compile` that products compile their layers where `ModelConfig.compile` says so,
    and compute the same up to rounding; `attention` that they attend by the kernel that `ModelConfig.attention` names, or refuse it;
    `embedding_noise` that they add `MicroBatch.noise`; `asynchronous_saves` that they are `StagesSaves`.
    """

    topology: Topology
    capabilities: frozenset[Capability]
    refuse_model: Callable[[Any, ModelConfig], None] = refuse_no_model
    rehearse: Callable[[ModelConfig, RowKind], None] = rehearse_nothing
    means_over_step: bool = False
    describe_state: Callable[[ModelConfig], StateLayout] = hold_whole_state
    layout_choices: Mapping[str, Sequence[Any]] = Factory(dict)
    environment: Mapping[str, str] = Factory(dict)
    refuse_device: Callable[[ModelConfig, str], None] = refuse_no_device


@frozen
class RankEnvironment:
    """One process of the world, its device ("cpu", "cuda:3") and the run's seed. The process group is already initialised.

    `rows` announces the form of rows: a model that would mix the sequences of a row is refused when it is loaded, not at the first such row.
    """

    rank: int
    world_size: int
    device: str
    seed: int
    rows: RowKind = "padded"


@frozen
class StepCounts:
    """The size of one optimizer step over all its ranks, micro-batches and calls: sequences of at least one token, and their tokens.

    Means over a step divide by these: of terms that are born inside a model's layers, where no reducer's weight reaches them.
    """

    sequences: int = field(validator=ge(0))
    tokens: int = field(validator=ge(0))


@frozen(eq=False)
class EmbeddingNoise:
    """Noise on the input embeddings of a micro-batch (NEFTune): `keys` and `lengths` of samples int64[rows, width], 0 at padding.

    A token's noise is `alpha / sqrt(length * h) * modeling.embedding_noise.draw_noise(key, h)` for embeddings of the width h, and 0 at padding.
    """

    alpha: float
    keys: "torch.Tensor"
    lengths: "torch.Tensor"


@frozen(eq=False)
class MicroBatch:
    """The work of one pass: model inputs, and n positions to score against their labels.

    `inputs` are CPU tensors for the model ([rows, width], ...); `positions` int64[n] are flat places row * width + column in them, each one
    before the token it scores; `labels` int64[n] the token ids scored there, those that follow or others; `sequence_lengths` the true lengths
    per row. Scores come back in the order of `positions`. `samples` is the engine's own, opaque to a backend. `cu_seqlens` bounds the samples
    inside packed rows, as in `DenseBatch`; None where a row holds one sample. `ragged_offsets`, as in `DenseBatch`, say which sample owns
    what of `pixel_values` and `image_grid_thw`; `pixel_values` are sent to the first stage of a pipeline alone. `sample_ids` int64[samples]
    are for messages. `step` counts the optimizer step that this is a part of; None where whoever built the micro-batch does not know.
    `candidates` int64[n, k] by column are the token ids that the score `logprobs_at:COLUMN` is asked at; k may be another for each column.
    `tree`, as in `DenseBatch`, cuts rows of trees into segments: a token sees its own segment up to itself, and the segments above it.
    `sequence_lengths` are then still those of whole samples, more than the row has tokens.
    `teacher` is what `Teaches.teaching` of another product of the same plugin gave for this micro-batch, where the objective compares with a
    teacher. `noise`, of passes that learn, is for a backend that declares `embedding_noise`.
    """

    inputs: Mapping[str, "torch.Tensor"]
    positions: "torch.Tensor"
    labels: "torch.Tensor"
    sequence_lengths: Ragged = field(validator=instance_of(Ragged))
    samples: Any
    cu_seqlens: Ragged | None = None
    ragged_offsets: Mapping[str, IntArray] = Factory(dict)
    sample_ids: IntArray | None = None
    step: StepCounts | None = None
    candidates: Mapping[str, "torch.Tensor"] = Factory(dict)
    teacher: Any = None
    tree: PrefixTree | None = None
    noise: EmbeddingNoise | None = None


class RankBatch(Protocol):
    """This rank's micro-batches of one mini-batch, each built when it is reached; every rank has equally many."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[MicroBatch]: ...


class Objective(Protocol):
    """Engine code that turns scores into the scalar to differentiate, and collects outputs. `needs` names the model scores it reads.

    They are "logprobs" and "entropy", in nats; "values" of a model with a value head; and, of a backend that declares the capability of that
    name, "logits", "logsumexp", "mean_logprob", "log_sum_squares" and "logprobs_at:COLUMN" (`MODEL_SCORES` defines them); with the capability
    `divergence`, those that compare with `micro_batch.teacher`.
    """

    @property
    def needs(self) -> frozenset[str]: ...

    @property
    def temperature(self) -> float: ...

    def __call__(self, scores: Mapping[str, "torch.Tensor"], micro_batch: MicroBatch) -> "tuple[torch.Tensor, RankOutput]":
        """`scores[need]` are [n] tensors ([n, k] of `logprobs_at:COLUMN`), differentiable, on any device.

        Returns the micro-batch's part of the objective and its outputs.
        """


@frozen
class OptimStep:
    """The report of one optimizer step: the norm of the summed gradient before clipping, and the learning rate that was applied."""

    grad_norm: float
    learning_rate: float


class SwitchesAdapters(Protocol):
    """The further method of a backend that declares the capability `reference_by_adapters`."""

    def without_adapters(self) -> "AbstractContextManager[None]":
        """Score with the base model alone, until the context is left; only `forward` is called in it."""


class HasAdapterSets(Protocol):
    """The further method of a backend that declares the capability `adapter_sets`, for a model with adapters."""

    def adapter_set(self, lora: LoraConfig, optimizer: OptimizerSettings, seed: int) -> "Backend":
        """Set up a further product on the same ranks: the same model with other adapters, over this product's frozen weights.

        Whatever learns is its own: adapters, which may differ in rank, alpha, targets and dropout, and a value head; gradients, moments and
        the number of steps; and the random states from which it draws, which begin at `seed` plus the rank. So it computes bit for bit what a
        product computes that `setup` makes with this `lora` and `seed`, whatever is done with other products in between, and none of its
        calls changes anything of theirs. It is closed before the product that made it. Raises as `Backend.setup`.
        """


class Teaches(Protocol):
    """The further method of a backend that declares the capability `divergence`."""

    def teaching(self, micro_batch: MicroBatch) -> "AbstractContextManager[Any]":
        """Give what this model, set up for scoring alone, makes of the positions of a micro-batch: `MicroBatch.teacher` for another product.

        It is kept while the context is open, which is until the next micro-batch is asked for: whoever uses it takes one at a time. No tensor
        in it may be as large as positions times vocabulary.
        """


class Backend(Protocol):
    """The product of `skyrl_engine_make_backend`. Methods are called on every rank in the same order."""

    coords: RankCoords

    def setup(self, model: ModelConfig, optimizer: OptimizerSettings | None, environment: RankEnvironment) -> None:
        """Load the model onto this rank and make it trainable (`optimizer` None: scoring only). Raises ModelError."""

    def forward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score without gradients, in evaluation mode."""

    def forward_backward(self, batch: RankBatch, objective: Objective) -> RankOutput:
        """Score, differentiate and accumulate. Which outputs are built is the objective's business."""

    def optim_step(self, settings: OptimizerSettings | None = None) -> OptimStep:
        """Clip, step with these numbers (None: those of `setup`), which are of the optimizer of `setup`; clear the gradients.

        Raises ModelError where the gradient is not finite: weights and optimizer then stay as they are, and the gradient is cleared.
        """

    def zero_grad(self) -> None:
        """Drop the accumulated gradient, also one that is not finite or that a failed pass left in part.

        Weights, moments and the count of steps stay: the next step is, bit for bit, what it would be without the dropped calls.
        """

    def save(self, directory: Path) -> None:
        """Write this rank's part of the training state (weights, optimizer, schedule, random states) into an existing directory."""

    def load(self, directory: Path) -> None:
        """Restore exactly what `save` wrote, and drop the accumulated gradient."""

    def export(self, directory: Path) -> None:
        """Write the weights as a Hugging Face directory, adapters as a PEFT one (rank 0 writes; every rank takes part)."""

    def weights(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Full weights under their Hugging Face names, adapters merged, one at a time, on CPU; every rank iterates."""

    def gradients(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Full accumulated gradients under their Hugging Face names, one at a time, on CPU, before `optim_step`; every rank iterates.

        For proofs and comparisons; no training step calls it.
        """

    def close(self) -> None:
        """Free the model. The process group is not the backend's."""


@runtime_checkable
class SharesStorage(Protocol):
    """A backend that may show the memory of its weights to others in its process, such as a sampler. A backend need not have this member."""

    def storage(self) -> "Mapping[str, torch.Tensor] | None":
        """Parameters and buffers under their Hugging Face names, tied ones under each; the very memory that every step changes in place.

        Without gradients, and to be read alone. None where no such memory is whole and in the precision of the computation: several ranks,
        adapters, weights that are cast or moved before they are used.
        """


@runtime_checkable
class RoundsWeights(Protocol):
    """A backend that rounds weights on the rank that holds them, before they are gathered. A backend need not have this member."""

    def weights_in(self, dtype: "torch.dtype") -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield what `weights` yields, in its order, each floating-point tensor with the bits of `weights`' after `.to(dtype)`.

        Generators of a run that computes in bfloat16 get their weights so; without this member the engine rounds what `weights` gathered.
        """


@runtime_checkable
class Offloads(Protocol):
    """A backend that frees its devices for others (capability "offload"). A backend need not have these members."""

    def offload(self) -> None:
        """Move weights, accumulated gradients and the optimizer's state to host memory, every rank its own. `reload` or `close` follows."""

    def reload(self) -> None:
        """Move everything back to the device, with the same bits; nothing where nothing was moved."""


@runtime_checkable
class StagesSaves(Protocol):
    """A backend whose checkpoints can be written while it trains (capability "asynchronous_saves"). A backend need not have this member."""

    def stage_save(self, directory: Path) -> "Callable[[], Collection[str]]":
        """Copy to host memory what `save` would write now, and return a function that writes the copy into an existing directory.

        Every rank calls this in the same order. The function is called once, in another thread, while further steps change weights, moments
        and random states; it writes, byte for byte, the files that `save` would have written, and returns the names of those that this rank
        wrote, relative to the directory. It touches no device and sends nothing over a process group in which training may send. Before it
        has returned, neither this method nor `close` is called again. Either raises CheckpointError.
        """


@runtime_checkable
class KeepsAverages(Protocol):
    """A backend that averages the weights it trains (capability "ema"). A backend need not have this member.

    Where the settings of `setup` have `ema_decay`, each `optim_step` ends with `average = ema_decay * average + (1 - ema_decay) * weight` for
    every weight that is trained, in the precision of the optimizer's weights; the first one sets the average to the weight. `save` writes
    averages and `load` restores them, so that training goes on bit for bit; a product without `ema_decay` loads the rest, and one with it loads
    what has none and begins at its next step.
    """

    def load_averages(self, directory: Path) -> None:
        """Load the checkpoint as `load` does into a product that only scores, with averages in the place of the weights they are of.

        Raises CheckpointError for a checkpoint without averages.
        """


def as_optim_step(label: str, result: object) -> OptimStep:
    """Take what `optim_step` of a backend returned, its numbers as floats. Raises ResultError, naming the backend, for anything else."""
    step = require_returned(label, "optim_step", result, OptimStep)
    numbers: dict[str, object] = {"grad_norm": step.grad_norm, "learning_rate": step.learning_rate}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ResultError(
                f"{label} returned {describe_returned(value)} as {name} from optim_step",
                remedy=f"Return a float as {name}: float(value)",
            )
    return OptimStep(float(step.grad_norm), float(step.learning_rate))


def iterate_named_tensors(label: str, method: str, result: object) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the named tensors of `weights` or `gradients`. Raises ResultError, naming the backend and the method, for anything else."""
    if not isinstance(result, Iterable):
        raise ResultError(
            f"{label} returned {describe_returned(result)} from {method}", remedy=f"Yield (name, tensor) pairs from {method}"
        )
    for pair in result:
        named = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and hasattr(pair[1], "detach")
        if not named:
            raise ResultError(
                f"{label} yielded {describe_returned(pair)} from {method}", remedy=f"Yield (name, tensor) pairs from {method}"
            )
        yield pair
