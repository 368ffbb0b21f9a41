"""The trainers, one row each: which tables of the configuration are theirs, and which kinds of plugin they use.

Every other table is the engine's, and every run may have it. `find_trainer` knows trainers of other distributions too.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from attrs import frozen

from skyrl_engine.errors import ConfigError, PluginAmbiguousError, PluginBrokenError, Problem
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.registry.discovery import discover_trainers
from skyrl_engine.registry.kinds import KINDS, import_object

DEFAULT_TRAINER = "sft"


@frozen
class Trainer:
    """One trainer, by the name that `trainer = "..."` chooses. `tables` are keys of EngineConfig; several trainers may share one.

    `kinds` are the kinds of plugin it uses; observers are every run's and stand in no row. `run` and `plan` are its functions, as text
    "module:name": of a resolved configuration, to train and to say what would be done.
    """

    name: str
    tables: tuple[str, ...]
    kinds: tuple[str, ...]
    run: str
    plan: str
    options: str | None = None
    """The attrs class of a table of the trainer's own, called as the trainer is, as text "module:name"; None: it has none."""

    def load_run(self) -> Callable[..., Any]:
        """Import the function that trains. It takes a resolved configuration and returns a RunResult."""
        return cast("Callable[..., Any]", import_object(self.run))

    def load_plan(self) -> Callable[..., Any]:
        """Import the function that says what a run would do. It takes a resolved configuration."""
        return cast("Callable[..., Any]", import_object(self.plan))


_ROWS = (
    Trainer(
        DEFAULT_TRAINER,
        tables=("data", "training", "teacher", "evaluation", "checkpoint"),
        kinds=("collator", "loss", "correction", "reducer", "backend", "merger"),
        run="skyrl_engine.training.sft.trainer:run_sft",
        plan="skyrl_engine.training.sft.trainer:plan_sft",
    ),
    Trainer(
        "preference",
        tables=("data", "training", "preference", "reference", "evaluation", "checkpoint"),
        kinds=("collator", "loss", "correction", "reducer", "backend", "merger"),
        run="skyrl_engine.training.preference.trainer:run_preference",
        plan="skyrl_engine.training.preference.trainer:plan_preference",
    ),
    Trainer(
        "reward_model",
        tables=("data", "training", "reward_model", "evaluation", "checkpoint"),
        kinds=("collator", "loss", "correction", "reducer", "backend", "merger"),
        run="skyrl_engine.training.reward_model.trainer:run_reward_model",
        plan="skyrl_engine.training.reward_model.trainer:plan_reward_model",
    ),
    Trainer(
        "rl",
        tables=("rl", "rollouts", "reference", "teacher", "reward_model", "evaluation", "checkpoint"),
        kinds=(
            *("collator", "loss", "correction", "reducer", "backend", "merger"),
            *("generator", "environment", "advantage", "group_filter"),
        ),
        run="skyrl_engine.training.rl.run:run_rl",
        plan="skyrl_engine.training.rl.dry_run:plan_rl",
    ),
)

TRAINERS: Mapping[str, Trainer] = MappingProxyType({trainer.name: trainer for trainer in _ROWS})
"""The engine's own trainers."""


def find_trainer(name: object) -> Trainer | None:
    """Return the trainer of this name; None where there is none, or where `name` is no text. Every choice of a trainer asks here.

    The engine's own come first. Only for another name is the metadata of installed distributions read, and only the distribution that offers
    this name is imported. Raises PluginAmbiguousError where several offer it, PluginIncompatibleError for one made for another engine, and
    PluginBrokenError for one whose import fails or whose entry point names no usable Trainer.
    """
    if not isinstance(name, str):
        return None
    return TRAINERS[name] if name in TRAINERS else _load_installed(name)


def list_trainer_names() -> list[str]:
    """Return the names that `trainer = "..."` may have: the engine's, then those of installed distributions. Imports none of them."""
    return list(dict.fromkeys([*TRAINERS, *(record.name for record in discover_trainers())]))


def _load_installed(name: str) -> Trainer | None:
    records = [record for record in discover_trainers() if record.name == name]
    if not records:
        return None
    if len(records) > 1:
        raise PluginAmbiguousError(
            f"the trainer {name!r} is offered by {len(records)} distributions",
            remedy="Uninstall all but one of them",
            details=[str(record) for record in records],
        )
    from skyrl_engine.registry.loader import load_trainer

    trainer = load_trainer(records[0])
    if not isinstance(trainer, Trainer):
        raise PluginBrokenError(
            f"{records[0]} is a {type(trainer).__name__} and no Trainer",
            remedy="Let its entry point name a skyrl_engine.config.trainers.Trainer",
        )
    if trainer.name != name:
        raise PluginBrokenError(
            f"{records[0]} calls itself {trainer.name!r}", remedy=f"Let it be called {name!r}, as its entry point is"
        )
    unknown = [f"[{table}]" for table in trainer.tables if not owners_of(table)] + [
        kind for kind in trainer.kinds if kind not in KINDS
    ]
    if unknown:
        raise PluginBrokenError(
            f"{records[0]} uses {', '.join(unknown)}, and no trainer of the engine has such a table or kind of plugin",
            remedy="Let it name tables that the engine's trainers have, and kinds that the engine knows",
        )
    return trainer


def get_trainer(name: str) -> Trainer:
    """Return the trainer of a configuration that was resolved. Raises ConfigError where no trainer has this name."""
    if (trainer := find_trainer(name)) is None:
        remedy = did_you_mean(name, known := list_trainer_names()) or f"Choose one of {', '.join(known)}"
        raise ConfigError([Problem("trainer", f"there is no trainer {name!r}", remedy)])
    return trainer


def owners_of(table: str) -> list[str]:
    """The trainers that a table belongs to; none for a table of the engine."""
    return [trainer.name for trainer in TRAINERS.values() if table in trainer.tables]
