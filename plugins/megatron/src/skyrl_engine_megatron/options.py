"""Options of the `megatron` backend, and the layout of ranks that follows from them. Imports no torch."""

from typing import Literal

from attrs import field, frozen
from attrs.validators import and_, ge, in_, lt

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import Topology


@frozen
class MegatronConfig:
    """Options of the Megatron-Core backend.

    The number of data-parallel ranks is `run.ranks` / (`tensor_parallel` x `context_parallel` x `pipeline_parallel`).
    """

    tensor_parallel: int = field(default=1, validator=ge(1))
    """Number of ranks that share every layer: each holds a part of the attention heads, the feed-forward columns and the vocabulary."""

    pipeline_parallel: int = field(default=1, validator=ge(1))
    """Number of consecutive stages that the layers are divided into; micro-batches pass through them in the 1F1B schedule."""

    virtual_pipeline: int = field(default=1, validator=ge(1))
    """Each stage holds `virtual_pipeline` non-adjacent chunks of layers (interleaved 1F1B, which idles less); 1: one chunk of consecutive
    layers."""

    context_parallel: int = field(default=1, validator=ge(1))
    """Number of ranks that share every sequence: each computes a part of its tokens, and attends to the keys and values of all of them."""

    expert_parallel: int = field(default=1, validator=ge(1))
    """Number of ranks among which the experts of a mixture are divided, each of which holds some of them, whole; 1: tensor-parallel ranks
    each hold a part of every expert's columns. A multiple of `tensor_parallel`: above it, ranks that train on different tokens compute for
    each other, so that it divides the number of ranks of a pipeline stage."""

    sequence_parallel: bool = True
    """Between tensor-parallel regions, let each tensor-parallel rank keep its share of the tokens instead of all of them: less memory for
    the same communication."""

    distributed_optimizer: bool = True
    """Shard AdamW's state and its update over data-parallel ranks."""

    attention: Literal["auto", "transformer_engine", "torch"] = field(
        default="auto", validator=in_(("auto", "transformer_engine", "torch"))
    )
    """Attention kernels: "transformer_engine" (bfloat16 on CUDA only), "torch", or "auto": Transformer Engine where it is installed, supports
    the run and agrees with torch's attention, else torch."""

    router_balance_coefficient: float = field(default=0.0, validator=and_(ge(0.0), lt(float("inf"))))
    """Coefficient of the balance loss of a mixture's routers, a mean over the step's sequences that is summed over layers; 0: no such loss."""

    router_z_coefficient: float = field(default=0.0, validator=and_(ge(0.0), lt(float("inf"))))
    """Coefficient of the z-loss of a mixture's routers, a mean over the step's tokens that is summed over layers; 0: no such loss."""

    router_bias_rate: float = field(default=0.0, validator=and_(ge(0.0), lt(float("inf"))))
    """Rate at which every optimizer step moves the biases that routers choose experts by (DeepSeek-V3, GLM-4.5), without a loss: up for experts
    that fewer of the step's tokens chose than the mean, down for others; 0: biases stay as they are. DeepSeek-V3 was trained at 0.001."""

    @property
    def whole_experts(self) -> bool:
        """True if each rank holds some experts whole; False if it holds a part of every expert."""
        return self.expert_parallel > 1

    @property
    def spread_experts(self) -> int:
        """The number of ranks with different tokens among which experts are divided; 1: tensor-parallel ranks alone hold them."""
        return self.expert_parallel // self.tensor_parallel if self.whole_experts else 1

    @property
    def router_losses(self) -> bool:
        """True if routers add losses of their own to the objective."""
        return self.router_balance_coefficient > 0 or self.router_z_coefficient > 0

    def topology(self, world_size: int) -> Topology:
        """Return the layout of `world_size` ranks. Raises UnsupportedError if the sizes do not divide it or contradict each other."""
        taken = self.tensor_parallel * self.context_parallel * self.pipeline_parallel
        dp, rest = divmod(world_size, taken)
        if rest or not dp:
            raise UnsupportedError(
                f"{world_size} ranks cannot be laid out as tensor_parallel = {self.tensor_parallel}, context_parallel = "
                f"{self.context_parallel}, pipeline_parallel = {self.pipeline_parallel}, which take {taken} together",
                remedy=f"Set run.ranks to a multiple of {taken}, or make the backend's parallel sizes smaller",
            )
        if self.whole_experts and self.expert_parallel % self.tensor_parallel:
            raise UnsupportedError(
                f"expert_parallel = {self.expert_parallel} is no multiple of tensor_parallel = {self.tensor_parallel}, which share tokens",
                remedy="Set backend.expert_parallel to 1, or to a multiple of backend.tensor_parallel",
            )
        if (stage := world_size // self.pipeline_parallel) % self.expert_parallel:
            raise UnsupportedError(
                f"expert_parallel = {self.expert_parallel} does not divide the {stage} ranks of a pipeline stage, which hold the experts",
                remedy=f"Set backend.expert_parallel to a divisor of {stage}",
            )
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise UnsupportedError(
                f"virtual_pipeline = {self.virtual_pipeline} interleaves the pieces of pipeline stages, and pipeline_parallel is 1",
                remedy="Set backend.virtual_pipeline to 1, or backend.pipeline_parallel to 2 or more",
            )
        return Topology(dp=dp, tp=self.tensor_parallel, cp=self.context_parallel, pp=self.pipeline_parallel)
