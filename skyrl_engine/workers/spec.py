"""The orders of a rank at its start: plain values that pickle anywhere."""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from skyrl_engine.contracts.kinds.backend import AdamWSettings
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.topology import Topology

Device = Literal["auto", "cpu", "cuda"]


@frozen
class WorkerSpec:
    """`plugins` are locks of the selected plugins by their place in the configuration; a rank loads the same plugins, or refuses. A
    rank with the backend alone loads and exports, and runs no pass.

    `shown` are model scores that per-token outputs hold beside those that the losses read. `packed_rows` as in `RankEnvironment`.
    """

    plugins: Mapping[str, Mapping[str, Any]]
    context: FactoryContext
    model: ModelConfig
    optimizer: AdamWSettings | None
    topology: Topology
    device: Device = "auto"
    shown: frozenset[str] = frozenset()
    packed_rows: bool = False
