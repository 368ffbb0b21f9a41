"""The parts of a model's state that a rank of megatron-core holds, and what data-parallel ranks gather and sum. Imports no torch."""

from skyrl_engine.contracts import Holding, ModelConfig, StateLayout, Topology, Traffic
from skyrl_engine_megatron.options import MegatronConfig


def count_writers(topology: Topology) -> int:
    """Count the ranks of a pipeline stage, which share the parts of a checkpoint."""
    return topology.dp * topology.cp * topology.tp


def describe_state(options: MegatronConfig, topology: Topology, model: ModelConfig) -> StateLayout:
    """Return the layout of a model's state: weights and gradients whole, masters and moments over replicas where they are sharded."""
    replicas = topology.dp * topology.cp
    ranks = replicas if options.distributed_optimizer else 1
    weights = Holding("weights", master=False, trained=False)
    # a master in the weights' own precision is their memory
    masters = (Holding("weights", ranks),) if model.dtype == "bfloat16" else ()
    sums = Traffic("gradients", replicas, 1 if ranks > 1 else 2, per_step=True)
    return StateLayout(
        holdings=(weights, *masters, Holding("gradients"), Holding("optimizer", ranks)),
        scoring=(weights,),
        # the parts of a stage are dealt out to its ranks, whole
        staged=(
            Holding("weights", replicas, trained=model.lora is not None, on_host=True),
            Holding("optimizer", replicas, on_host=True),
        ),
        sequence_parallel=options.sequence_parallel and options.tensor_parallel > 1,
        layers="megatron-core",
        pieces=options.virtual_pipeline,
        spread_experts=options.spread_experts,
        traffic=(sums, Traffic("weights", ranks, master=False, per_step=True)),
    )
