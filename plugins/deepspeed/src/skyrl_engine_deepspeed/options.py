"""Options of the `deepspeed` backend, and the combinations that are refused. Imports no torch."""

from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, in_

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ComputeDtype


@frozen
class DeepSpeedConfig:
    """Options of the DeepSpeed backend."""

    zero_stage: Literal[0, 1, 2, 3] = field(default=3, validator=in_((0, 1, 2, 3)))
    """ZeRO stage (Rajbhandari et al. 2020, arXiv 1910.02054): ranks divide 0: nothing; 1: optimizer state; 2: gradients as well;
    3: weights as well."""

    offload_optimizer: bool = False
    """Keep optimizer state and float32 weights in host memory, and update them on the CPU. Needs CUDA and stage 1, 2 or 3."""

    offload_parameters: bool = False
    """Keep each rank's part of the weights in host memory while no layer computes with it. Needs CUDA and stage 3."""

    persistence_threshold: int = field(default=100_000, validator=ge(0))
    """Stage 3 keeps parameters of at most this many elements whole on every rank, which saves gathering them; 0: it divides all."""

    def refuse_contradictions(self) -> None:
        """Raises UnsupportedError if something is offloaded that this ZeRO stage does not divide."""
        for option, stages in (("offload_optimizer", (1, 2, 3)), ("offload_parameters", (3,))):
            if getattr(self, option) and self.zero_stage not in stages:
                raise UnsupportedError(
                    f"backend.{option} needs ZeRO stage {' or '.join(map(str, stages))}, the run asks for stage {self.zero_stage}",
                    remedy=f"Set backend.zero_stage to {stages[-1]} or backend.{option} to false",
                )

    def refuse_precision(self, dtype: ComputeDtype, *, learns: bool) -> None:
        """Raises UnsupportedError if DeepSpeed would round weights or gradients below the precision of `dtype` at this stage."""
        if dtype == "float64":
            raise UnsupportedError(
                "DeepSpeed keeps weights and sums gradients in float32 at most, float64 would be rounded on the way",
                remedy='Set model.dtype to "float32", or backend.use to "fsdp"',
            )
        if dtype == "bfloat16" and self.zero_stage == 0 and learns:
            raise UnsupportedError(
                "ZeRO stage 0 sums bfloat16 gradients in bfloat16 and keeps no float32 weights next to a replicated model",
                remedy="Set backend.zero_stage to 1, 2 or 3",
            )
