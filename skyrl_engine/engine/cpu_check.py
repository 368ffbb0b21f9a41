"""Ranks and the cores of this machine: a Ray that the engine starts takes every number of ranks, a machine does not."""

import sys

from skyrl_engine.config.schema import RunConfig
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.run.environment import usable_cores

MOST_RANKS_PER_CORE = 4
"""Ranks that one core may carry: enough to try a layout on a laptop. Beyond, ranks start so slowly that they give each other up."""


def describe_sharing(run: RunConfig) -> str | None:
    """Return `4 ranks share 2 cores` where that is so, and None where each rank has its own core or ranks are on a cluster.

    Raises UnsupportedError for more than MOST_RANKS_PER_CORE, unless the run says that this is meant. On a cluster that runs already, its own
    resources decide, when the ranks start.
    """
    cores = usable_cores()
    if not starts_ray_here(run) or cores is None or run.ranks <= cores:
        return None
    shared = f"{run.ranks} ranks share {cores} core{'s' if cores > 1 else ''}"
    if run.ranks > MOST_RANKS_PER_CORE * cores and not run.oversubscribe:
        raise UnsupportedError(
            f"run.ranks = {run.ranks}, and {shared}: at most {MOST_RANKS_PER_CORE} ranks per core, here {MOST_RANKS_PER_CORE * cores}, start",
            remedy="Lower run.ranks, name a cluster in run.ray_address, or set run.oversubscribe = true",
        )
    return shared


def starts_ray_here(run: RunConfig) -> bool:
    """Return True where all ranks will be on this machine under a Ray that the run starts itself.

    A program that has joined a Ray cluster uses that one as it is. Does not import Ray.
    """
    ray = sys.modules.get("ray")
    joined = ray is not None and bool(ray.is_initialized())
    return run.launch == "ray" and run.ray_address is None and not joined
