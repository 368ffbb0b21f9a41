"""The model of a run, as the tables `[model]` and `[model.lora]` and as backends are given it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, in_, lt, min_len, optional

PLACE = "skyrl_engine.place"
"""Key of a field's metadata: its text may name a place, so `./` and `../` in it are relative to the file that says so.

Its value says how the text is read: `path` (a path, or a name elsewhere), `output` (a path that a run writes), or `reference` (a plugin's
name, or a path that starts with `./`).
A `reference` names code: out of a run directory it is run only where the run is the caller's own, or the caller says so.
"""

BUILT_IN = "skyrl_engine.built_in"
"""Key of the metadata of a `reference`: the texts that are no reference, because they are names of the engine's own."""

CODE = "skyrl_engine.code"
"""Key of a field's metadata: what it holds decides which code is run, as a `reference` of `PLACE` does, though it is no reference."""

DESCRIBES = "skyrl_engine.describes"
"""Key of an option's metadata, with the name of another option: this one says what the other's value is, such as the arguments of a function.
The kit tries no other values of it, since none would be true of what was given."""

ComputeDtype = Literal["float64", "float32", "bfloat16"]
AttentionKernel = Literal["auto", "sdpa", "flash", "flex"]
ATTENTION_KERNELS = ("auto", "sdpa", "flash", "flex")
Dropout = Literal["model", "off"]
RightLabel = Literal[0, 1]
"""Number of one of two labels, that of right steps."""
DROPOUTS = ("model", "off")

NEW_ADAPTERS: Mapping[str, Any] = MappingProxyType(
    {"rank": 8, "alpha": 16, "rslora": False, "dora": False, "targets": "all-linear"}
)
"""The keys of `LoraConfig` that existing adapters bring with them, and what new adapters have where a key is not given."""


@frozen
class LoraConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) that are trained in the place of the model's weights.

    Without this table all weights are trained. New adapters are drawn from the run's seed, equally on every rank.
    """

    rank: int | None = field(default=None, validator=optional(ge(1)))
    """Rank of an adapter: the inner dimension of its two matrices. none: 8, or that of the adapters at `path`."""

    alpha: int | None = field(default=None, validator=optional(ge(1)))
    """Scale of an adapter: the product of its two matrices is multiplied by `alpha / rank`. none: 16, or that of the adapters at `path`."""

    rslora: bool | None = None
    """Multiply by `alpha / sqrt(rank)` instead (rsLoRA, Kalajdzievski 2023, arXiv 2312.03732): gradients keep their size at high ranks. none:
    false, or as the adapters at `path` do."""

    dora: bool | None = None
    """Train the norm of each output's weights apart from their direction (DoRA, Liu et al. 2024, arXiv 2402.09353, eq. 5). none: false, or as
    the adapters at `path` do."""

    targets: Literal["all-linear"] | tuple[str, ...] | None = field(default=None, validator=optional(min_len(1)))
    """Linear layers of the decoder that get adapters: "all-linear", all of them, or a list of names such as `["q_proj", "v_proj"]`. none: all,
    or those of the adapters at `path`."""

    dropout: float = field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """Dropout probability of the inputs of an adapter during training."""

    load_in_4bit: bool = False
    """Hold the frozen linear layers of the decoder in 4 bits (NF4, QLoRA, Dettmers et al. 2023, arXiv 2305.14314): an eighth of the memory of
    float32. The policy, its reference without adapters, and merged exports are those of the rounded weights. Needs the extra `bitsandbytes`."""

    double_quantization: bool = field(default=False)
    """Hold the scales of weights in 4 bits in 8 bits themselves: 4.1 bits a weight in the place of 4.5. Needs `load_in_4bit`."""

    path: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path"})
    """A directory or hub id of adapters to start from, which bring their own rank, alpha, kind and targets: a key that says otherwise is
    refused. none: new adapters."""

    @double_quantization.validator
    def _refuse_scales_of_nothing(self, _attribute: object, value: bool) -> None:
        if value and not self.load_in_4bit:
            raise ValueError("has double_quantization, which is about weights in 4 bits: set load_in_4bit = true, or remove it")

    def __attrs_post_init__(self) -> None:
        if self.path is None:
            for name, value in NEW_ADAPTERS.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)

    def stored_at(self, path: str) -> "LoraConfig":
        """Return the configuration of adapters whose files are at `path`, which say everything but the dropout and what they lie over."""
        return LoraConfig(
            path=path, dropout=self.dropout, load_in_4bit=self.load_in_4bit, double_quantization=self.double_quantization
        )


@frozen
class ModelConfig:
    """The model to train, its tokenizer, its precision and memory.

    With `lora`, adapters and a value head are trained; all other weights are frozen, and checkpoints and exports leave them out. What `freeze`
    names is frozen too, and they hold it.
    """

    path: str = field(validator=min_len(1), metadata={PLACE: "path"})
    """A local Hugging Face directory or a hub id."""

    tokenizer: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path"})
    """A local directory or hub id of the tokenizer; none: the model's own."""

    revision: str | None = field(default=None, validator=optional(min_len(1)))
    """Branch, tag or commit on the hub; none: the default branch."""

    dtype: ComputeDtype = field(default="float32", validator=in_(("float64", "float32", "bfloat16")))
    """Precision of the computation; the weights that are trained stay in float32."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    compile: bool = False
    """Compile the model's layers with `torch.compile` (needs a C++ compiler on CPUs, Triton on GPUs): the first step takes longer, by the
    metric `compile_seconds`, and later ones less time. Losses and gradients differ by rounding."""

    attention: AttentionKernel = field(default="auto", validator=in_(ATTENTION_KERNELS))
    """Attention kernel of training and scoring: "sdpa" (torch's scaled dot-product attention), "flash" (torch's varlen flash attention, in
    bfloat16 on GPUs), "flex" (FlexAttention, in bfloat16 on GPUs), or "auto": the fastest that is right on the device. Samplers have
    their own."""

    dropout: Dropout = field(default="model", validator=in_(DROPOUTS))
    """Dropout in training: "model" (the shares that the model's config.json states) or "off" (none). Exports keep the model's config.json."""

    neftune_alpha: float | None = field(default=None, validator=optional(and_(gt(0), lt(float("inf")))))
    """Noise on input embeddings in training (NEFTune, Jain et al. 2023, arXiv 2310.05914): uniform, up to `neftune_alpha` / sqrt(tokens of
    the sample x width of the embedding), mostly 5 to 15. none: no noise."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""

    logits_per_chunk: int = field(default=2**22, validator=ge(1))
    """Number of logits (positions x vocabulary) held in memory at once while scoring; lower it when memory runs out at the head."""

    rotary_length: int | None = field(default=None, validator=optional(ge(1)))
    """Longest row in tokens for which rotary frequencies are fixed, in models that choose them by length (`longrope`, `dynamic`);
    none: the longest sample of the data, or where no data is known the length that the model was first trained for."""

    value_head: bool = False
    """Add a value head to the model, next to the language-model head: it gives every token a value, which losses of critics read."""

    classifier: bool = False
    """Take the model for a reward model: its value head is alone and without bias, and files are those of a sequence classifier with one label,
    when they are read and when they are exported. Needs `value_head`."""

    right_label: RightLabel | None = field(default=None, validator=optional(in_((0, 1))))
    """Take the model for a process reward model of two labels, such as TRL's: its files are those of a token classifier, when they are read and
    when they are exported, and this is the number of the label that says that a step is right. Its value head has a bias, and gives the right
    label's logit minus the other's. Needs `classifier`. none: one label."""

    chat_template: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path"})
    """File with a Jinja chat template; none: the tokenizer's own."""

    freeze: tuple[str, ...] = field(default=(), validator=deep_iterable(min_len(1)))
    """Parameters that training leaves as they are: patterns of whole names, in which `*` stands for anything, `?` for a character and `[0-3]`
    for one of several, such as `["model.visual.*", "*.embed_tokens.*"]`. A tied parameter is frozen under any of its names. A pattern that
    matches no parameter is refused."""

    lora: LoraConfig | None = field(default=None)
    """Train low-rank adapters: the table `[model.lora]`. None: all weights that `freeze` does not name."""

    @lora.validator
    def _refuse_dropout_switched_off(self, _attribute: object, value: LoraConfig | None) -> None:
        if value is not None and value.dropout and self.dropout == "off":
            raise ValueError(f'has dropout {value.dropout:g}, and model.dropout is "off": remove one of them')

    @lora.validator
    def _refuse_freezing_twice(self, _attribute: object, value: LoraConfig | None) -> None:
        if value is not None and self.freeze:
            raise ValueError("trains adapters, which freezes all weights of the model: remove model.freeze")


@frozen
class EmptyModelConfig(ModelConfig):
    """A model to be made from its configuration alone, with any weights, which `Backend.load` then replaces by a checkpoint's.

    `configuration` is a directory with config.json; `path` is what the model is called, and need not be there.
    """

    configuration: str = field(kw_only=True, validator=min_len(1))
