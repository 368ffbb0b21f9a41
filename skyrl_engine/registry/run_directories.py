"""Nothing inside a run directory is ever executed: who runs code asks here first, and imports ask too.

A run directory may come from anybody, and its owner may put anything into it.
"""

import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from skyrl_engine.errors import PluginBlockedError

CONFIGURATION = "config.toml"
"""The configuration that a run directory holds."""

MANIFEST = "run.json"
"""The manifest that a run directory holds."""

_closed: set[Path] = set()


def run_directory_around(path: Path) -> Path | None:
    """Return the run directory that a file is in, as it is written or where its links lead; None where it is in none."""
    places = dict.fromkeys((Path(os.path.normpath(path.absolute())).parent, path.resolve().parent))
    return next((folder for place in places for folder in (place, *place.parents) if _is_run_directory(folder)), None)


def close(folder: Path) -> None:
    """Take a folder for a run directory from now on, whatever it holds, and let this process import nothing from any."""
    _closed.update((folder.absolute(), folder.resolve()))
    _holds_a_run.cache_clear()
    guard_imports()


def refuse_code_inside(path: Path, cause: str = "the code of {path} lies in the run directory {folder}") -> None:
    """Raise PluginBlockedError for a file in a run directory; `cause` may name `path` and `folder`."""
    folder = run_directory_around(path)
    if folder is not None:
        raise PluginBlockedError(
            cause.format(path=path, folder=folder),
            remedy="Nothing in a run directory is executed; if you trust this file, copy it to another place and name it there",
        )


def guard_imports() -> None:
    """Let imports of this process find nothing in a run directory, such as by PYTHONPATH, by the current folder or by a link."""
    if not any(isinstance(finder, _Guard) for finder in sys.meta_path):
        sys.meta_path.insert(sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0, _Guard())


class _Guard:
    """Finds modules as PathFinder does, before which it is asked, and refuses those whose file is in a run directory."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.has_location and spec.origin is not None:
            folder = run_directory_around(Path(spec.origin))
            if folder is not None:
                raise ImportError(f"the module {fullname} lies in the run directory {folder}, and nothing there is executed")
        return spec


def _is_run_directory(folder: Path) -> bool:
    return folder in _closed or _holds_a_run(folder)


@lru_cache(maxsize=4096)
def _holds_a_run(folder: Path) -> bool:
    if not (folder / CONFIGURATION).is_file():
        return False
    return (folder / MANIFEST).exists() or any((folder / "checkpoints").glob("step-*"))
