"""The share of a generator on the ranks in a plan of their memory."""

from typing import cast

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import GeneratorTable
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.generator_placement import choose_placement
from skyrl_engine.engine.memory_plan import RankSampling


def plan_sampling(resolved: ResolvedConfig, assembly: Assembly, *, beside: bool = False) -> RankSampling | None:
    """Return what the run's generator takes on a rank; None where it is elsewhere. `beside`: attempts are sampled while ranks train."""
    selected = resolved.plugins.get("generator")
    if selected is None:
        return None
    table = cast("GeneratorTable", resolved.config.selected["generator"])
    description = selected.loaded.describe_generator(selected.options)
    if choose_placement(str(selected.loaded.record), description, table, beside=beside) != "rank":
        return None
    model = resolved.config.model
    # as `SharesStorage` has it
    shares = assembly.description.topology.world_size == 1 and model.dtype != "bfloat16" and model.lora is None
    cached = description.cache_tokens
    return RankSampling(
        copies=not shares,
        cached=cached if isinstance(cached, int) else None,
        divided="tensor_parallel" in description.capabilities,
    )
