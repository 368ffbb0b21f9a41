"""Configurations of axolotl, LLaMA-Factory, TRL and verl as one of ours: every key is taken over, or it is said why not.

What is taken over is data, `migration.toml`; words that it does not list are those of `foreign_keys.toml`, which are explained.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from attrs import define, field, frozen

from skyrl_engine.config.combined_keys import combine_keys, find_inside
from skyrl_engine.config.foreign_keys import explain_path
from skyrl_engine.config.reading.origins import KeyPath, format_key, leaves
from skyrl_engine.config.reading.sources import from_dict
from skyrl_engine.config.report import to_toml
from skyrl_engine.config.structure import structure
from skyrl_engine.errors import ConfigError, Problem

_OF_STAGES: Final = {"sft": "sft", "pt": "sft", "dpo": "preference", "kto": "preference", "rm": "reward_model", "ppo": "rl"}
_PREFERENCES: Final = {"sigmoid": "dpo", "dpo": "dpo", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
"""Presets of trainer preference by the names that axolotl and LLaMA-Factory give these losses."""

_RL: Final = ("actor_rollout_ref", "num_generations", "max_completion_length")
_MANY: Final = ("data.train", "data.eval")
"""Keys that take a list of what several keys elsewhere say."""

_ONLY_WITH: Final = {
    "data.stopping_strategy": "data.weights",
    "data.buffer_size": "data.streaming",
    "model.lora.double_quantization": "model.lora.load_in_4bit",
}
"""Keys that are not read without another one."""


@frozen
class Said:
    """A key of the other configuration that is not taken over, at its line, and why. `needless`: nothing has to be written for it."""

    key: str
    value: Any
    line: int | None
    why: str
    needless: bool = False


@define
class Migration:
    """A configuration of ours, by trainer and dotted key: each value with what it comes from. `said` is what is left out."""

    trainer: str
    taken: dict[str, tuple[Any, str]] = field(factory=dict)
    said: list[Said] = field(factory=list)

    def tables(self) -> dict[str, Any]:
        """Return the configuration as plain tables."""
        tables: dict[str, Any] = {"trainer": self.trainer}
        for key, (value, _) in self.taken.items():
            *names, last = key.split(".")
            table = tables
            for name in names:
                table = table.setdefault(name, {})
            table[last] = value
        return tables

    def to_toml(self, label: str) -> str:
        """Return it as a TOML file, whose comments say where each value comes from, and at the end what was left out."""
        lines = [f"# From {label}.", f"trainer = {_toml(self.trainer)}"]
        groups: dict[str, list[str]] = {"": []}
        for key, (value, origin) in self.taken.items():
            table, _, last = key.rpartition(".")
            groups.setdefault(table, []).append(f"{last} = {_inline(value)}  # {origin}")
        lines += groups.pop("")
        for table in sorted(groups):
            lines += ["", f"[{table}]", *groups[table]]
        for heading, needless in (("Not taken over, yours to decide", False), ("Nothing has to be written for", True)):
            said = [each for each in self.said if each.needless == needless]
            if said:
                lines += ["", f"# {heading}:"]
                lines += [f"# {_at(each.line)}{each.key} = {_on_one_line(each.value)}: {each.why}" for each in said]
        return "\n".join(lines) + "\n"


def migrate(
    table: Mapping[str, Any], lines: Mapping[KeyPath, int], label: str, trainer: str | None = None, preset: str | None = None
) -> Migration:
    """Return another trainer's configuration, `table`, as one of ours. `trainer` says how to train (None: as the file says).

    Raises ConfigError where neither says it.
    """
    found, own_preset = _find_trainer(table)
    chosen = trainer or found
    if chosen is None:
        raise ConfigError(
            [
                Problem(
                    label,
                    "does not say how it trains",
                    "Add --trainer sft, preference, reward_model or rl: TRL has a command for each",
                )
            ]
        )
    migration = Migration(chosen)
    preset = preset or own_preset
    if chosen == "preference" and preset is not None:
        migration.taken["preference.preset"] = preset, "the loss that it names"
    combined = combine_keys(table, lines, chosen)
    migration.taken |= combined.taken
    adapts = _trains_adapters(table)
    values = dict(leaves(table))
    for path, why, needless in combined.said:
        migration.said.append(Said(format_key(path), values.get(path), lines.get(path), why, needless))
    for path, value in values.items():
        if path and not any(format_key(path[:end]) in combined.used for end in range(1, len(path) + 1)):
            _move(migration, path, value, lines.get(path), adapts=adapts)
    if "training.steps" in migration.taken and "training.epochs" in migration.taken:
        epochs, origin = migration.taken.pop("training.epochs")
        migration.said.append(Said("training.epochs", epochs, None, f"the number of steps counts ({origin})", needless=True))
    if chosen != "rl" and not {"data.eval", "data.eval_fraction"} & migration.taken.keys():
        for key in ("evaluation.every", "evaluation.at_start"):
            if key in migration.taken:
                value, origin = migration.taken.pop(key)
                migration.said.append(Said(key, value, None, f"set it with data.eval or data.eval_fraction ({origin})"))
    for key, other in _ONLY_WITH.items():
        if key in migration.taken and not migration.taken.get(other, (None,))[0]:
            value, origin = migration.taken.pop(key)
            migration.said.append(Said(key, value, None, f"it is not read without {other} ({origin})", needless=True))
    if adapts and "model.lora.rank" not in migration.taken and _is_valid(chosen, "model.lora.rank", 8) is None:
        migration.taken["model.lora.rank"] = 8, "adapters of the default rank"
    return migration


def _find_trainer(table: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the trainer that the file names, and the preset of its preferences; None for what it does not say."""
    stage, loss = table.get("stage"), table.get("rl")
    if stage in _OF_STAGES:
        preset = "kto" if stage == "kto" else _PREFERENCES.get(str(table.get("pref_loss", "sigmoid")))
        return _OF_STAGES[stage], preset if stage in ("dpo", "kto") else None
    if loss in _PREFERENCES:
        return "preference", _PREFERENCES[loss]
    if loss or any(key in table for key in _RL):
        return "rl", None
    if "base_model" in table:
        return ("reward_model" if table.get("reward_model") else "sft"), None
    return None, None


def _trains_adapters(table: Mapping[str, Any]) -> bool:
    return (
        str(table.get("adapter") or table.get("finetuning_type")) in ("lora", "qlora", "dora")
        or table.get("use_peft") is True
        or bool(find_inside(table, "actor_rollout_ref", "model", "lora_rank"))
    )


def _move(migration: Migration, path: KeyPath, value: Any, line: int | None, *, adapts: bool) -> None:
    """Take one key over, or say why not."""
    trainer = migration.trainer
    names = [str(name) for name in path if not isinstance(name, int)]
    written = format_key(path)

    def say(why: str, *, needless: bool = False) -> None:
        migration.said.append(Said(written, value, line, why, needless))

    if value is None:
        say("it is not set", needless=True)
        return
    row = _find(names, trainer)
    if row is None:
        say(explain_path(path, trainer) or "it has no counterpart here, as far as is known")
        return
    if row["kind"] != "take":
        # what is missing here and was off there
        off = row["kind"] == "none" and value is False
        say(row["reason"], needless=off or row["kind"] == "needless")
        return
    key = row["key"]
    if key.startswith("model.lora.") and not adapts and key != "model.lora.path":
        say("no adapters are trained", needless=True)
        return
    ours = _convert(row, value)
    if ours is None:
        say(f"this value is not taken over: see {key}")
        return
    if key in migration.taken:
        if key not in _MANY:
            say(f"{key} is taken from another key")
            return
        before, origin = migration.taken[key]
        migration.taken[key] = [*(before if isinstance(before, list) else [before]), ours], f"{origin}; {written}{_after(line)}"
        return
    if (wrong := _is_valid(trainer, key, ours)) is not None:
        say(f"{key} does not take it: {wrong}")
        return
    remark = f": {row['remark']}" if "remark" in row else ""
    migration.taken[key] = ours, f"{written}{_after(line)}{remark}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _convert(row: Mapping[str, Any], value: Any) -> Any:
    """Return our value of another trainer's; None where there is none."""
    if "values" in row:
        return row["values"].get(str(value).lower())
    if isinstance(value, str) and value in row.get("names", {}):
        return row["names"][value]
    if isinstance(value, str) and row.get("split"):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if row.get("numbers"):
            return [float(part) for part in parts] if all(_is_number(part) for part in parts) else None
        return parts[0] if len(parts) == 1 and row["key"] != "model.lora.targets" else parts
    if "above" in row and not (isinstance(value, int | float) and value > row["above"]):
        return None
    return value


def _is_valid(trainer: str, key: str, value: Any) -> str | None:
    """Say why a key of ours does not take a value, or is none of the trainer's; None where it does."""
    needed = {_ONLY_WITH[key]: (True, "")} if key in _ONLY_WITH else {}
    migration = Migration(trainer, {**needed, key: (value, "")})
    problems = structure(from_dict(migration.tables(), "migrated"), need=()).problems
    top = key.partition(".")[0]
    about = [problem for problem in problems if problem.where.endswith((f": {key}", f": {top}")) or f": {key}[" in problem.where]
    return about[0].cause if about else None


@cache
def _rows() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Read the rows of `migration.toml`, by their words."""
    tables = tomllib.loads(files(__package__).joinpath("migration.toml").read_text(encoding="utf-8"))
    by_word: dict[str, list[Mapping[str, Any]]] = {}
    for kind in ("take", "needless", "none"):
        for row in tables[kind]:
            for word in (*row["words"], *(f"{table}.*" for table in row.get("tables", ()))):
                by_word.setdefault(word, []).append({**row, "kind": kind})
    return by_word


def _find(names: Sequence[str], trainer: str) -> Mapping[str, Any] | None:
    """Return the row of the longest end of a key that is known, or of a table around it, for a trainer."""
    for word in (*_ends(names), *(f"{name}.*" for name in names)):
        for row in _rows().get(word, ()):
            # a plain word deep inside is another table's
            fits = row["kind"] != "take" or "." in word or len(names) == 1
            if fits and trainer in row.get("trainers", (trainer,)):
                return row
    return None


def _ends(names: Sequence[str]) -> Iterator[str]:
    return (".".join(names[start:]) for start in range(len(names)))


def _at(line: int | None) -> str:
    return "" if line is None else f"line {line}: "


def _after(line: int | None) -> str:
    return "" if line is None else f", line {line}"


def _on_one_line(value: Any) -> str:
    return "null" if value is None else " ".join(_toml(value).split())


def _inline(value: Any) -> str:
    """Return a value as TOML on one line, tables in braces."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_inline(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return _toml(value)


def _toml(value: Any) -> str:
    return to_toml({"key": value}).strip().partition("=")[2].strip() or "{}"
