"""Options of the `fsdp` backend, and how they lay out ranks. Imports no torch."""

from attrs import field, frozen
from attrs.validators import ge

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import Topology


@frozen
class FsdpConfig:
    """Options of the FSDP2 backend. Ranks that `tensor_parallel` leaves over are data-parallel."""

    tensor_parallel: int = field(default=1, validator=ge(1))
    """Ranks that share every layer: attention heads, feed-forward columns and the vocabulary. All of them score the same samples."""

    replicate: int = field(default=1, validator=ge(1))
    """Copies of the sharded model (hybrid sharding): weights are gathered inside a group of dp / replicate ranks, gradients are summed over
    all. Choose it so that a group fits the fast network."""

    reshard_after_forward: bool = True
    """Free each layer's gathered weights after its forward and gather them again in backward (less memory), or keep them until
    backward (less communication)."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and step there; layers visit the GPU to compute. CUDA only."""

    def topology(self, world_size: int) -> Topology:
        """The layout of `world_size` ranks. Raises UnsupportedError where the sizes do not divide them."""
        dp, rest = divmod(world_size, self.tensor_parallel)
        if rest:
            raise UnsupportedError(
                f"{world_size} ranks cannot be laid out with backend.tensor_parallel = {self.tensor_parallel}",
                remedy=f"Set run.ranks to a multiple of {self.tensor_parallel}, or change backend.tensor_parallel",
            )
        if dp % self.replicate:
            raise UnsupportedError(
                f"{dp} data-parallel ranks cannot be divided among backend.replicate = {self.replicate} copies of the model",
                remedy="Set backend.replicate to a divisor of the data-parallel ranks",
            )
        return Topology(dp=dp, tp=self.tensor_parallel)
