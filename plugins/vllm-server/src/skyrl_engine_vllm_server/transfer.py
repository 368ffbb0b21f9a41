"""Weight-transfer backends of vLLM over torch's process groups: a broadcast per tensor from the trainer, by gloo or NCCL.

The life cycle and the fields are those of vLLM's own `nccl` backend: init_weight_transfer_engine, start_weight_update, update_weights,
finish_weight_update.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import layerwise

from skyrl_engine_vllm_server.checksums import LoadedTensors
from skyrl_engine_vllm_server.groups import join_group, receive
from skyrl_engine_vllm_server.packed_heads import pack_heads_again


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The place where the trainer waits, and this server's place among the receivers."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_seconds: float = 300.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors that come, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receive tensors over TCP into memory of the host."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    nccl = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.loaded = LoadedTensors()
        self.taken: dict[str, str] = {}
        self._group: Any = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meet the trainer."""
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        where = init_info.master_address, init_info.master_port
        self._group = join_group(*where, rank, init_info.world_size, init_info.timeout_seconds, nccl=self.nccl)

    def start_weight_update(self) -> None:
        """Prepare the model to be loaded again."""
        self.loaded, self.taken = LoadedTensors(), {}
        layerwise.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load tensors. The base's method then waits for an accelerator, which need not be there."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive and load tensors, one at a time."""
        with self._recording():
            self.model.load_weights(self._receive(update_info))

    def _receive(self, update: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in receive(self._group, update.names, update.dtype_names, update.shapes, self._make_buffer):
            self.loaded.receive(name, tensor)
            yield name, tensor

    def _make_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device if self.nccl else "cpu")

    def finish_weight_update(self) -> None:
        """Process what is loaded as vLLM does at a start, and pack tied heads again."""
        with self._recording():
            layerwise.finalize_layerwise_reload(self.model, self.model_config)
        pack_heads_again(self.model)
        self.taken = dict(self.loaded.finish())

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Note what loaders of parameters are given: vLLM asks for the loader of a parameter when all of its layer's weights are there."""
        original = layerwise._get_original_loader
        layerwise._get_original_loader = lambda tensor: self.loaded.record(original(tensor))
        try:
            yield
        finally:
            layerwise._get_original_loader = original


class NcclTransferEngine(GlooTransferEngine):
    """Receive tensors on the GPU."""

    nccl = True
