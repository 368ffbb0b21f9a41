"""The parts of a model's state that FSDP2 leaves on each rank, and what it gathers and sums. Imports no torch."""

from skyrl_engine.contracts import Holding, ModelConfig, StateLayout, Topology, Traffic
from skyrl_engine_fsdp.options import FsdpConfig


def describe_state(options: FsdpConfig, topology: Topology, model: ModelConfig) -> StateLayout:
    """Return the layout of a model's state: sharded over the ranks of a copy, gathered layer by layer."""
    ranks, copies, host = topology.dp // options.replicate, options.replicate, options.cpu_offload
    weights = Holding("weights", ranks, trained=False, on_host=host)
    # a single rank that computes in the weights' own precision keeps the plain module (`sharding.stays_whole`)
    if topology.world_size == 1 and model.dtype != "bfloat16" and not host:
        return StateLayout()
    gathers = 2 if options.reshard_after_forward else 1
    return StateLayout(
        holdings=(weights, Holding("gradients", ranks, on_host=host), Holding("optimizer", ranks, on_host=host)),
        scoring=(weights,),
        gathered="layer" if options.reshard_after_forward else "model",
        traffic=(
            Traffic("weights", ranks, gathers, master=False),
            Traffic("gradients", ranks),
            Traffic("gradients", copies, 2),
        ),
    )
