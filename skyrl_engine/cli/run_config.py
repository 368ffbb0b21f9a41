"""The configuration that a run directory holds, of which commands about its model read a part."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OF_MODEL: Mapping[str, tuple[str, ...]] = {
    "model": ("dtype", "chat_template", "trust_remote_code"),
    "rl": ("max_tokens", "max_prompt_tokens", "stop_strings", "history", "template"),
    "run": ("seed", "device"),
}
"""Keys that say how a run's model computes and how its texts are written."""


def find_config(run: Path) -> Path:
    """Return the configuration that a run directory holds. Raises EngineError where there is none."""
    from skyrl_engine.errors import EngineError
    from skyrl_engine.run.directory import RunDirectory

    place = RunDirectory(run).config
    if not place.is_file():
        raise EngineError(
            f"there is no run directory {run}", remedy="Name the directory that a run has written, or give --model MODEL"
        )
    return place


def keep_model_tables(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a run's configuration that says how its model computes and how its texts are written.

    Prompts are written as the run's were: where it went through a dataset, `data.template` says so.
    """
    tables = {name: {key: table[name][key] for key in keys if key in table.get(name, {})} for name, keys in _OF_MODEL.items()}
    if table.get("trainer") != "rl" and "template" in table.get("data", {}):
        tables["rl"] = {**tables["rl"], "template": table["data"]["template"]}
    return tables
