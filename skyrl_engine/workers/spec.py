"""The orders of a rank at its start: plain values that pickle anywhere."""

import os
from collections.abc import Mapping
from typing import Any, Literal

from attrs import Factory, frozen

from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.optimizer_settings import OptimizerSettings
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.contracts.values.topology import Topology

Device = Literal["auto", "cpu", "cuda"]


@frozen
class WorkerSpec:
    """`plugins` are locks of the selected plugins by their place in the configuration; a rank loads the same plugins, or refuses. A
    rank with the backend alone loads and exports, and runs no pass.

    `environment` as in `BackendDescription`. `shown` are model scores that per-token outputs hold in addition to those that the losses read.
    `rows` as in `RankEnvironment`.
    """

    plugins: Mapping[str, Mapping[str, Any]]
    context: FactoryContext
    model: ModelConfig
    optimizer: OptimizerSettings | None
    topology: Topology
    device: Device = "auto"
    shown: frozenset[str] = frozenset()
    rows: RowKind = "padded"
    environment: Mapping[str, str] = Factory(dict)

    def variables(self) -> dict[str, str]:
        """Return the variables that a rank on a CUDA device starts with; what this process' environment says goes before the backend."""
        return {name: os.environ.get(name, value) for name, value in self.environment.items()}
