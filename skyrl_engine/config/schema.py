"""The configuration as attrs classes: one class per TOML table. Sizes in samples, tokens or optimizer steps, as each name says.

Plugin tables (`[loss]`, `[backend]`, ...) hold `use`, a plugin reference, and beside it the plugin's own options, which the plugin's own
schema validates. The text under each key is its meaning in `docs/reference/configuration.md`.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import attrs
from attrs import Factory, field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, in_, lt, min_len, optional

from skyrl_engine.contracts.backend import ComputeDtype, LoraSpec, ModelSpec, OptimizerSpec
from skyrl_engine.contracts.plan import Layout

PLACE = "skyrl_engine.place"
"""Key of a field's metadata: its text may name a place, so `./` and `../` in it are relative to the file that says so."""

KIND = "skyrl_engine.kind"
"""Key of the metadata of a plugin table's field that lists further plugin tables: the kind of plugin that they select."""


@frozen
class RunConfig:
    """Where a run is written and where it runs."""

    directory: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: True})
    """Folder that holds everything the run writes; none: a new folder under `runs/`."""

    seed: int = field(default=0, validator=[ge(0), lt(2**63)])
    """Seed of every random number of the run."""

    launch: Literal["inline", "ray"] = field(default="inline", validator=in_(("inline", "ray")))
    """`inline`: one rank, in this process; `ray`: one Ray actor per rank."""

    ranks: int = field(default=1, validator=ge(1))
    """Processes that train together; more than one needs `launch = "ray"`."""

    device: Literal["auto", "cpu", "cuda"] = field(default="auto", validator=in_(("auto", "cpu", "cuda")))
    """Where ranks compute; `auto`: on CUDA devices where torch sees any."""

    ray_address: str | None = field(default=None, validator=optional(min_len(1)))
    """Address of a running Ray cluster; none: start one on this machine."""

    observers: tuple[str, ...] = field(default=("metrics_jsonl",), validator=deep_iterable(min_len(1)), metadata={PLACE: True})
    """References of observer plugins; the options of one stand in `[observers.NAME]`."""


@frozen
class PluginsConfig:
    """Which installed plugins may be used."""

    block: tuple[str, ...] = field(default=(), validator=deep_iterable(min_len(1)))
    """References of plugins that must not be used."""

    pin: Mapping[str, str] = Factory(dict)
    """The distribution to take a plugin from, by `"kind:name"`, where several offer that name."""


@frozen
class LoraConfig:
    """Low-rank adapters (LoRA) that are trained in the place of the model's weights; without this table all weights are."""

    rank: int = field(default=8, validator=ge(1))
    """Rank of the two matrices beside each layer."""

    alpha: int = field(default=16, validator=ge(1))
    """Their product counts `alpha / rank` times."""

    targets: Literal["all-linear"] | tuple[str, ...] = field(default="all-linear", validator=min_len(1))
    """Linear layers of the decoder that get adapters: all, or those of these names, such as `["q_proj", "v_proj"]`."""

    dropout: float = field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """Share of an adapter's inputs that training sets to zero."""

    path: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: True})
    """A directory or hub id with adapters to train on, which bring their own rank, alpha and targets; none: new ones."""


@frozen
class ModelConfig:
    """The model to train and how it computes."""

    path: str = field(validator=min_len(1), metadata={PLACE: True})
    """A local Hugging Face directory or a hub id."""

    tokenizer: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: True})
    """A local directory or hub id of the tokenizer; none: the model's own."""

    revision: str | None = field(default=None, validator=optional(min_len(1)))
    """Branch, tag or commit on the hub; none: the default branch."""

    dtype: ComputeDtype = field(default="float32", validator=in_(("float64", "float32", "bfloat16")))
    """Precision of the computation; the weights that are trained stay in float32."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""

    logits_per_chunk: int = field(default=2**22, validator=ge(1))
    """Logits (positions x vocabulary) held at once while scoring; lower it when memory runs out at the head."""

    value_head: bool = False
    """Put a head beside the language-model head that scores every token with a value, for losses of critics."""

    chat_template: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: True})
    """File with a Jinja chat template; none: the tokenizer's own."""

    lora: LoraConfig | None = None
    """Train low-rank adapters: the table `[model.lora]`. None: all weights."""

    def spec(self, seed: int) -> ModelSpec:
        """`seed` is the run's."""
        return ModelSpec(
            path=self.path,
            revision=self.revision,
            dtype=self.dtype,
            activation_checkpointing=self.activation_checkpointing,
            trust_remote_code=self.trust_remote_code,
            logits_per_chunk=self.logits_per_chunk,
            value_head=self.value_head,
            lora=None if self.lora is None else LoraSpec(**attrs.asdict(self.lora), seed=seed),
        )


DataFormat = Literal["auto", "tokens", "rollouts", "messages", "prompt_completion", "alpaca", "text"]


@frozen
class DataConfig:
    """What to train on."""

    train: str = field(validator=min_len(1), metadata={PLACE: True})
    """A file (JSONL, Parquet, Arrow), a folder or a hub id."""

    eval: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: True})
    """Held-out data, given like `train`; none: see `eval_fraction`."""

    subset: str | None = field(default=None, validator=optional(min_len(1)))
    """Configuration of a hub dataset that has several."""

    train_split: str = field(default="train", validator=min_len(1))
    """Split of `train` to read, where it has splits."""

    eval_split: str = field(default="test", validator=min_len(1))
    """Split of `eval` to read, where it has splits."""

    eval_fraction: float = field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """Share of `train` to hold out for evaluation when `eval` is not set."""

    format: DataFormat = field(default="auto", validator=in_(get_args(DataFormat)))
    """Shape of the samples; `auto` recognises it by the columns."""

    columns: tuple[str, ...] = field(default=(), validator=deep_iterable(min_len(1)))
    """Columns to read beside those that the loss, its terms and corrections need: one number per response token or per sample."""

    loss_on: Literal["last", "all"] = field(default="last", validator=in_(("last", "all")))
    """Assistant turns that carry loss: the `last` one or `all`."""

    max_length: int | None = field(default=None, validator=optional(ge(2)))
    """Longest sample in tokens; none: as long as the model allows."""

    overlong: Literal["drop", "truncate", "error"] = field(default="error", validator=in_(("drop", "truncate", "error")))
    """What happens to a sample longer than `max_length`."""

    bad_images: Literal["error", "drop"] = field(default="error", validator=in_(("error", "drop")))
    """What happens to a sample with an image that is missing, damaged or too large, or whose images do not match their places."""

    max_image_pixels: int = field(default=2**26, validator=ge(1))
    """Largest image that is read, width times height; files that unpack into gigabytes are refused whatever it says."""

    shrink_images_to: int | None = field(default=None, validator=optional(ge(1)))
    """Pixels to which larger images are scaled down, which bounds their tokens; none: what the model's image processor says."""

    max_samples: int | None = field(default=None, validator=optional(ge(1)))
    """Read at most this many samples; none: all."""

    cache: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: True})
    """Folder of the token cache; none: the user's cache folder."""


@frozen
class PluginTable:
    """`use` is a plugin reference; `options` the rest of the table, as plain values."""

    use: str = field(validator=min_len(1), metadata={PLACE: True})
    """The plugin: `name`, `distribution:name`, or `./file.py:name`."""

    options: Mapping[str, Any] = Factory(dict)


@frozen
class TermTable(PluginTable):
    """A further term of the objective: a loss, and how much it counts."""

    coef: float = field(kw_only=True)
    """What the term's values are multiplied by."""


@frozen
class LossTable(PluginTable):
    """The main loss, what is added to it, and what corrects it."""

    terms: tuple[TermTable, ...] = field(default=(), metadata={KIND: "loss"})
    """Losses added to the main one, each times its `coef`: `[[loss.terms]]` with `use`, `coef` and the options of that loss."""

    corrections: tuple[PluginTable, ...] = field(default=(), metadata={KIND: "correction"})
    """Corrections of the main loss, in order: `[[loss.corrections]]` with `use` and the options of that correction."""


_BELOW_ONE = and_(ge(0.0), lt(1.0))


@frozen
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    learning_rate: float = field(default=1e-5, validator=gt(0))
    """Learning rate after warm-up."""

    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=deep_iterable(_BELOW_ONE))
    """Decay rates of the two moments."""

    epsilon: float = field(default=1e-8, validator=gt(0))
    """Added to the denominator."""

    weight_decay: float = field(default=0.0, validator=ge(0))
    """Decoupled weight decay."""

    max_grad_norm: float | None = field(default=cast("float | None", 1.0), validator=optional(gt(0)))
    """Norm to which gradients are clipped; none: never."""

    schedule: Literal["constant", "linear", "cosine"] = field(default="constant", validator=in_(("constant", "linear", "cosine")))
    """Course of the learning rate after warm-up; `linear` and `cosine` end at 0."""

    warmup_steps: int = field(default=0, validator=ge(0))
    """Optimizer steps of linear warm-up before the schedule."""

    def spec(self, total_steps: int) -> OptimizerSpec:
        return OptimizerSpec(
            learning_rate=self.learning_rate,
            betas=self.betas,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            total_steps=total_steps,
        )


@frozen
class TrainingConfig:
    """How long to train and how a batch is cut."""

    steps: int | None = field(default=None, validator=optional(ge(1)))
    """Optimizer steps to train; give this or `epochs`."""

    epochs: float | None = field(default=None, validator=optional(gt(0)))
    """Passes over the data; give this or `steps`. With neither: one pass."""

    batch_size: int = field(default=32, validator=ge(1))
    """Samples of one optimizer step (a mini-batch), over all ranks; on average, where groups of other sizes must stay whole."""

    micro_batch_rows: int | None = field(default=None, validator=optional(ge(1)))
    """Rows of a micro-batch; give this or `micro_batch_tokens`. With neither: all samples of a rank at once."""

    micro_batch_tokens: int | None = field(default=None, validator=optional(ge(1)))
    """Tokens of a micro-batch, padding included: as many rows as fit. Give this or `micro_batch_rows`."""

    shuffle: bool = True
    """Read the samples in a new random order in every epoch."""

    def layout(self, *, dp: int = 1, tp: int = 1, cp: int = 1, pp: int = 1) -> Layout:
        return Layout(
            dp=dp,
            tp=tp,
            cp=cp,
            pp=pp,
            micro_batch_rows=self.micro_batch_rows,
            micro_batch_tokens=self.micro_batch_tokens,
        )


@frozen
class EvaluationConfig:
    """When to evaluate on the held-out data."""

    every: int | None = field(default=None, validator=optional(ge(1)))
    """Evaluate every so many optimizer steps; none: only where the keys below ask."""

    at_start: bool = False
    """Evaluate before the first step."""

    at_end: bool = True
    """Evaluate after the last step, if there is held-out data."""


@frozen
class CheckpointConfig:
    """When to write checkpoints, which to keep, and whether to continue from one."""

    every: int | None = field(default=None, validator=optional(ge(1)))
    """Write a checkpoint every so many optimizer steps; none: only where `at_end` asks."""

    at_end: bool = True
    """Write a checkpoint after the last step."""

    keep: int | None = field(default=cast("int | None", 2), validator=optional(ge(1)))
    """Keep the newest so many checkpoints; none: all."""

    resume: bool = False
    """Continue from the run directory's latest checkpoint, if there is one."""

    allow_changed: tuple[str, ...] = ()
    """Plugins, as `"kind:name"`, that may differ from those the checkpoint was made with."""


@frozen
class EngineConfig:
    """A whole configuration file."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig = RunConfig()
    plugins: PluginsConfig = PluginsConfig()
    collator: PluginTable = PluginTable("padded")
    loss: LossTable = LossTable("cross_entropy")
    reducer: PluginTable = PluginTable("token_mean")
    backend: PluginTable = PluginTable("fsdp")
    merger: PluginTable = PluginTable("ordered")
    observers: Mapping[str, Mapping[str, Any]] = Factory(dict)
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig(epochs=1.0)
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
