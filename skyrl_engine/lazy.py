"""Packages that offer names of their modules, each imported when it is first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of `package`: `homes` names the module of every name, inside the package or as "skyrl_engine...." in full."""

    def __getattr__(name: str) -> Any:  # noqa: N807 - it becomes the package's
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        module = import_module(home if home.startswith("skyrl_engine.") else f"{package}.{home}")
        value = vars(sys.modules[package])[name] = getattr(module, name)
        return value

    return __getattr__
