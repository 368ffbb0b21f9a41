"""megatron-core's process groups, which are global to a process: made for its first model and destroyed with its last."""

import torch.distributed as dist
from attrs import define, field

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import Topology
from skyrl_engine_megatron.library import parallel_state


@define
class ParallelGroups:
    """The process groups of this process, with a count of the models that use them."""

    users: int = 0
    layout: tuple[Topology, int] | None = field(default=None)

    def take(self, topology: Topology, virtual_pipeline: int) -> None:
        """Make the groups, or share existing ones. Raises UnsupportedError while a model of another layout uses them."""
        requested = (topology, virtual_pipeline)
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
                create_gloo_process_groups=False,
            )
            self.layout = requested
        self.users += 1

    def give_back(self) -> None:
        """Count one model less, and destroy the groups with the last."""
        assert self.users, "groups given back that nobody took"
        self.users -= 1
        if not self.users:
            groups = [group for group in parallel_state._global_process_group_list or () if group is not None]  # noqa: SLF001 - the only list of them
            # it forgets the groups without closing their threads and sockets
            parallel_state.destroy_model_parallel()
            for group in groups:
                dist.destroy_process_group(group)
            self.layout = None


groups = ParallelGroups()
