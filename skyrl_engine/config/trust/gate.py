"""The gate that every configuration passes before code that it names is run.

A caller's own configuration is trusted like a script. One out of a run directory, which may come from anybody, is not:

    inside a run directory? ──► refused, always
    given by the caller (--reward, section.key=value, --trust-code)? ──► runs
    run made with this user's key, tables and files as they were? ──► runs
    somebody to ask? ──► asked once ──► runs, or refused
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field, frozen

from skyrl_engine.config.reading.origins import DEFAULT, KeyPath, format_key, nearest
from skyrl_engine.config.reading.sources import RawConfig
from skyrl_engine.config.schema import PluginTable
from skyrl_engine.config.trust.marks import code_in
from skyrl_engine.config.trust.seal import Seal, digests_of
from skyrl_engine.config.trust.user_key import read_key
from skyrl_engine.errors import ConfigError, Problem, UntrustedCodeError
from skyrl_engine.registry.code_files import NamedCode, file_of, file_of_module, files_behind
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.registry.run_directories import MANIFEST, close, refuse_code_inside, run_directory_around

_PERMISSION = ("model", "trust_remote_code")
_OBSERVERS = ("run", "observers")


@frozen
class NamedInFile:
    """Code that a key of a configuration names. `files` are the SHA-256 of its files by their real paths; none for code elsewhere."""

    path: KeyPath
    text: str
    files: Mapping[Path, str]
    main: Path | None = None

    @property
    def key(self) -> str:
        return format_key(self.path)

    @classmethod
    def of_record(cls, path: KeyPath, record: PluginRecord) -> "NamedInFile":
        """Return a plugin of a local file, with the content that will be run."""
        assert record.path is not None, f"{record} is of no file"
        return cls(path, record.reference, {record.path.resolve(): str(record.sha256)}, record.path)

    @classmethod
    def of_reference(cls, path: KeyPath, text: str) -> "NamedInFile":
        """Return what an option names: a function of a file or of a module, or something else that decides what is run."""
        place = file_of(text)
        try:
            if place is not None:
                return cls(path, text, files_behind(place), place)
            module = file_of_module(text.partition(":")[0])
            files = {} if module is None else {module.resolve(): hashlib.sha256(module.read_bytes()).hexdigest()}
        except (OSError, ValueError, ImportError):
            return cls(path, text, {}, place)
        return cls(path, text, files)


@define(eq=False)
class Gate:
    """The gate of one configuration; `run` is the run directory that it comes from, None for a caller's own."""

    raw: RawConfig
    run: Path | None
    _written: Mapping[str, str] = field(factory=dict)
    _seal: Seal | None = None

    @classmethod
    def of(cls, raw: RawConfig) -> "Gate":
        """Return the gate of a configuration. Raises EngineError for a key of the user that must not be used."""
        run = _run_of(raw)
        if run is None:
            return cls(raw, None)
        if not _is_lone_manifest(raw):
            close(run)
        return cls(raw, run, digests_of(raw.written or {}), Seal.read(run / MANIFEST, read_key()))

    def refuse_permission(self) -> None:
        """Raise ConfigError where a run directory says that code which comes with a model may run; that is for the caller to say."""
        key = ".".join(_PERMISSION)
        table: Any = self.raw.table.get(_PERMISSION[0])
        if self._is_own(_PERMISSION) or not isinstance(table, Mapping) or not table.get(_PERMISSION[1]):
            return
        where = f"{nearest(self.raw.origins, _PERMISSION)}: {key}"
        cause = "a run directory does not allow itself to run code"
        raise ConfigError([Problem(where, cause, f"Add {key}=true to the command, if you trust it")])

    def admit_plugins(self, records: Iterable[tuple[KeyPath, PluginRecord]]) -> None:
        """Refuse plugins of local files that may not run, before any is imported. Raises PluginBlockedError."""
        self._admit([NamedInFile.of_record(path, record) for path, record in records if record.path is not None])

    def admit_tables(self, sections: Mapping[str, Any]) -> None:
        """Refuse what the engine's own tables name and may not run. Raises PluginBlockedError."""
        if self.run is None:
            return
        own_sections = {
            name: table for name, table in sections.items() if attrs.has(type(table)) and not isinstance(table, PluginTable)
        }
        references = [
            reference for name, table in own_sections.items() for reference in code_in(table, (name,)) if reference[0] != _OBSERVERS
        ]
        self._admit([NamedInFile.of_reference(path, text) for path, text in references])

    def admit_options(self, path: KeyPath, options: object) -> NamedCode:
        """Refuse what the options of the plugin at `path` name and may not run; return what they name. Raises PluginBlockedError."""
        named = [NamedInFile.of_reference(*code) for code in code_in(options, path)]
        self._admit(named)
        hashes = {
            reference.text: None if reference.main is None else reference.files.get(reference.main.resolve()) for reference in named
        }
        return NamedCode(hashes, closed=self._is_closed(path))

    def _is_closed(self, path: KeyPath) -> bool:
        """Return True where a run directory gives options of this plugin, and nobody said that its code may run."""
        if self.run is None or self.raw.consent.is_given:
            return False
        table = format_key(path)
        return any(
            origin.kind == "file"
            for key, origin in self.raw.origins.items()
            if key == table or key.startswith((f"{table}.", f"{table}["))
        )

    def _is_own(self, path: KeyPath) -> bool:
        if self.run is None:
            return True
        origin = nearest(self.raw.origins, path)
        if origin is DEFAULT and path[0] == "observers":
            # a table's name may have become an absolute path, which no origin knows
            origin = nearest(self.raw.origins, _OBSERVERS)
        return origin.kind != "file"

    def _admit(self, named: Sequence[NamedInFile]) -> None:
        foreign = [reference for reference in named if not self._is_own(reference.path)]
        cause = "the configuration of the run directory {folder} names code inside it, {path}"
        for reference in foreign:
            for file in [*([] if reference.main is None else [reference.main]), *reference.files]:
                refuse_code_inside(file, cause)
        reasons = [(reference, reason) for reference in foreign if (reason := self._distrust(reference)) is not None]
        if not reasons or self.raw.consent.is_given:
            return
        lines = [f"{reference.key} = {reference.text} ({reason})" for reference, reason in reasons]
        question = f"The configuration of the run directory {self.run} names code outside of it:"
        if self.raw.consent.obtain([question, *(f"  {line}" for line in lines)]):
            return
        raise UntrustedCodeError(
            f"the configuration of the run directory {self.run} names code, and {'this' if len(lines) == 1 else 'some of this'} "
            f"is not known to be yours: {lines[0]}",
            remedy="If you trust it, add --trust-code, or give that code yourself (--reward, section.key=value); otherwise run nothing of it",
            details=lines[1:],
        )

    def _distrust(self, named: NamedInFile) -> str | None:
        """Say why code that a run directory names is not known to be the caller's; None where it is."""
        if self._seal is None:
            return "the run was not made by you on this machine, or its run.json was changed"
        name = str(named.path[0])
        if self._seal.tables.get(name) != self._written.get(name):
            return f"[{name}] was changed since you made the run"
        for file, sha256 in named.files.items():
            if self._seal.files.get(str(file)) != sha256:
                return f"{file} was changed since you made the run"
        if named.main is not None and not named.files:
            return f"{named.main} cannot be read"
        return None


def seal_run(written: Mapping[str, Any], files: Mapping[Path, str]) -> Seal:
    """Return the seal of a run: of its configuration as its file has it, and of its local files of code with their SHA-256."""
    return Seal(digests_of(written), {str(file): sha256 for file, sha256 in files.items()})


def hash_code_files(records: Iterable[PluginRecord], codes: Iterable[NamedCode]) -> dict[Path, str]:
    """Return the SHA-256 of the local files of plugins, and of the code that keys and options name, by their real paths."""
    files: dict[Path, str] = {}
    for record in records:
        if record.path is not None:
            files |= NamedInFile.of_record((), record).files
    for code in codes:
        for text, sha256 in code.sha256.items():
            named = NamedInFile.of_reference((), text)
            files |= named.files
            if named.main is not None and sha256 is not None:
                # what ran, and not what is there by now
                files[named.main.resolve()] = sha256
    return files


def _is_lone_manifest(raw: RawConfig) -> bool:
    """Return True for a run.json, whatever its name, outside of a run directory: around it are the caller's own files."""
    return raw.path is not None and raw.path.suffix == ".json" and run_directory_around(raw.path) is None


def _run_of(raw: RawConfig) -> Path | None:
    """Return the run directory that a configuration comes from; None where the file, or the mapping, is the caller's own."""
    if raw.path is None or raw.written is None:
        return None
    folders = (raw.path.absolute().parent, raw.path.resolve().parent)
    if raw.of_run:
        return folders[0]
    if (around := run_directory_around(raw.path)) is not None:
        return around
    # one that lacks its manifest is still the run that would be resumed
    run_table = raw.table.get("run")
    directory = run_table.get("directory") if isinstance(run_table, Mapping) else None
    if not isinstance(directory, str):
        return None
    base = (
        Path.cwd() if not directory.startswith(("./", "../")) else nearest(raw.origins, ("run", "directory")).folder or Path.cwd()
    )
    place = (base / Path(directory).expanduser()).resolve()
    return place if any(place in (folder.resolve(), *folder.resolve().parents) for folder in folders) else None
