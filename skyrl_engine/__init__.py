"""skyrl_engine: a post-training engine for language models whose disputed parts are plugins chosen by name.

This facade is what a plugin imports: `hookimpl`, the `loss`, `correction` and `reducer` decorators, the values that cross the contracts,
and the base error. Names are imported when first used, so that `skyrl-engine --help` pays for none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_engine.contracts.loss import LossOutput, LossTokens
    from skyrl_engine.contracts.outputs import BatchOutput, Metric, RankOutput
    from skyrl_engine.contracts.reducer import BatchStructure
    from skyrl_engine.errors import EngineError
    from skyrl_engine.hooks.decorators import correction, loss, reducer
    from skyrl_engine.hooks.markers import hookimpl

__version__ = "0.1.0"

__all__ = [
    "BatchOutput",
    "BatchStructure",
    "EngineError",
    "LossOutput",
    "LossTokens",
    "Metric",
    "RankOutput",
    "__version__",
    "correction",
    "hookimpl",
    "loss",
    "reducer",
]

_HOMES = {
    "BatchOutput": "skyrl_engine.contracts.outputs",
    "BatchStructure": "skyrl_engine.contracts.reducer",
    "EngineError": "skyrl_engine.errors",
    "LossOutput": "skyrl_engine.contracts.loss",
    "LossTokens": "skyrl_engine.contracts.loss",
    "Metric": "skyrl_engine.contracts.outputs",
    "RankOutput": "skyrl_engine.contracts.outputs",
    "correction": "skyrl_engine.hooks.decorators",
    "hookimpl": "skyrl_engine.hooks.markers",
    "loss": "skyrl_engine.hooks.decorators",
    "reducer": "skyrl_engine.hooks.decorators",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
