"""Records of plugins: facts known without an import, enough to find the identical plugin again in another process."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import field, frozen
from attrs.validators import in_

from skyrl_engine.errors import PluginBrokenError


@frozen
class PluginRecord:
    """One plugin of one kind.

    From a distribution: `distribution` is its normalised name (PEP 503), `version` its version, `target` the entry point's value
    ("module:attribute"), `engine_requirement` the range of engine versions it asks for (None: it asks for none).
    From a local file: `path` is the file, `sha256` its content's hash, `source_text` the content itself, `target` the name in it.
    """

    kind: str
    name: str
    target: str
    source: Literal["distribution", "file"] = field(default="distribution", validator=in_(("distribution", "file")))
    distribution: str | None = None
    version: str | None = None
    engine_requirement: str | None = None
    path: Path | None = None
    sha256: str | None = None
    source_text: str | None = field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.source == "distribution":
            assert self.distribution is not None, f"{self.name} comes from a distribution without a name"
        else:
            assert self.path is not None, f"{self.name} comes from a file without a path"
            assert self.source_text is not None, f"{self.path} is recorded without its content"

    @classmethod
    def of_file(cls, kind: str, path: Path, name: str, content: bytes) -> "PluginRecord":
        """Make the record of a plugin in a local file with this content. Raises UnicodeDecodeError for a file that is not UTF-8."""
        digest = hashlib.sha256(content).hexdigest()
        return cls(kind, name, name, "file", path=path, sha256=digest, source_text=content.decode("utf-8"))

    @property
    def reference(self) -> str:
        """Return the reference that means this plugin and no other: "distribution:name", or "path:name"."""
        return f"{self.distribution or self.path}:{self.name}"

    @property
    def origin(self) -> str:
        """Return distribution and version, "acme-losses 2.0.0", or path and hash of a local file."""
        if self.source == "file":
            return f"{self.path} (sha256 {(self.sha256 or '')[:12]})"
        return f"{self.distribution} {self.version}"

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.origin}"

    def to_lock_entry(self) -> dict[str, Any]:
        """Return everything that `from_lock` needs, as JSON values. A local file travels with its source text."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in attrs.asdict(self).items()}

    @classmethod
    def from_lock(cls, lock: Mapping[str, Any]) -> "PluginRecord":
        """Return the record of a lock. Raises PluginBrokenError when fields are unknown or missing, or the text has another hash."""
        try:
            record = cls(**{**lock, "path": Path(lock["path"]) if lock.get("path") else None})
        except (TypeError, ValueError, AssertionError) as error:
            raise PluginBrokenError(
                f"the plugin lock of {lock.get('kind')} {lock.get('name')!r} cannot be read: {error}",
                remedy="Use the engine version that wrote it, or start the run anew",
            ) from error
        if record.source_text is not None and hashlib.sha256(record.source_text.encode()).hexdigest() != record.sha256:
            raise PluginBrokenError(
                f"the plugin lock of {record} holds a source text with another hash",
                remedy=f"Restore the lock, or start the run anew with {record.path}",
            )
        return record
