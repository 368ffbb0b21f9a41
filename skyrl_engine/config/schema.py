"""The configuration as attrs classes: one class per TOML table. Sizes in samples, tokens or optimizer steps, as each name says.

Plugin tables (`[loss]`, `[backend]`, ...) hold `use`, a plugin reference, and beside it the plugin's own options, which the plugin's own
schema validates.
"""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import Factory, field, frozen
from attrs.validators import ge, gt, in_, min_len, optional

from skyrl_engine.contracts.backend import ComputeDtype, ModelSpec, OptimizerSpec
from skyrl_engine.contracts.plan import Layout


@frozen
class RunConfig:
    """`directory` holds everything the run writes (None: a new folder under runs/). `launch = "inline"` is one rank in this process."""

    directory: str | None = None
    seed: int = field(default=0, validator=ge(0))
    launch: Literal["inline", "ray"] = field(default="inline", validator=in_(("inline", "ray")))
    ranks: int = field(default=1, validator=ge(1))
    ray_address: str | None = None
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", validator=in_(("auto", "cpu", "cuda")))
    observers: tuple[str, ...] = ("metrics_jsonl",)


@frozen
class PluginsConfig:
    """`block` lists references that must not be used; `pin` maps "kind:name" to the distribution to take it from."""

    block: tuple[str, ...] = ()
    pin: Mapping[str, str] = Factory(dict)


@frozen
class ModelConfig:
    """`path` is a local Hugging Face directory or a hub id; `tokenizer` likewise (None: the model's own)."""

    path: str = field(validator=min_len(1))
    tokenizer: str | None = None
    revision: str | None = None
    dtype: ComputeDtype = field(default="float32", validator=in_(("float64", "float32", "bfloat16")))
    activation_checkpointing: bool = False
    trust_remote_code: bool = False
    logits_per_chunk: int = field(default=2**22, validator=ge(1))
    chat_template: str | None = None

    def spec(self) -> ModelSpec:
        return ModelSpec(
            path=self.path,
            revision=self.revision,
            dtype=self.dtype,
            activation_checkpointing=self.activation_checkpointing,
            trust_remote_code=self.trust_remote_code,
            logits_per_chunk=self.logits_per_chunk,
        )


DataFormat = Literal["auto", "messages", "prompt_completion", "alpaca", "text"]


@frozen
class DataConfig:
    """What to train on. `train` and `eval` are files, folders or hub ids; `eval_fraction` holds out part of `train` when `eval` is not set."""

    train: str = field(validator=min_len(1))
    eval: str | None = None
    subset: str | None = None
    train_split: str = "train"
    eval_split: str = "test"
    eval_fraction: float = field(default=0.0, validator=[ge(0.0)])
    format: DataFormat = field(default="auto", validator=in_(("auto", "messages", "prompt_completion", "alpaca", "text")))
    loss_on: Literal["last", "all"] = field(default="last", validator=in_(("last", "all")))
    max_length: int | None = field(default=None, validator=optional(ge(2)))
    overlong: Literal["drop", "truncate", "error"] = field(default="error", validator=in_(("drop", "truncate", "error")))
    max_samples: int | None = field(default=None, validator=optional(ge(1)))
    cache: str | None = None


@frozen
class PluginTable:
    """`use` is a plugin reference; `options` the rest of the table, as plain values."""

    use: str
    options: Mapping[str, Any] = Factory(dict)


@frozen
class OptimizerConfig:
    """AdamW. `warmup_steps` optimizer steps of linear warm-up come before the schedule."""

    learning_rate: float = field(default=1e-5, validator=gt(0))
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = field(default=1e-8, validator=gt(0))
    weight_decay: float = field(default=0.0, validator=ge(0))
    max_grad_norm: float | None = field(default=1.0, validator=optional(gt(0)))
    schedule: Literal["constant", "linear", "cosine"] = field(default="constant", validator=in_(("constant", "linear", "cosine")))
    warmup_steps: int = field(default=0, validator=ge(0))

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
    """`steps` optimizer steps, or `epochs` over the data (one of them). A mini-batch is `batch_size` samples over all ranks.

    A micro-batch is `micro_batch_rows` rows or as many as fit in `micro_batch_tokens` tokens, padding included (one of them).
    """

    steps: int | None = field(default=None, validator=optional(ge(1)))
    epochs: float | None = field(default=None, validator=optional(gt(0)))
    batch_size: int = field(default=32, validator=ge(1))
    micro_batch_rows: int | None = field(default=None, validator=optional(ge(1)))
    micro_batch_tokens: int | None = field(default=None, validator=optional(ge(1)))
    shuffle: bool = True

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
    """Evaluate every so many optimizer steps (None: only where asked), before the first step, and after the last."""

    every: int | None = field(default=None, validator=optional(ge(1)))
    at_start: bool = False
    at_end: bool = True


@frozen
class CheckpointConfig:
    """Write a checkpoint every so many steps and keep the newest `keep` (None: all). `resume` continues from `latest` when there is one.

    `allow_changed` names plugins ("kind:name") that may differ from those the checkpoint was made with.
    """

    every: int | None = field(default=None, validator=optional(ge(1)))
    at_end: bool = True
    keep: int | None = field(default=2, validator=optional(ge(1)))
    resume: bool = False
    allow_changed: tuple[str, ...] = ()


@frozen
class EngineConfig:
    """A whole configuration file."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig = RunConfig()
    plugins: PluginsConfig = PluginsConfig()
    collator: PluginTable = PluginTable("padded")
    loss: PluginTable = PluginTable("cross_entropy")
    reducer: PluginTable = PluginTable("token_mean")
    backend: PluginTable = PluginTable("fsdp")
    merger: PluginTable = PluginTable("ordered")
    observers: Mapping[str, Mapping[str, Any]] = Factory(dict)
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig(epochs=1.0)
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
