"""skyrl_engine: a post-training engine for language models whose parts are plugins chosen by name.

This facade is what a plugin imports: `hookimpl`, the decorators (`loss`, `reward`, ...), the values that cross the
contracts, and the errors; and what a program of one's own opens: `Engine`, and `read_rollouts`. Names are imported when first used, so that
`skyrl-engine --help` pays for none of them.
"""

from typing import TYPE_CHECKING

from skyrl_engine.lazy import lazily

if TYPE_CHECKING:
    from skyrl_engine.contracts.kinds.loss import LossOutput, LossTokens
    from skyrl_engine.contracts.kinds.reducer import BatchStructure
    from skyrl_engine.contracts.values.outputs import BatchOutput, Metric, RankOutput
    from skyrl_engine.engine.engine import Engine
    from skyrl_engine.environments.functions import group_reward, reward
    from skyrl_engine.errors import (
        CheckpointError,
        ColumnError,
        ConfigError,
        ContractError,
        DataError,
        EngineClosedError,
        EngineError,
        ImageError,
        ModelError,
        OutputError,
        PluginAmbiguousError,
        PluginBlockedError,
        PluginBrokenError,
        PluginError,
        PluginIncompatibleError,
        PluginNotFoundError,
        RolloutError,
        StoreError,
        UnsupportedError,
        WorkerError,
    )
    from skyrl_engine.hooks.decorators import advantage, correction, group_filter, loss, reducer
    from skyrl_engine.hooks.markers import hookimpl
    from skyrl_engine.rollout.exported import read_rollouts

__version__ = "0.3.0"

__all__ = [
    "BatchOutput",
    "BatchStructure",
    "CheckpointError",
    "ColumnError",
    "ConfigError",
    "ContractError",
    "DataError",
    "Engine",
    "EngineClosedError",
    "EngineError",
    "ImageError",
    "LossOutput",
    "LossTokens",
    "Metric",
    "ModelError",
    "OutputError",
    "PluginAmbiguousError",
    "PluginBlockedError",
    "PluginBrokenError",
    "PluginError",
    "PluginIncompatibleError",
    "PluginNotFoundError",
    "RankOutput",
    "RolloutError",
    "StoreError",
    "UnsupportedError",
    "WorkerError",
    "__version__",
    "advantage",
    "correction",
    "group_filter",
    "group_reward",
    "hookimpl",
    "loss",
    "read_rollouts",
    "reducer",
    "reward",
]

_HOMES = {
    "BatchOutput": "skyrl_engine.contracts.values.outputs",
    "BatchStructure": "skyrl_engine.contracts.kinds.reducer",
    "CheckpointError": "skyrl_engine.errors",
    "ColumnError": "skyrl_engine.errors",
    "ConfigError": "skyrl_engine.errors",
    "ContractError": "skyrl_engine.errors",
    "DataError": "skyrl_engine.errors",
    "Engine": "skyrl_engine.engine.engine",
    "EngineClosedError": "skyrl_engine.errors",
    "EngineError": "skyrl_engine.errors",
    "ImageError": "skyrl_engine.errors",
    "LossOutput": "skyrl_engine.contracts.kinds.loss",
    "LossTokens": "skyrl_engine.contracts.kinds.loss",
    "Metric": "skyrl_engine.contracts.values.outputs",
    "ModelError": "skyrl_engine.errors",
    "OutputError": "skyrl_engine.errors",
    "PluginAmbiguousError": "skyrl_engine.errors",
    "PluginBlockedError": "skyrl_engine.errors",
    "PluginBrokenError": "skyrl_engine.errors",
    "PluginError": "skyrl_engine.errors",
    "PluginIncompatibleError": "skyrl_engine.errors",
    "PluginNotFoundError": "skyrl_engine.errors",
    "RolloutError": "skyrl_engine.errors",
    "StoreError": "skyrl_engine.errors",
    "RankOutput": "skyrl_engine.contracts.values.outputs",
    "UnsupportedError": "skyrl_engine.errors",
    "WorkerError": "skyrl_engine.errors",
    "advantage": "skyrl_engine.hooks.decorators",
    "correction": "skyrl_engine.hooks.decorators",
    "group_filter": "skyrl_engine.hooks.decorators",
    "group_reward": "skyrl_engine.environments.functions",
    "hookimpl": "skyrl_engine.hooks.markers",
    "loss": "skyrl_engine.hooks.decorators",
    "read_rollouts": "skyrl_engine.rollout.exported",
    "reducer": "skyrl_engine.hooks.decorators",
    "reward": "skyrl_engine.environments.functions",
}


__getattr__ = lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
