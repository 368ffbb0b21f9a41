"""The value head `score`, which every tensor-parallel rank of the last stage holds whole."""

from skyrl_engine.contracts import ModelConfig
from skyrl_engine.modeling.value_head import NAME, ValueHead, has_bias
from skyrl_engine_megatron.decoder import Decoder
from skyrl_engine_megatron.division import Whole
from skyrl_engine_megatron.names import MegatronParameter


def add_value_head(decoder: Decoder, spec: ModelConfig) -> None:
    """Give the last piece of the model a value head without values, on the device and in the precision of its norm."""
    norm = decoder.decoder.final_layernorm.weight
    decoder.value_head = ValueHead(norm.numel(), bias=has_bias(spec), device=norm.device, dtype=norm.dtype)


def value_head_entries(spec: ModelConfig, hidden: int, *, stage: int) -> tuple[MegatronParameter, ...]:
    """Return the head's parameters over `hidden` numbers, as `names.entries` returns those of the model below it."""
    if not spec.value_head:
        return ()
    shapes = {"weight": (1, hidden), **({"bias": (1,)} if has_bias(spec) else {})}
    return tuple(
        MegatronParameter(f"value_head.{kind}", ((f"{NAME}.{kind}", shape),), Whole(), "value-head", stage)
        for kind, shape in shapes.items()
    )
