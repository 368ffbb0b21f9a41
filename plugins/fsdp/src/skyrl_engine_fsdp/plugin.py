"""Entry point of the `fsdp` backend. Imports no torch: describing the backend happens on the controller."""

from typing import Any

from attrs import frozen

from skyrl_engine import hookimpl
from skyrl_engine.contracts.backend import Backend, BackendDescription
from skyrl_engine.contracts.topology import Topology


@frozen
class FsdpConfig:
    """Options of the FSDP2 backend."""

    reshard_after_forward: bool = True
    """Free each layer's gathered weights after its forward and gather them again in backward (less memory), or keep them until
    backward (less communication)."""


class FsdpPlugin:
    """Hook implementations of the `fsdp` backend."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return FsdpConfig

    @hookimpl
    def skyrl_engine_describe_backend(self, world_size: int) -> BackendDescription:
        return BackendDescription(Topology(dp=world_size), frozenset({"padded", "packed"}))

    @hookimpl
    def skyrl_engine_make_backend(self, config: FsdpConfig | None) -> Backend:
        from skyrl_engine_fsdp.backend import FsdpBackend

        return FsdpBackend(config or FsdpConfig())


fsdp = FsdpPlugin()
