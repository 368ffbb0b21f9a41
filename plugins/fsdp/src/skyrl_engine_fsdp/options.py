"""Options of the `fsdp` backend, and the layout of ranks that follows from them. Imports no torch."""

from typing import Final

from attrs import field, frozen
from attrs.validators import ge

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import Capability, Topology

WHOLE_ROWS: Final[frozenset[Capability]] = frozenset({"adafactor", "muon", "adamw_8bit"})
"""Optimizers that step whole matrices or rows: with weights divided one way alone, and on the device that ranks communicate on."""


@frozen
class FsdpConfig:
    """Options of the FSDP2 backend. The number of data-parallel ranks is `run.ranks` divided by `tensor_parallel`."""

    tensor_parallel: int = field(default=1, validator=ge(1))
    """Number of ranks that share every layer: each holds a part of the attention heads, the feed-forward columns and the vocabulary. They
    score the same samples."""

    replicate: int = field(default=1, validator=ge(1))
    """Number of copies of the sharded model (hybrid sharding): each group of dp / replicate ranks holds one and gathers its weights inside
    the group; gradients are summed over all groups. Choose it so that a group lies within the fast network."""

    reshard_after_forward: bool = True
    """true: free each layer's gathered weights after its forward pass and gather them again for backward (less memory); false: keep them
    until backward (less communication)."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and update them on the CPU; layers are copied to the GPU to compute. Needs
    CUDA."""

    def topology(self, world_size: int) -> Topology:
        """Return the layout of `world_size` ranks. Raises UnsupportedError if the sizes do not divide it."""
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
