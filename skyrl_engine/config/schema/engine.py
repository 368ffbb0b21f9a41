"""The whole configuration."""

from collections.abc import Mapping
from typing import Any

from attrs import Factory, field, frozen

from skyrl_engine.config.schema.checkpoint import CheckpointConfig
from skyrl_engine.config.schema.data import DataConfig
from skyrl_engine.config.schema.evaluation import EvaluationConfig
from skyrl_engine.config.schema.metadata import KIND
from skyrl_engine.config.schema.missing_table import MissingTable
from skyrl_engine.config.schema.model import ModelTable
from skyrl_engine.config.schema.optimizer import OptimizerConfig
from skyrl_engine.config.schema.plugins import PluginsConfig
from skyrl_engine.config.schema.preference import PreferenceConfig
from skyrl_engine.config.schema.reward_model import RewardModelConfig
from skyrl_engine.config.schema.rl import EnvironmentTable, ReferenceConfig, RlConfig, RolloutsConfig, TeacherConfig
from skyrl_engine.config.schema.run import RunConfig
from skyrl_engine.config.schema.sampling import SamplingConfig
from skyrl_engine.config.schema.tables import PluginTable
from skyrl_engine.config.schema.training import TrainingConfig
from skyrl_engine.config.trainers import DEFAULT_TRAINER


@frozen(kw_only=True)
class EngineConfig:
    """A whole configuration. A table that this run does not have is a `MissingTable`, whose keys cannot be read.

    `selected` are the tables that select one plugin each, by kind; in a file they stand among the others: `[loss]`, `[backend]`.
    Each table of a list, such as `[[environments]]`, selects one too.
    """

    trainer: str = DEFAULT_TRAINER
    """The trainer of the run; it decides which tables the configuration may have."""

    model: ModelTable
    data: DataConfig
    run: RunConfig = RunConfig()
    plugins: PluginsConfig = PluginsConfig()
    selected: Mapping[str, PluginTable]
    observers: Mapping[str, Mapping[str, Any]] = Factory(dict)
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig(epochs=1.0)
    preference: PreferenceConfig = PreferenceConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    rl: RlConfig = RlConfig()
    environments: tuple[EnvironmentTable, ...] = field(default=(), metadata={KIND: "environment"})
    group_filters: tuple[PluginTable, ...] = field(default=(), metadata={KIND: "group_filter"})
    rollouts: RolloutsConfig = RolloutsConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trainer_options: Any = None
    """The own table of a trainer of another distribution, which is called as the trainer is; None for one without."""

    def has(self, table: str) -> bool:
        """Say if this run has a table and its keys can be read."""
        if table == "trainer_options":
            return self.trainer_options is not None
        return not isinstance(getattr(self, table), MissingTable)
