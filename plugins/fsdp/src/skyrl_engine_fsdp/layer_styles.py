"""The models that the fsdp backend refuses to divide by transformers' tensor-parallel plans.

Imports no torch, because the controller uses it while it plans.
"""

from typing import Any, Final

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.tensor_parallel_plan import EXPERT_COUNTS, EXPERTS, find_plan_problem, refuse_unequal_sizes, styles_of
from skyrl_engine.model_facts.vision_language import refuse_unequal_parts
from skyrl_engine_fsdp.options import FsdpConfig

_DRAWS: Final = "phimoe"
"""The family whose routers draw experts at random in training, so that no test can compare a divided model with a whole one."""


_TURNS_IN_FLOAT32: Final = "llama4_text"
"""A family whose rotary angles are complex numbers of float32, whatever it computes in."""

SHARED_EXPERTS: Final = (
    *("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "jamba"),
    *("minimax", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
)
"""Families whose experts ranks may share apart from tensor parallelism: those that tests compare with transformers."""


def refuse_model(ranks: int, config: Any, model: ModelConfig) -> None:
    """Raises UnsupportedError for a model that `ranks` (2 or more) cannot share: compiled layers, noise, random routers, unknown styles or
    unequal parts.
    """
    if model.neftune_alpha is not None:
        raise UnsupportedError(
            "the fsdp backend adds no noise to embeddings under tensor parallelism",
            remedy="Set backend.tensor_parallel = 1, remove model.neftune_alpha, or use the megatron backend",
        )
    if model.compile:
        raise UnsupportedError(
            "model.compile = true, and torch's compiler cannot follow the DTensors of tensor-parallel layers whose lengths vary",
            remedy="Set backend.tensor_parallel = 1 or model.compile = false, or use the megatron backend",
        )
    if config.get_text_config(decoder=True).model_type == _DRAWS:
        raise indivisible_error(
            f"the routers of {_DRAWS} models such as {model.path} draw experts at random, and no test shows that ranks draw the same"
        )
    if config.get_text_config(decoder=True).model_type == _TURNS_IN_FLOAT32 and model.dtype == "float64":
        raise indivisible_error(
            f'model.dtype = "float64", and {model.path} turns queries and keys in float32, where the heads of a rank round unlike all of them: '
            "the proof at load, that ranks compute what the whole model does, could not tell this from a mistake"
        )
    if (problem := find_plan_problem(config, model.path)) is not None:
        raise indivisible_error(problem)
    refuse_unequal_sizes(config, model.path, ranks=ranks, options="backend.tensor_parallel")


def refuse_experts(options: FsdpConfig, config: Any, model: ModelConfig) -> None:
    """Raises UnsupportedError for a model whose experts ranks cannot share: a dense one, an untried family, unequal parts."""
    option, ranks = "backend.expert_parallel", options.expert_parallel
    family = config.get_text_config(decoder=True).model_type
    if EXPERTS not in styles_of(config).values():
        raise UnsupportedError(
            f"{option} = {ranks}, and {model.path} has no experts that ranks could share", remedy=f"Set {option} = 1"
        )
    if family not in SHARED_EXPERTS:
        raise UnsupportedError(
            f"{option} = {ranks}, and no test shows that ranks which share experts compute what {family} models such as {model.path} do "
            f"(tried: {', '.join(SHARED_EXPERTS)})",
            remedy=f"Set {option} = 1, or backend.tensor_parallel above 1 instead",
        )
    holders = ranks * options.tensor_parallel
    names = f"{option} x backend.tensor_parallel" if options.tensor_parallel > 1 else option
    for attribute in EXPERT_COUNTS:
        refuse_unequal_parts(config, model.path, attribute, parts=holders, options=names)


def indivisible_error(cause: str) -> UnsupportedError:
    """Return the error for a model that cannot be divided, with the remedies that always apply."""
    return UnsupportedError(cause, remedy="Set backend.tensor_parallel = 1, or choose another model or backend")
