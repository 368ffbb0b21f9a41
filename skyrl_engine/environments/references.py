"""Functions that a configuration names: `./file.py:name`, or `package.module:name`."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from skyrl_engine.errors import DataError
from skyrl_engine.hooks.decorators import FunctionPlugin


def function_of(reference: str) -> Callable[..., Any]:
    """Return the function that a reference names. Raises DataError where there is none, with what the file raised, and for one with options."""
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise DataError(f"{reference!r} names no function", remedy="Write ./file.py:name, or package.module:name")
    try:
        module = _module_of(Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{place} cannot be imported: {type(error).__name__}: {error}", remedy="Correct the file") from error
    found = getattr(module, name, None)
    if isinstance(found, FunctionPlugin):
        # decorated with @reward, it is a plugin as well; what is asked for here is the function
        found = found.function
        config = inspect.signature(found).parameters.get("config")
        if config is not None and config.default is config.empty:
            raise DataError(
                f"the reward {name} of {place} has options of its own, which it gets only as an environment",
                remedy=f'Choose it as one: --env {reference}, or [[environments]] with use = "{reference}"',
            )
    if not callable(found):
        functions = [
            each for each, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise DataError(
            f"{place} has no function {name!r}", remedy=f"It has {', '.join(sorted(functions)) or 'no function'}; correct the name"
        )
    made: Callable[..., Any] = found
    return made


def content_of(reference: str) -> str:
    """Return a short hash of the file that a reference names, so that a changed file is noticed; empty for an installed module."""
    place = reference.rpartition(":")[0]
    return hashlib.sha256(Path(place).expanduser().read_bytes()).hexdigest()[:12] if place.endswith(".py") else ""


class _FromSource(SourceFileLoader):
    """Reads the file itself: bytecode that Python keeps is told from newer text by seconds and length alone, and an edit may share both."""

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - importlib gives it
        return self.source_to_code(self.get_data(self.path), self.path)


def _module_of(path: Path) -> Any:
    """Import a file under a name made of its path and content; a file that was imported already is not run again."""
    if not path.is_file():
        raise DataError(f"there is no file {path}", remedy="Correct the path; it is relative to the configuration file")
    digest = hashlib.sha256(str(path.absolute()).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"skyrl_engine_function_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.absolute().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(folder)
    return module
