"""Options of the `fsdp` backend, and the layout of ranks that follows from them. Imports no torch."""

from typing import Final, Literal

from attrs import field, frozen
from attrs.validators import ge, in_

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import Capability, Topology

WHOLE_ROWS: Final[frozenset[Capability]] = frozenset({"adafactor", "muon", "adamw_8bit"})
"""Optimizers that step whole matrices or rows: with weights divided one way alone, and on the device that ranks communicate on."""


@frozen
class FsdpConfig:
    """Options of the FSDP2 backend.

    The number of data-parallel ranks is `run.ranks` / (`tensor_parallel` x `context_parallel`).
    """

    tensor_parallel: int = field(default=1, validator=ge(1))
    """Number of ranks that share every layer: each holds a part of the attention heads, the feed-forward columns and the vocabulary. They
    score the same samples."""

    context_parallel: int = field(default=1, validator=ge(1))
    """Number of ranks that share every sequence: each computes a part of its tokens, and attends to the keys and values of all of them. The
    model is sharded over them as over data-parallel ranks."""

    expert_parallel: int = field(default=1, validator=ge(1))
    """Number of data-parallel and context-parallel ranks that share the experts of every layer: each holds some of them whole, and tokens are
    sent to the ranks of their experts. Tensor-parallel ranks share experts besides: `expert_parallel` x `tensor_parallel` ranks hold all of a
    layer. With `replicate` they are ranks of one copy of the model."""

    replicate: int = field(default=1, validator=ge(1))
    """Number of copies of the sharded model (hybrid sharding): each group of dp x cp / replicate ranks holds one and gathers its weights
    inside the group; gradients are summed over all groups once a pass. Choose it so that a group lies within the fast network."""

    reshard_after_forward: bool = True
    """true: free each layer's gathered weights after its forward pass and gather them again for backward (less memory); false: keep them
    until backward (less communication)."""

    gradient_sync: Literal["micro_batch", "pass"] = field(default="micro_batch", validator=in_(("micro_batch", "pass")))
    """`micro_batch`: the ranks of a copy sum the gradient of every micro-batch into their shards; `pass`: each rank keeps its own whole
    gradient, 4 bytes per parameter, and they sum once, with the last micro-batch of a pass (less communication)."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and update them on the CPU; layers are copied to the GPU to compute. Needs
    CUDA."""

    float8: Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = field(
        default="off", validator=in_(("off", "tensorwise", "rowwise", "rowwise_with_gw_hp"))
    )
    """Multiply in float8 in the linear layers of the decoder, by the recipe of torchao of this name: one scale for a tensor ("tensorwise") or
    for a row; the last computes gradients of weights in bfloat16. Needs torchao, `model.dtype = "bfloat16"` and CUDA devices from compute
    capability 8.9 on. Head and embeddings, weights, gradients and checkpoints stay as they are."""

    float8_emulation: bool = False
    """Round as `float8` does and multiply in float32, on any device: slow, to see what the rounding does to a run."""

    def topology(self, world_size: int) -> Topology:
        """Return the layout of `world_size` ranks. Raises UnsupportedError if the sizes do not divide it."""
        dp, rest = divmod(world_size, self.tensor_parallel * self.context_parallel)
        if rest or not dp:
            sizes = {"tensor_parallel": self.tensor_parallel, "context_parallel": self.context_parallel}
            set_sizes = " and ".join(f"backend.{name} = {size}" for name, size in sizes.items() if size > 1)
            raise UnsupportedError(
                f"{world_size} ranks cannot be laid out with {set_sizes}",
                remedy=f"Set run.ranks to a multiple of {self.tensor_parallel * self.context_parallel}, or change the backend's parallel sizes",
            )
        topology = Topology(dp=dp, tp=self.tensor_parallel, cp=self.context_parallel)
        if (shards := count_sharding_ranks(topology)) % self.replicate:
            kind = "data-parallel" if topology.cp == 1 else "data-parallel and context-parallel"
            raise UnsupportedError(
                f"{shards} {kind} ranks cannot be divided among backend.replicate = {self.replicate} copies of the model",
                remedy=f"Set backend.replicate to a divisor of {shards}",
            )
        self._refuse_expert_ranks(shards)
        return topology

    def _refuse_expert_ranks(self, shards: int) -> None:
        """Raise UnsupportedError where data-parallel and context-parallel ranks cannot share experts as `expert_parallel` says."""
        if self.expert_parallel == 1:
            return
        chosen = f"backend.expert_parallel = {self.expert_parallel}"
        if (ranks := shards // self.replicate) % self.expert_parallel:
            copy = f" of each of backend.replicate = {self.replicate} copies of the model" if self.replicate > 1 else ""
            raise UnsupportedError(
                f"the {ranks} data-parallel and context-parallel ranks{copy} cannot be divided into groups of {chosen}",
                remedy=f"Set backend.expert_parallel to a divisor of {ranks}",
            )


def count_sharding_ranks(topology: Topology) -> int:
    """Return the number of ranks over which FSDP shards the copies of a model: data-parallel and context-parallel ones."""
    return topology.dp * topology.cp
