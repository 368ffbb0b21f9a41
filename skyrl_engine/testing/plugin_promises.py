"""Promises of a plugin of any kind: options that can be written down, objects that can be pickled, an import without torch."""

import io
import json
import os
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Callable
from types import FunctionType
from typing import Any

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.config.report import to_toml
from skyrl_engine.errors import EngineError
from skyrl_engine.hooks.decorators import FunctionPlugin
from skyrl_engine.testing.promise import Broken, Promise, any_of, promise
from skyrl_engine.testing.subject import Subject

HEAVY = ("torch", "ray", "transformers", "datasets")


def _no_plugin(subject: Subject[Any]) -> str | None:
    return "only a product was given, not the plugin that makes it" if subject.plugin is None else None


def _no_options(subject: Subject[Any]) -> str | None:
    return None if subject.plugin is not None and subject.plugin.options is not None else "the plugin takes no options"


@promise(
    "Its options, written as TOML or into a run's lock and read back, are the same options", exempt=any_of(_no_plugin, _no_options)
)
def config_round_trip(subject: Subject[Any], _case: None) -> None:
    plugin = subject.plugin
    assert plugin is not None, "exempt without a plugin"
    remedy = "Hold plain values (numbers, texts, lists of them), and let converters leave alone what they made"
    forms: dict[str, Callable[[], SelectedPlugin]] = {
        "TOML": lambda: SelectedPlugin.of(plugin.loaded.record, tomllib.loads(to_toml(plugin.table)), "TOML"),
        "the lock": lambda: SelectedPlugin.from_lock(json.loads(json.dumps(plugin.to_lock_entry()))),
    }
    for form, read in forms.items():
        try:
            reread = read()
        except (EngineError, TypeError, ValueError) as error:
            cause = error.cause if isinstance(error, EngineError) else str(error)
            raise Broken(f"its options cannot be read back from {form}: {cause}", remedy) from error
        for key, value in plugin.table.items():
            if reread.table[key] != value:
                raise Broken(f"its option {key} is {value!r} before and {reread.table[key]!r} after it went through {form}", remedy)


@promise("Its product and its options can be pickled, and the copy is of the same sort")
def pickling(subject: Subject[Any], _case: None) -> None:
    options = None if subject.plugin is None else subject.plugin.options
    for what, value in (("its options", options), ("its product", subject.make())):
        try:
            copy = _Unpickler(_pickle(value)).load()
        except Exception as error:
            raise Broken(
                f"{what} cannot be pickled: {' '.join(str(error).split())}",
                "Keep functions at the top of a module, and neither lambdas nor open files in attributes",
            ) from error
        if type(copy) is not type(value):
            raise Broken(f"{what} come back from pickling as {type(copy).__name__}", "Correct its __reduce__ or __getstate__")


def _pickle(value: object) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles a decorated function through its plugin, because its name now refers to the plugin."""

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        if type(obj) is FunctionType and isinstance(_find_object(obj.__module__, obj.__qualname__), FunctionPlugin):
            return obj.__module__, obj.__qualname__
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def persistent_load(self, pid: tuple[str, str]) -> Any:
        return _find_object(*pid).function


def _find_object(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _no_entry_module(subject: Subject[Any]) -> str | None:
    if subject.plugin is None:
        return _no_plugin(subject)
    if subject.plugin.loaded.record.source == "file":
        return "a local file has no entry module; only who names it imports it"
    return None


@promise("The module of its entry point imports neither torch nor ray, transformers or datasets", exempt=_no_entry_module)
def light_import(subject: Subject[Any], _case: None) -> None:
    assert subject.plugin is not None, "exempt without a plugin"
    code = f"""
import json, sys
from skyrl_engine.config import SelectedPlugin
SelectedPlugin.from_lock(json.load(sys.stdin))
print(*(name for name in {HEAVY!r} if name in sys.modules))
"""
    process = subprocess.run(  # noqa: S603 - this interpreter, with a text of our own
        [sys.executable, "-P", "-c", code],  # -P: no file of the current folder passes for the package
        input=json.dumps(subject.plugin.to_lock_entry()),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    if process.returncode:
        last = process.stderr.strip().splitlines()[-1:] or ["no message"]
        raise Broken(f"cannot be loaded in a fresh interpreter: {last[0]}", "Import what it needs in its own module")
    heavy = process.stdout.split()
    if heavy:
        target = subject.plugin.loaded.record.target.partition(":")[0]
        raise Broken(
            f"importing {target} imports {' and '.join(heavy)}, in every command that only lists or checks plugins",
            "Import it inside the functions that use it",
        )


PLUGIN_PROMISES: tuple[Promise[Any, Any], ...] = (config_round_trip, pickling, light_import)
