"""`[model]`, as a configuration has it: the model that backends are given, with a precision that may still be open."""

from typing import Literal

from attrs import field, frozen
from attrs.validators import in_

from skyrl_engine.contracts.values.model import ModelConfig


@frozen
class ModelTable(ModelConfig):
    """The model to train, its tokenizer, its precision and memory.

    With `lora`, adapters and a value head are trained; all other weights are frozen, and checkpoints and exports leave them out. What `freeze`
    names is frozen too, and they hold it.
    """

    dtype: Literal["auto", "float64", "float32", "bfloat16"] = field(  # type: ignore[assignment]  # chosen before a backend sees it
        default="auto", validator=in_(("auto", "float64", "float32", "bfloat16"))
    )
    """Precision of the computation; the weights that are trained stay in float32. `auto`: bfloat16 on CUDA, float32 on CPU."""
