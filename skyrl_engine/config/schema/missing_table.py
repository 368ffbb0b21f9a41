"""A stand-in for a table that a run does not have."""

from typing import Any

from attrs import frozen


@frozen
class MissingTable:
    """Stands in for a table that nobody gave and the command does not need, or that belongs to another trainer.

    Reading a key of it is a mistake of the engine.
    """

    name: str

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        raise AssertionError(f"{self.name}.{key} is read, and this run has no table [{self.name}]")
