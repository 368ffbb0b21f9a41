"""Published recipes as data: a TOML file each, over which every key of a configuration wins. Those of reinforcement learning are here, those of
other trainers in folders of their names.

A value "@rl.key" is that key of the configuration.
"""

import json
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from attrs import evolve

from skyrl_engine.config.reading.origins import Origin, format_key, leaves, nearest
from skyrl_engine.config.reading.sources import RawConfig
from skyrl_engine.config.schema import PreferenceConfig, RewardModelConfig, RlConfig
from skyrl_engine.config.trainers import DEFAULT_TRAINER, TRAINERS
from skyrl_engine.config.wording import choices, format_value
from skyrl_engine.errors import Problem
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.registry.kinds import TABLES

NO_PRESET = "none"

SEQUENCES, ATTEMPTS = "sequence_mean", "trajectory_mean"
"""The mean over sequences of a preset, and what stands for it where an attempt may be cut into several: each attempt counts once."""

_KEY = "@rl."


_FOLDERS: Mapping[str, str] = {"rl": "", "preference": "preference", "reward_model": "reward_model"}
"""Trainers with presets, and where these are."""

_TABLES: Mapping[str, Any] = {"rl": RlConfig, "preference": PreferenceConfig, "reward_model": RewardModelConfig}
"""Their tables, whose key `preset` chooses one."""


def _folder(trainer: str) -> Traversable:
    return resources.files(__name__) / _FOLDERS[trainer]


def preset_names(trainer: str = "rl") -> list[str]:
    """Return the names of all presets of a trainer."""
    files = _folder(trainer).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def preset(name: str, trainer: str = "rl") -> dict[str, Any]:
    """Return the tables of a preset."""
    return tomllib.loads((_folder(trainer) / f"{name}.toml").read_text(encoding="utf-8"))


def preset_of(trainer: str, chosen: str | None) -> dict[str, Any]:
    """Return the tables of the chosen preset, or of the one that a trainer takes where none is; nothing for a trainer without presets."""
    return preset(chosen or _TABLES[trainer]().preset, trainer) if trainer in _TABLES else {}


def explain_preset(name: str) -> str | None:
    """Say which trainer's preset has this name and which loss with which options it chooses; None where there is no such preset."""
    trainer = next((trainer for trainer in _FOLDERS if name in preset_names(trainer)), None)
    if trainer is None:
        return None
    table = dict(preset(name, trainer).get("loss", {}))
    options = "".join(f", {key} = {json.dumps(value)}" for key, value in table.items() if key != "use")
    return f"It is a preset, {trainer}.preset = {json.dumps(name)}, whose loss is {table.get('use')!r}{options}"


def with_preset(raw: RawConfig) -> RawConfig:
    """Lay a configuration over the preset of its trainer, such as `rl.preset` or `preference.preset`; those of others are returned as they are.

    A plugin table that names another plugin than the preset's does not get the preset's options for it, and one of a kind that the run does not
    use is left out. Where histories are rendered again, a preset's mean over sequences becomes the one over attempts.
    """
    trainer = raw.table.get("trainer", DEFAULT_TRAINER)
    if trainer not in _FOLDERS:
        return raw
    table_of_trainer = raw.table.get(trainer, {})
    own: Mapping[str, Any] = table_of_trainer if isinstance(table_of_trainer, Mapping) else {}
    name = own.get("preset", _TABLES[trainer]().preset)
    if name == NO_PRESET:
        return raw
    if name not in (names := preset_names(trainer)):
        where = f"{nearest(raw.origins, (trainer, 'preset'))}: {trainer}.preset"
        remedy = did_you_mean(name, names, show=format_value) or f"Choose one of {choices([*names, NO_PRESET])}"
        problem = Problem(where, f"there is no preset {format_value(name)}", remedy)
        return evolve(raw, problems=(*raw.problems, problem))
    table, origins = deepcopy(dict(raw.table)), dict(raw.origins)
    ours, reasons = preset(name, trainer), {}
    if own.get("history") == "template" and ours["reducer"]["use"] == SEQUENCES:
        ours["reducer"]["use"], reasons["reducer"] = ATTEMPTS, ', rl.history = "template"'
    row = TRAINERS[trainer]
    used = row.for_tables({trainer: {**ours.get(trainer, {}), **own}}).kinds
    for key, value in ours.items():
        origin = Origin("default", f"preset {name}{reasons.get(key, '')}")
        if key in TABLES and (_chooses_another(table.get(key), value) or (key in row.kinds and key not in used)):
            continue
        _lay_under(table, (key,), value, origins, origin, own)
    return evolve(raw, table=table, origins=origins)


def _chooses_another(table: Any, ours: Mapping[str, Any]) -> bool:
    return isinstance(table, Mapping) and table.get("use", ours["use"]) != ours["use"]


def _lay_under(
    table: dict[str, Any], path: tuple[str, ...], value: Any, origins: dict[str, Origin], origin: Origin, own: Mapping[str, Any]
) -> None:
    """Set a key that nobody gave; within tables, every key for itself."""
    place: Any = table
    for part in path[:-1]:
        place = place[part]
    key = path[-1]
    if key not in place:
        place[key] = _substitute_keys(value, own)
        for inner, _ in leaves(value, path):
            origins[format_key(inner)] = origin
    elif isinstance(value, Mapping) and isinstance(place[key], dict):
        for inner_key, item in value.items():
            _lay_under(table, (*path, inner_key), item, origins, origin, own)


def _substitute_keys(value: Any, own: Mapping[str, Any]) -> Any:
    """Return a preset's value with keys of `[rl]` in the place of their names."""
    if isinstance(value, Mapping):
        return {key: _substitute_keys(item, own) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute_keys(item, own) for item in value]
    if isinstance(value, str) and value.startswith(_KEY):
        name = value.removeprefix(_KEY)
        return own.get(name, getattr(RlConfig(), name))
    return value
