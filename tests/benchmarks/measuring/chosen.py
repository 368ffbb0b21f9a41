"""The collator that the engine chose for a run that leaves it open."""

import tomllib
from pathlib import Path


def read_collator(directory: Path) -> str:
    """Return the name of the collator that a run's config.toml records: "tree"."""
    used: str = tomllib.loads((directory / "config.toml").read_text())["collator"]["use"]
    return used.rpartition(":")[2]
