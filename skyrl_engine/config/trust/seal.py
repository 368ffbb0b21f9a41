"""The seal of a run: what its configuration says about code, and the hashes of that code, signed with the user's key.

It is kept in run.json. Who changes the configuration's tables that name code, a file of that code, or the seal itself has no seal any more.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from skyrl_engine.config.schema import EngineConfig
from skyrl_engine.config.sections import sections
from skyrl_engine.config.structure import plugin_lists
from skyrl_engine.config.trainers import TRAINERS
from skyrl_engine.config.trust.marks import names_code
from skyrl_engine.registry.kinds import TABLES

ENTRY = "seal"
"""The key of run.json."""

_FORMAT = 1


@frozen
class Seal:
    """`tables` are digests of the configuration's tables that name code, by name; `files` SHA-256 of files of code by their real paths."""

    tables: Mapping[str, str]
    files: Mapping[str, str]

    def sign(self, key: bytes) -> dict[str, Any]:
        """Return it as JSON values, with its signature."""
        return {**self._content(), "hmac": self._signature(key)}

    @classmethod
    def read(cls, manifest: Path, key: bytes | None) -> "Seal | None":
        """Return the seal of a run.json; None where there is none, or it was not signed with this key."""
        try:
            entry = json.loads(manifest.read_text(encoding="utf-8"))[ENTRY]
            seal = cls(dict(entry["tables"]), dict(entry["files"]))
            signature = str(entry["hmac"])
            if (
                key is not None
                and entry["format"] == _FORMAT
                and hmac.compare_digest(signature.encode(), seal._signature(key).encode())
            ):
                return seal
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return None

    def _content(self) -> dict[str, Any]:
        return {"format": _FORMAT, "tables": dict(self.tables), "files": dict(self.files)}

    def _signature(self, key: bytes) -> str:
        return hmac.new(key, b"skyrl-engine run\n" + _canonical(self._content()), hashlib.sha256).hexdigest()


def digests_of(written: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the tables of a configuration file that name code, as the file has them.

    Tables of plugins count as a whole, with all options; of the engine's own tables the keys that name code count.
    """
    return {name: hashlib.sha256(_canonical(table)).hexdigest() for name, table in _tables(written)}


def _tables(written: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    whole = {*TABLES, *plugin_lists(EngineConfig), "observers"}
    trainer = written.get("trainer")
    # the own table of another distribution's trainer counts as a plugin's does
    if isinstance(trainer, str) and trainer not in TRAINERS and (own := trainer.rpartition(":")[2]) in written:
        yield own, written[own]
    for name, section in sections().items():
        if name in whole:
            yield name, written.get(name)
        elif attrs.has(section.schema):
            table = written.get(name)
            keys = [field.name for field in attrs.fields(attrs.resolve_types(section.schema)) if names_code(field)]
            if keys:
                yield name, {key: table.get(key) for key in keys} if isinstance(table, Mapping) else table


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
