"""megatron-core's process groups, which are global to a process: made for its first model and destroyed with its last."""

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import Topology
from skyrl_engine_megatron.library import parallel_state


@frozen(eq=False)
class ExpertRanks:
    """Ranks with different tokens that hold experts for each other: those of one block of expert-parallel ranks with this one's
    tensor-parallel rank. `device` joins them for tensors of the model, `host` for numbers of the host.
    """

    device: dist.ProcessGroup
    host: dist.ProcessGroup

    @classmethod
    def make(cls, topology: Topology, expert_parallel: int) -> "ExpertRanks":
        """Make the groups of all ranks, and return this rank's; every rank calls it."""
        own: ExpertRanks | None = None
        for first in range(0, topology.world_size, expert_parallel):
            for tp in range(topology.tp):
                ranks = range(first + tp, first + expert_parallel, topology.tp)
                made = [dist.new_group(list(ranks), backend=backend) for backend in (None, "gloo")]
                if dist.get_rank() in ranks:
                    own = cls(*made)
        assert own is not None, "every rank belongs to a block"
        return own

    @property
    def size(self) -> int:
        return self.device.size()

    def leave(self) -> None:
        """Destroy the groups."""
        for group in (self.device, self.host):
            dist.destroy_process_group(group)

    def most(self, tokens: int) -> int:
        """Return the largest number of tokens of these ranks; the device takes no part."""
        largest = torch.tensor(tokens)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.host)
        return int(largest)


@define
class ParallelGroups:
    """The process groups of this process, with a count of the models that use them."""

    users: int = 0
    layout: tuple[Topology, int, int] | None = field(default=None)
    experts: ExpertRanks | None = field(default=None)
    """The ranks that hold experts for each other; None: tensor-parallel ranks alone hold them."""

    def take(self, topology: Topology, virtual_pipeline: int, expert_parallel: int = 1) -> bool:
        """Make the groups, or share existing ones; return True if they were made.

        Raises UnsupportedError while a model of another layout uses them.
        """
        requested = (topology, virtual_pipeline, expert_parallel)
        if self.users and self.layout != requested:
            raise UnsupportedError(
                f"this process holds a megatron model laid out as {self.layout}, another one wants {requested}",
                remedy="Close the first model, or use one layout for all models of a process",
            )
        if not self.users:
            if parallel_state.is_initialized():
                raise UnsupportedError(
                    "megatron-core's process groups were made in this process by another program",
                    remedy="Run the backend in a process of its own",
                )
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=topology.tp,
                pipeline_model_parallel_size=topology.pp,
                context_parallel_size=topology.cp,
                virtual_pipeline_model_parallel_size=virtual_pipeline if virtual_pipeline > 1 else None,
                # columns of experts are divided as other layers are, unless experts are whole
                expert_model_parallel_size=expert_parallel,
                expert_tensor_parallel_size=1 if expert_parallel > 1 else None,
                create_gloo_process_groups=False,
            )
            self.experts = ExpertRanks.make(topology, expert_parallel) if expert_parallel > topology.tp else None
            self.layout = requested
        self.users += 1
        return self.users == 1

    def give_back(self) -> None:
        """Count one model less, and destroy the groups with the last."""
        assert self.users, "groups given back that nobody took"
        self.users -= 1
        if not self.users:
            groups = [group for group in parallel_state._global_process_group_list or () if group is not None]  # noqa: SLF001 - the only list of them
            if self.experts is not None:
                self.experts.leave()
                self.experts = None
            # it forgets the groups without closing their threads and sockets
            parallel_state.destroy_model_parallel()
            for group in groups:
                dist.destroy_process_group(group)
            self.layout = None


groups = ParallelGroups()
