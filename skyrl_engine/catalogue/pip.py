"""pip as a program: of this interpreter, or of a virtual environment without one."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from skyrl_engine.errors import PluginIndexError

_TOLD_LINES = 6


def require_pip() -> None:
    """Raise PluginIndexError where this Python has no pip."""
    # the other finders of a process may not be asked: that of setuptools replaces distutils when pip is looked for
    if PathFinder.find_spec("pip") is None:
        raise PluginIndexError(f"{sys.executable} has no pip", remedy="Add it: python -m ensurepip")


def pip_install(*arguments: str | Path, into: Path | None = None) -> Sequence[str]:
    """Run `pip install` here, or in the virtual environment whose Python `into` is. Return the last lines that it said where it fails."""
    target = () if into is None else ("--python", str(into))
    quietly = ("--quiet", "--no-input", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", *target, "install", *quietly, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=plain_environment())  # noqa: S603 - pip of this very Python
    if done.returncode == 0:
        return ()
    if done.returncode < 0:  # it says nothing about what it should install
        raise PluginIndexError(f"pip was ended by signal {-done.returncode}", remedy="Run the command again")
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return lines[-_TOLD_LINES:] or [f"pip ended with exit code {done.returncode}"]


def plain_environment() -> dict[str, str]:
    """Return the environment of this process without what leads Python to other packages."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    }
