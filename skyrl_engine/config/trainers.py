"""The trainers, one row each: which tables of the configuration are theirs, and which kinds of plugin they use.

Every other table is the engine's, and every run may have it. `find_trainer` knows trainers of other distributions too.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from attrs import evolve, frozen

from skyrl_engine.registry.kinds import import_object

DEFAULT_TRAINER = "sft"


@frozen
class Trainer:
    """One trainer, by the name that `trainer = "..."` chooses. `tables` are keys of EngineConfig; several trainers may share one.

    `kinds` are the kinds of plugin it uses; observers are every run's and are in no row. `run` and `plan` are its functions, as text
    "module:name": of a resolved configuration, to train and to say what would be done.
    """

    name: str
    tables: tuple[str, ...]
    kinds: tuple[str, ...]
    run: str
    plan: str
    replay: str | None = None
    """Its function that brings a recorded step back, `skyrl_engine.training.replay.step.Replay`, as text "module:name"; None: it has none."""

    asked_kinds: Mapping[str, str] = MappingProxyType({})
    """Kinds of plugin that it uses where a number of its tables is above 0, by kind the key of that number, "table.key"."""

    replaced_kinds: Mapping[str, str] = MappingProxyType({})
    """Kinds among `kinds` that it does not use where such a number is above 0, by kind the key of that number."""

    options: str | None = None
    """The attrs class of a table of the trainer's own, called as the trainer is, as text "module:name"; None: it has none."""

    def for_tables(self, table: Mapping[str, Any]) -> "Trainer":
        """Return the row whose `kinds` are those of a configuration, as plain tables: with `asked_kinds`, and without `replaced_kinds`."""
        asked = {kind for kind, key in self.asked_kinds.items() if _is_positive(table, key)}
        replaced = {kind for kind, key in self.replaced_kinds.items() if _is_positive(table, key)}
        if not asked and not replaced:
            return self
        return evolve(self, kinds=tuple(kind for kind in (*self.kinds, *sorted(asked)) if kind not in replaced))

    def load_run(self) -> Callable[..., Any]:
        """Import the function that trains. It takes a resolved configuration and returns a RunResult."""
        return cast("Callable[..., Any]", import_object(self.run))

    def load_plan(self) -> Callable[..., Any]:
        """Import the function that says what a run would do. It takes a resolved configuration."""
        return cast("Callable[..., Any]", import_object(self.plan))

    def load_replay(self) -> Callable[..., Any] | None:
        """Import the function that brings a recorded step back; None where the trainer has none."""
        return None if self.replay is None else cast("Callable[..., Any]", import_object(self.replay))


def _is_positive(table: Mapping[str, Any], key: str) -> bool:
    name, _, inner = key.partition(".")
    values = table.get(name)
    value = values.get(inner) if isinstance(values, Mapping) else None
    return isinstance(value, int | float) and value > 0


_ROWS = (
    Trainer(
        DEFAULT_TRAINER,
        tables=("data", "training", "teacher", "sampling", "evaluation", "checkpoint"),
        kinds=("collator", "loss", "correction", "reducer", "backend", "merger"),
        asked_kinds={"generator": "sampling.share"},
        run="skyrl_engine.training.sft.trainer:run_sft",
        plan="skyrl_engine.training.sft.trainer:plan_sft",
        replay="skyrl_engine.training.sft.replay:replay_sft",
    ),
    Trainer(
        "preference",
        tables=("data", "training", "preference", "reference", "evaluation", "checkpoint"),
        kinds=("collator", "loss", "correction", "reducer", "backend", "merger"),
        run="skyrl_engine.training.preference.trainer:run_preference",
        plan="skyrl_engine.training.preference.trainer:plan_preference",
        replay="skyrl_engine.training.preference.replay:replay_preference",
    ),
    Trainer(
        "reward_model",
        tables=("data", "training", "reward_model", "evaluation", "checkpoint"),
        kinds=("collator", "loss", "correction", "reducer", "backend", "merger"),
        run="skyrl_engine.training.reward_model.trainer:run_reward_model",
        plan="skyrl_engine.training.reward_model.trainer:plan_reward_model",
        replay="skyrl_engine.training.reward_model.replay:replay_reward_model",
    ),
    Trainer(
        "rl",
        tables=("rl", "rollouts", "reference", "teacher", "evaluation", "checkpoint"),
        kinds=(
            *("collator", "loss", "correction", "reducer", "backend", "merger"),
            *("generator", "environment", "advantage", "group_filter"),
        ),
        replaced_kinds={"advantage": "rl.pairs"},
        run="skyrl_engine.training.rl.run:run_rl",
        plan="skyrl_engine.training.rl.dry_run:plan_rl",
        replay="skyrl_engine.training.rl.replay:replay_rl",
    ),
)

TRAINERS: Mapping[str, Trainer] = MappingProxyType({trainer.name: trainer for trainer in _ROWS})
"""The engine's own trainers."""


def owners_of(table: str) -> list[str]:
    """The trainers that a table belongs to; none for a table of the engine."""
    return [trainer.name for trainer in TRAINERS.values() if table in trainer.tables]
