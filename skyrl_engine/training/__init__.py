"""Trainers, the step and the loop that they share, and what authors of trainers import: the names of `__all__`, each when it is first used."""

from typing import TYPE_CHECKING

from skyrl_engine.lazy import lazily

if TYPE_CHECKING:
    from skyrl_engine.config.resolution import ResolvedConfig
    from skyrl_engine.config.trainers import Trainer
    from skyrl_engine.run.session import open_session
    from skyrl_engine.training.loop import RunResult
    from skyrl_engine.training.sft.prepare import PreparedRun, describe_data, prepare

__all__ = ["PreparedRun", "ResolvedConfig", "RunResult", "Trainer", "describe_data", "open_session", "prepare"]

_HOMES = {
    "PreparedRun": "sft.prepare",
    "ResolvedConfig": "skyrl_engine.config.resolution",
    "RunResult": "loop",
    "Trainer": "skyrl_engine.config.trainers",
    "describe_data": "sft.prepare",
    "open_session": "skyrl_engine.run.session",
    "prepare": "sft.prepare",
}

__getattr__ = lazily(__name__, _HOMES)
