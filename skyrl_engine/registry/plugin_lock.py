"""Locks of plugins: what stood at each place of a configuration, by distribution, version and hash, and what stands there now.

A lock file beside a configuration is one, and so is every run.json.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from attrs import asdict, field, frozen

from skyrl_engine import __version__
from skyrl_engine.errors import PluginDriftError
from skyrl_engine.registry.record import PluginRecord

ENGINE: Final = "skyrl-engine"
_SHOWN: Final = 12
"""Digits of a hash that a table shows."""


@cache
def package_sha256(target: str) -> str | None:
    """SHA-256 over names and contents of the `.py` files of the top-level package of "module:name"; None where there is no package."""
    spec = find_spec(target.partition(":")[0].partition(".")[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}:{len(content)};".encode())
        digest.update(content)
    return digest.hexdigest()


@frozen
class LockedPlugin:
    """A plugin as it stands at a place: from a distribution, or from a local file, where `distribution` and `version` are None.

    `sha256` is that of the local file, or of the Python files of the package; None where it was not recorded, which equals any.
    """

    name: str
    distribution: str | None = None
    version: str | None = None
    sha256: str | None = None

    @classmethod
    def of_record(cls, record: PluginRecord, name: str | None = None) -> "LockedPlugin":
        """Return the plugin of a record; `name` stands for another one of the same distribution that is not known yet."""
        return cls(name or record.name, record.distribution, record.version, record.sha256 or package_sha256(record.target))

    @classmethod
    def of_engine(cls) -> "LockedPlugin":
        """Return the engine that is running."""
        return cls(ENGINE, ENGINE, __version__, package_sha256("skyrl_engine:"))

    def equals(self, other: "LockedPlugin") -> bool:
        """Say whether both are the same code."""
        same = (self.name, self.distribution, self.version) == (other.name, other.distribution, other.version)
        return same and (None in (self.sha256, other.sha256) or self.sha256 == other.sha256)

    def __str__(self) -> str:
        name = f"{self.distribution or 'local file'}:{self.name}" if self.name != self.distribution else self.name
        version = [] if self.version is None else [self.version]
        return " ".join([name, *version, *_short(self.sha256)])


@frozen
class PluginLock:
    """The plugins of a configuration by their place, the engine, and the local files of code by their paths, with their SHA-256.

    `source` is the file that says so, and `remedy` what to do where something differs. `files` is None where they were not recorded.
    """

    source: str
    remedy: str
    engine: LockedPlugin
    plugins: Mapping[str, LockedPlugin]
    files: Mapping[Path, str] | None = field(factory=dict)

    def refuse_other_plugins(self, here: Mapping[str, LockedPlugin]) -> None:
        """Compare the engine and the plugins that are chosen here, by their place. Raises PluginDriftError with a table of differences."""
        locked, present = {"engine": self.engine, **self.plugins}, {"engine": LockedPlugin.of_engine(), **here}
        self._refuse(
            [
                (place, _or_none(locked.get(place)), _or_none(present.get(place)))
                for place in dict.fromkeys([*locked, *present])
                if place not in locked or place not in present or not locked[place].equals(present[place])
            ]
        )

    def refuse_other_files(self, here: Mapping[Path, str]) -> None:
        """Compare local files of code, which may lie elsewhere under the same name. Raises PluginDriftError with a table of differences."""
        if self.files is None:
            return
        locked, present = ({path: (path.name, sha256) for path, sha256 in files.items()} for files in (self.files, here))
        moved = set(locked.values()) & set(present.values())
        rows = []
        for path in {**locked, **present}:
            sides = [side for side in (locked.get(path), present.get(path)) if side is not None]
            if locked.get(path) != present.get(path) and not moved.issuperset(sides):
                rows.append((str(path), _short_or_none(self.files.get(path)), _short_or_none(here.get(path))))
        self._refuse(rows)

    def _refuse(self, rows: list[tuple[str, str, str]]) -> None:
        if rows:
            raise PluginDriftError(
                f"{'one entry differs' if len(rows) == 1 else f'{len(rows)} entries differ'} from {self.source}",
                remedy=self.remedy,
                details=list(_align([("place", "locked", "here"), *rows])),
            )

    def to_table(self, folder: Path) -> dict[str, Any]:
        """Return it in plain values without None; paths below `folder` are relative to it."""
        return {
            "engine": _plain(self.engine),
            "plugins": {place: _plain(plugin) for place, plugin in self.plugins.items()},
            "files": {
                (path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)): sha256
                for path, sha256 in (self.files or {}).items()
            },
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any], folder: Path, *, source: str, remedy: str) -> "PluginLock":
        """Read what `to_table` wrote, or the same keys of a run.json. Raises ValueError, TypeError or KeyError for anything else."""
        plugins = {str(place): _read(entry) for place, entry in dict(table["plugins"]).items()}
        files = {folder / str(path): str(sha256) for path, sha256 in dict(table.get("files", {})).items()}
        return cls(source, remedy, _read({"name": ENGINE, **table["engine"]}), plugins, files)


def _read(entry: Mapping[str, Any]) -> LockedPlugin:
    values = [entry.get(key) for key in ("distribution", "version", "sha256")]
    if not all(value is None or isinstance(value, str) for value in (entry["name"], *values)):
        raise ValueError(f"{dict(entry)} is no plugin")
    return LockedPlugin(entry["name"], *values)


def _plain(plugin: LockedPlugin) -> dict[str, Any]:
    return {key: value for key, value in asdict(plugin).items() if value is not None}


def _or_none(plugin: LockedPlugin | None) -> str:
    return "none" if plugin is None else str(plugin)


def _short(sha256: str | None) -> list[str]:
    return [] if sha256 is None else [f"sha256 {sha256[:_SHOWN]}"]


def _short_or_none(sha256: str | None) -> str:
    return " ".join(_short(sha256)) or "none"


def _align(rows: list[tuple[str, str, str]]) -> Iterator[str]:
    """Yield the lines of a table whose columns begin below each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for place, locked, here in rows:
        yield f"{place:<{widths[0]}}  {locked:<{widths[1]}}  {here}"
