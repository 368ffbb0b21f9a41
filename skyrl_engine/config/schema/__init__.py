"""The configuration as attrs classes: one class and one file per TOML table. Sizes in samples, tokens or optimizer steps, as each name says.

Plugin tables (`[loss]`, `[backend]`, ...) hold `use`, a plugin reference, and the plugin's own options, which the plugin's own
schema validates. The text under each key is its meaning in `docs/reference/configuration.md`.
"""

from skyrl_engine.config.schema.checkpoint import CheckpointConfig
from skyrl_engine.config.schema.data import DataConfig, DataFormat, KnownFormat
from skyrl_engine.config.schema.engine import EngineConfig
from skyrl_engine.config.schema.evaluation import EvaluationConfig
from skyrl_engine.config.schema.metadata import KIND
from skyrl_engine.config.schema.missing_table import MissingTable
from skyrl_engine.config.schema.model import ModelTable
from skyrl_engine.config.schema.optimizer import OptimizerConfig
from skyrl_engine.config.schema.plugins import PluginsConfig
from skyrl_engine.config.schema.preference import PreferenceConfig
from skyrl_engine.config.schema.reward_model import RewardModelConfig, RewardModelTable, StepRule
from skyrl_engine.config.schema.rl import (
    EntropyControlConfig,
    EnvironmentTable,
    OverlongConfig,
    ReferenceConfig,
    RewardKlConfig,
    RlConfig,
    RolloutsConfig,
    TeacherConfig,
)
from skyrl_engine.config.schema.run import RunConfig
from skyrl_engine.config.schema.sampling import SamplingConfig
from skyrl_engine.config.schema.tables import GeneratorPlacement, GeneratorTable, LossTable, ObserverTable, PluginTable, TermTable
from skyrl_engine.config.schema.training import TrainingConfig
from skyrl_engine.contracts.values.model import PLACE, LoraConfig, ModelConfig

__all__ = [
    "KIND",
    "PLACE",
    "CheckpointConfig",
    "DataConfig",
    "DataFormat",
    "EngineConfig",
    "EntropyControlConfig",
    "EnvironmentTable",
    "EvaluationConfig",
    "GeneratorPlacement",
    "GeneratorTable",
    "KnownFormat",
    "LoraConfig",
    "LossTable",
    "MissingTable",
    "ModelConfig",
    "ModelTable",
    "ObserverTable",
    "OptimizerConfig",
    "OverlongConfig",
    "PluginTable",
    "PluginsConfig",
    "PreferenceConfig",
    "ReferenceConfig",
    "RewardKlConfig",
    "RewardModelConfig",
    "RewardModelTable",
    "RlConfig",
    "RolloutsConfig",
    "RunConfig",
    "SamplingConfig",
    "StepRule",
    "TeacherConfig",
    "TermTable",
    "TrainingConfig",
]
