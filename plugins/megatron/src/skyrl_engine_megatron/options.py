"""Options of the `megatron` backend, and how they lay out ranks. Imports no torch."""

from typing import Literal

from attrs import field, frozen
from attrs.validators import and_, ge, in_, lt

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import Topology


@frozen
class MegatronConfig:
    """Options of the Megatron-Core backend. Ranks that the sizes leave over are data-parallel."""

    tensor_parallel: int = field(default=1, validator=ge(1))
    """Ranks that share every layer: attention heads, feed-forward columns and the vocabulary."""

    pipeline_parallel: int = field(default=1, validator=ge(1))
    """Stages that the layers are divided into, one after another; micro-batches pass through them 1F1B."""

    virtual_pipeline: int = field(default=1, validator=ge(1))
    """Pieces per stage: with more than 1 a stage holds every so many-th piece of the layers (interleaved 1F1B), and idles less."""

    context_parallel: int = field(default=1, validator=ge(1))
    """Ranks that share every sequence: each holds a part of its tokens, and sees the keys and values of all of them."""

    expert_parallel: int = field(default=1, validator=ge(1))
    """Of a mixture of experts. As large as tensor_parallel: those ranks hold whole experts, each some; 1: they share every expert's columns."""

    sequence_parallel: bool = True
    """Between tensor-parallel regions, keep each rank's share of the tokens instead of all of them: less memory, same communication."""

    distributed_optimizer: bool = True
    """Shard AdamW's state and update over data-parallel ranks."""

    attention: Literal["auto", "transformer_engine", "torch"] = field(
        default="auto", validator=in_(("auto", "transformer_engine", "torch"))
    )
    """Whose kernels: "transformer_engine", which knows bfloat16 on CUDA; "torch"; "auto": the first where it is installed and does so."""

    router_balance_coefficient: float = field(default=0.0, validator=and_(ge(0.0), lt(float("inf"))))
    """Of a mixture of experts: weight of the routers' balance loss, a mean over the step's sequences, added up over layers; 0: none."""

    router_z_coefficient: float = field(default=0.0, validator=and_(ge(0.0), lt(float("inf"))))
    """Of a mixture of experts: weight of the routers' z-loss, a mean over the step's tokens, added up over layers; 0: none."""

    @property
    def whole_experts(self) -> bool:
        """Whether ranks share a mixture's experts out, rather than every expert's columns."""
        return self.expert_parallel > 1

    @property
    def router_losses(self) -> bool:
        """Whether routers have losses of their own."""
        return self.router_balance_coefficient > 0 or self.router_z_coefficient > 0

    def topology(self, world_size: int) -> Topology:
        """The layout of `world_size` ranks. Raises UnsupportedError where the sizes do not divide them."""
        taken = self.tensor_parallel * self.context_parallel * self.pipeline_parallel
        dp, rest = divmod(world_size, taken)
        if rest or not dp:
            raise UnsupportedError(
                f"{world_size} ranks cannot be laid out as tensor_parallel = {self.tensor_parallel}, context_parallel = "
                f"{self.context_parallel}, pipeline_parallel = {self.pipeline_parallel}, which take {taken} together",
                remedy=f"Set run.ranks to a multiple of {taken}, or make the backend's parallel sizes smaller",
            )
        if self.expert_parallel not in (1, self.tensor_parallel):
            raise UnsupportedError(
                f"expert_parallel = {self.expert_parallel}: tensor-parallel ranks hold the experts, and there are {self.tensor_parallel}",
                remedy="Set backend.expert_parallel to 1, or to backend.tensor_parallel",
            )
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise UnsupportedError(
                f"virtual_pipeline = {self.virtual_pipeline} interleaves the pieces of pipeline stages, and pipeline_parallel is 1",
                remedy="Set backend.virtual_pipeline to 1, or backend.pipeline_parallel to 2 or more",
            )
        return Topology(dp=dp, tp=self.tensor_parallel, cp=self.context_parallel, pp=self.pipeline_parallel)
