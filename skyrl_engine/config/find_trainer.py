"""Find a trainer by its name: one of the engine's, or one that another distribution adds by an entry point of the group `skyrl_engine.trainer`.

Such an entry point names a `Trainer`:

    [project.entry-points."skyrl_engine.trainer"]
    perplexity = "acme_perplexity.trainer:TRAINER"

It is chosen by its name, or in full as `acme-perplexity:perplexity`, and imported when a configuration chooses it.
"""

from collections import Counter

from skyrl_engine.config.sections import sections
from skyrl_engine.config.trainers import TRAINERS, Trainer, owners_of
from skyrl_engine.errors import ConfigError, ContractError, PluginAmbiguousError, Problem
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.registry.discovery import discover_trainers
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.record import PluginRecord


def find_trainer(name: object) -> Trainer | None:
    """Return the trainer of this name, of the engine or of another distribution; None where there is none, or where `name` is no text.

    Raises PluginAmbiguousError where several distributions offer it, PluginIncompatibleError for one that is made for another engine, and
    PluginBrokenError or ContractError for one that fails to import or is no right row.
    """
    if not isinstance(name, str):
        return None
    if name in TRAINERS:
        return TRAINERS[name]
    record = find_trainer_record(name)
    return None if record is None else _load(record)


def find_trainer_record(name: str) -> PluginRecord | None:
    """Return the record of a trainer of another distribution; None for the engine's own, and where there is none of this name.

    Raises PluginAmbiguousError where several distributions offer it.
    """
    if name in TRAINERS:
        return None
    records = [record for record in discover_trainers() if name in (record.name, record.reference)]
    if not records:
        return None
    if len(records) > 1:
        raise PluginAmbiguousError(
            f"the trainer {name!r} is offered by {len(records)} distributions",
            remedy=f"Write {' or '.join(record.reference for record in records)}",
            details=[str(record) for record in records],
        )
    return records[0]


def get_trainer(name: str) -> Trainer:
    """Return the trainer of a configuration that was resolved. Raises ConfigError where no trainer has this name."""
    if (trainer := find_trainer(name)) is None:
        names = list_trainer_names()
        remedy = did_you_mean(name, names) or f"Choose one of {', '.join(names)}"
        raise ConfigError([Problem("trainer", f"there is no trainer {name!r}", remedy)])
    return trainer


def list_trainer_names() -> list[str]:
    """Return the names of all trainers: the engine's own, then those of other distributions, in full where several offer the same."""
    records = discover_trainers()
    counts = Counter(record.name for record in records)
    others = [record.reference if counts[record.name] > 1 or record.name in TRAINERS else record.name for record in records]
    return [*TRAINERS, *others]


def _load(record: PluginRecord) -> Trainer:
    """Import the row of a trainer of another distribution, and check it against the schema."""
    from skyrl_engine.registry.loader import load_trainer

    row = load_trainer(record)
    remedy = "Ask its author to correct the row, or choose another trainer"
    if not isinstance(row, Trainer):
        raise ContractError(f"{record} is {type(row).__name__} and no Trainer", remedy=remedy)
    known = sections()
    if row.name != record.name or row.name in known:
        taken = f"called {row.name!r} in its row" if row.name != record.name else "called like a table of the configuration"
        raise ContractError(f"{record} is {taken}", remedy=remedy)
    for names, allowed, what in (
        (row.tables, [name for name, section in known.items() if owners_of(name) and section.kind is None], "tables"),
        (row.kinds, list(KINDS), "kinds"),
    ):
        if unknown := [name for name in names if name not in allowed]:
            raise ContractError(f"{record} names the {what} {', '.join(unknown)}; there are {', '.join(allowed)}", remedy=remedy)
    return row
