"""The model of a run, as the tables `[model]` and `[model.lora]` and as backends are given it."""

from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, in_, lt, min_len, optional

PLACE = "skyrl_engine.place"
"""Key of a field's metadata: its text may name a place, so `./` and `../` in it are relative to the file that says so.

Its value says how the text is read: `path` (a path, or a name elsewhere), `output` (a path that a run writes), or `reference` (a plugin's
name, or a path that starts with `./`).
A `reference` names code: out of a run directory it is run only where the run is the caller's own, or the caller says so.
"""

CODE = "skyrl_engine.code"
"""Key of a field's metadata: what it holds decides which code is run, as a `reference` of `PLACE` does, though it is no reference."""

ComputeDtype = Literal["float64", "float32", "bfloat16"]
AttentionKernel = Literal["auto", "sdpa", "flash", "flex"]
ATTENTION_KERNELS = ("auto", "sdpa", "flash", "flex")
Dropout = Literal["model", "off"]
DROPOUTS = ("model", "off")


@frozen
class LoraConfig:
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) that are trained in the place of the model's weights.

    Without this table all weights are trained. New adapters are drawn from the run's seed, equally on every rank.
    """

    rank: int = field(default=8, validator=ge(1))
    """Rank of an adapter: the inner dimension of its two matrices."""

    alpha: int = field(default=16, validator=ge(1))
    """Scale of an adapter: the product of its two matrices is multiplied by `alpha / rank`."""

    targets: Literal["all-linear"] | tuple[str, ...] = field(default="all-linear", validator=min_len(1))
    """Linear layers of the decoder that get adapters: all of them, or a list of names such as `["q_proj", "v_proj"]`."""

    dropout: float = field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """Dropout probability of the inputs of an adapter during training."""

    path: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path"})
    """A directory or hub id of adapters to start from, which bring their own rank, alpha and targets; none: new adapters."""


@frozen
class ModelConfig:
    """The model to train, its tokenizer, its precision and memory.

    With `lora`, adapters and a value head are trained; all other weights are frozen, and checkpoints and exports leave them out.
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

    chat_template: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path"})
    """File with a Jinja chat template; none: the tokenizer's own."""

    lora: LoraConfig | None = field(default=None)
    """Train low-rank adapters: the table `[model.lora]`. None: all weights."""

    @lora.validator
    def _refuse_dropout_switched_off(self, _attribute: object, value: LoraConfig | None) -> None:
        if value is not None and value.dropout and self.dropout == "off":
            raise ValueError(f'has dropout {value.dropout:g}, and model.dropout is "off": remove one of them')


@frozen
class EmptyModelConfig(ModelConfig):
    """A model to be made from its configuration alone, with any weights, which `Backend.load` then replaces by a checkpoint's.

    `configuration` is a directory with config.json; `path` is what the model is called, and need not be there.
    """

    configuration: str = field(kw_only=True, validator=min_len(1))
