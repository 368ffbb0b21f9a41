"""Files of code that options of plugins name: their hashes, and which of them may run while a plugin is made."""

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from attrs import field, frozen

from skyrl_engine.errors import PluginBlockedError


@frozen
class NamedCode:
    """The code that a plugin's options name: per reference the SHA-256 of its file, None for one that is no file.

    A `closed` plugin's options are not the caller's, and it may run nothing but those references.
    """

    sha256: Mapping[str, str | None] = field(factory=dict)
    closed: bool = False

    def to_lock_entry(self) -> dict[str, object]:
        """Return it as JSON values, from which `NamedCode(**values)` is the same."""
        return {"sha256": dict(self.sha256), "closed": self.closed}


_in_force: ContextVar[NamedCode | None] = ContextVar("code that may run", default=None)


@contextmanager
def limit_code(code: NamedCode) -> Iterator[None]:
    """Let `permitted` know the code of the plugin that is made within."""
    token = _in_force.set(code)
    try:
        yield
    finally:
        _in_force.reset(token)


def require_permission(reference: str, content: bytes | None) -> None:
    """Refuse code that the plugin which is being made may not run. `content` is that of the file that will be run, None for a module.

    Raises PluginBlockedError.
    """
    code = _in_force.get()
    if code is None:
        return
    if reference not in code.sha256:
        if code.closed:
            raise PluginBlockedError(
                f"{reference} is code that the configuration of a run directory names in a key which its plugin does not mark as one",
                remedy="Add --trust-code to the command if you trust it",
            )
        return
    expected = code.sha256[reference]
    if expected is not None and content is not None and hashlib.sha256(content).hexdigest() != expected:
        raise PluginBlockedError(
            f"the file of {reference} is not the one that this run began with", remedy="Restore the file, or start the run again"
        )


def file_of(reference: str) -> Path | None:
    """Return the file of `path/file.py:name`; None for a module or a plugin's name."""
    place = reference.rpartition(":")[0]
    return Path(place).expanduser() if place.endswith(".py") else None


def file_of_module(name: str) -> Path | None:
    """Return the file that an import of `package.module` would run last, without importing any of it; None where it has none."""
    places: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
        if places is None and end < len(parts):
            return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None


def files_behind(path: Path) -> dict[Path, str]:
    """Return the SHA-256 of a file of code and of those next to it that it imports, and so on, by their real paths.

    Nothing is run: imports are read out of the text, those inside of functions too. Of a package next to it all Python files count.
    Raises OSError for a file that cannot be read.
    """
    digests: dict[Path, str] = {}
    _collect(path, path.absolute().parent, digests)
    return digests


def _collect(path: Path, folder: Path, digests: dict[Path, str]) -> None:
    real = path.resolve()
    if real in digests:
        return
    content = path.read_bytes()
    digests[real] = hashlib.sha256(content).hexdigest()
    for name in sorted(_list_imported_names(content)):
        if (module := folder / f"{name}.py").is_file():
            _collect(module, folder, digests)
        if (package := folder / name).is_dir():
            for file in sorted(package.rglob("*.py")):
                _collect(file, folder, digests)


def _list_imported_names(content: bytes) -> set[str]:
    """Return the first parts of the names that a text imports; none of a text that is no Python, which cannot run either."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names
