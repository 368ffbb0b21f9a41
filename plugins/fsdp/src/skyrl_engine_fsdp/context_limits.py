"""Limits of the fsdp backend's context-parallel ranks. Imports no torch, because the controller uses it while it plans."""

from typing import TYPE_CHECKING

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig

if TYPE_CHECKING:
    from skyrl_engine_fsdp.options import FsdpConfig


def name_division(options: "FsdpConfig") -> str:
    """Return the option that divides samples among ranks, as users write it."""
    return f"backend.context_parallel = {options.context_parallel}"


def refuse_context(options: "FsdpConfig", model: ModelConfig) -> None:
    """Raises UnsupportedError for a chosen kernel of attention that needs whole documents on a rank, where ranks divide them."""
    if options.context_parallel > 1 and model.attention not in ("auto", "sdpa"):
        raise UnsupportedError(
            f'model.attention = "{model.attention}", and {name_division(options)} divides documents among ranks, which that kernel does not',
            remedy='Set backend.context_parallel = 1, or model.attention to "auto" or "sdpa"',
        )
