"""The parts of a model's state that the ZeRO stages leave on each rank, and what they gather and sum. Imports no torch."""

from typing import Final

from skyrl_engine.contracts import Holding, ModelConfig, StateLayout, Traffic
from skyrl_engine_deepspeed.options import DeepSpeedConfig

BUCKET: Final = 50_000_000
"""Numbers that are reduced or gathered at once; buffers of this size are allocated."""

_MOST_GATHERED: Final = 1_000_000_000
"""Numbers that stage 3 keeps whole because they are needed again soon: DeepSpeed's `stage3_max_live_parameters`."""


def describe_state(options: DeepSpeedConfig, ranks: int, model: ModelConfig) -> StateLayout:
    """Return the layout of a model's state: stage 1 divides the optimizer's, 2 gradients, 3 weights; masters are copies from stage 1 on."""
    stage, host = options.zero_stage, options.offload_optimizer
    # each rank writes what its optimizer owns; at stage 0 rank 0 writes all
    shares = 1 if stage == 0 else ranks
    staged = (Holding("weights", shares, trained=model.lora is not None, on_host=True), Holding("optimizer", shares, on_host=True))
    if stage == 0:
        scored = Holding("weights", master=False, trained=False)
        return StateLayout(scoring=(scored,), staged=staged, traffic=(Traffic("gradients", ranks, 2, per_step=True),))
    divided = ranks if stage == 3 else 1
    weights = Holding("weights", divided, master=False, trained=False, on_host=options.offload_parameters)
    whole = Traffic("weights", ranks, 2, master=False) if stage == 3 else Traffic("weights", ranks, master=False, per_step=True)
    return StateLayout(
        holdings=(
            weights,
            Holding("weights", ranks, on_host=host),
            Holding("gradients", ranks if stage >= 2 else 1, on_host=host),
            Holding("optimizer", ranks, on_host=host),
        ),
        scoring=(weights,),
        staged=staged,
        gathered="model" if stage == 3 and ranks > 1 else "nothing",
        most_gathered=_MOST_GATHERED,
        # in float32 at stage 3, else in the precision of the computation
        buffers=BUCKET // 2 if stage < 3 and model.dtype == "bfloat16" else BUCKET,
        traffic=(whole, Traffic("gradients", ranks, 1 if stage >= 2 else 2, per_step=stage < 2)),
    )
