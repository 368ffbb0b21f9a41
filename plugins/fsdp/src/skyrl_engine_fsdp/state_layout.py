"""The parts of a model's state that FSDP2 leaves on each rank, and what it gathers and sums. Imports no torch."""

from skyrl_engine.contracts import Holding, ModelConfig, StateLayout, Topology, Traffic
from skyrl_engine.model_facts.tensor_parallel_plan import list_divided_patterns
from skyrl_engine_fsdp.options import FsdpConfig, count_sharding_ranks


def describe_state(options: FsdpConfig, topology: Topology, model: ModelConfig) -> StateLayout:
    """Return the layout of a model's state: sharded over the ranks of a copy, gathered layer by layer."""
    ranks, copies, host = count_sharding_ranks(topology) // options.replicate, options.replicate, options.cpu_offload
    weights = Holding("weights", ranks, trained=False, on_host=host)
    # beside adapters the base model stays out of checkpoints
    staged = (Holding("weights", ranks, trained=model.lora is not None, on_host=True), Holding("optimizer", ranks, on_host=True))
    # a single rank that computes in the weights' own precision keeps the plain module (`sharding.stays_whole`)
    if topology.world_size == 1 and model.dtype != "bfloat16" and not host:
        return StateLayout(staged=staged)
    once = options.gradient_sync == "pass"
    gathers = 2 if options.reshard_after_forward else 1
    return StateLayout(
        holdings=(
            weights,
            Holding("gradients", 1 if once else ranks, on_host=host and not once),
            Holding("optimizer", ranks, on_host=host),
        ),
        scoring=(Holding("weights", ranks, master=False, trained=False, on_host=host),),
        staged=staged,
        loading="parts" if _can_read_parts(topology, model) else "whole",
        gathered="layer" if options.reshard_after_forward else "model",
        traffic=(
            Traffic("weights", ranks, gathers, master=False),
            Traffic("gradients", ranks, per_step=once),
            Traffic("gradients", copies, 2, per_step=True, divided=ranks),
        ),
        divided=list_divided_patterns,
        spread_experts=options.expert_parallel,
        expert_rows="sent",
    )


def _can_read_parts(topology: Topology, model: ModelConfig) -> bool:
    """Return True where each rank reads its part of a model's files (`modeling.stored_weights.why_not_in_parts`, `placement.load_sharded`)."""
    needs_values = model.lora is not None and (model.lora.load_in_4bit or (model.lora.dora and model.lora.path is None))
    return topology.tp == 1 and topology.world_size > 1 and not needs_values
