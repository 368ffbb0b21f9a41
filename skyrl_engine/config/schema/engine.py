"""The whole configuration."""

from collections.abc import Mapping
from typing import Any

from attrs import Factory, frozen

from skyrl_engine.config.schema.checkpoint import CheckpointConfig
from skyrl_engine.config.schema.data import DataConfig
from skyrl_engine.config.schema.evaluation import EvaluationConfig
from skyrl_engine.config.schema.model import ModelConfig
from skyrl_engine.config.schema.optimizer import OptimizerConfig
from skyrl_engine.config.schema.plugins import PluginsConfig
from skyrl_engine.config.schema.run import RunConfig
from skyrl_engine.config.schema.tables import LossTable, PluginTable
from skyrl_engine.config.schema.training import TrainingConfig


@frozen
class EngineConfig:
    """A whole configuration file."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig = RunConfig()
    plugins: PluginsConfig = PluginsConfig()
    collator: PluginTable = PluginTable("padded")
    loss: LossTable = LossTable("cross_entropy")
    reducer: PluginTable = PluginTable("token_mean")
    backend: PluginTable = PluginTable("fsdp")
    merger: PluginTable = PluginTable("ordered")
    observers: Mapping[str, Mapping[str, Any]] = Factory(dict)
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig(epochs=1.0)
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
