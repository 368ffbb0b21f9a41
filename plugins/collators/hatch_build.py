"""Compiles the kernels when this distribution is built or installed, where there is a C compiler; without one it is pure Python."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from platform import machine
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent
SOURCES = HERE / "native"
PACKAGE = HERE / "src" / "skyrl_engine_collators"
NAME = "_kernels.abi3.so"
FLAGS = ("-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")  # no -march: a wheel runs on every such processor
OF_THE_SYSTEM = {
    "darwin": ("-bundle", "-undefined", "dynamic_lookup"),
    "linux": ("-shared", "-fno-plt"),  # Python's functions, called per number of a list, without a jump in between
}
TIMEOUT_SECONDS = 300


class CompilerError(Exception):
    """Why there are no compiled kernels."""


class CompiledKernels(BuildHookInterface[Any]):
    """Puts the extension module into wheels, and next to the sources if the installation is editable."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is "standard" or "editable". A build without kernels says so and goes on."""
        editable = version == "editable"
        self._scratch = tempfile.TemporaryDirectory()
        built = (PACKAGE if editable else Path(self._scratch.name)) / NAME
        built.unlink(missing_ok=True)  # what an earlier build left is of other sources
        try:
            compile_kernels(built)
        except CompilerError as problem:
            self.app.display_warning(f"skyrl-engine-collators is built without compiled kernels, NumPy does their work: {problem}")
            return
        if not editable:
            build_data["force_include"][str(built)] = f"skyrl_engine_collators/{NAME}"
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{_name_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 hatchling's signature
        self._scratch.cleanup()


def compile_kernels(target: Path, flags: Sequence[str] = ()) -> None:
    """Compile native/*.c to the extension module `target`, and import it once. Raises CompilerError; `target` is then not there.

    The compiler is `CC` of the environment, else the one Python was built with; `ARCHFLAGS`, `CFLAGS` and `LDFLAGS` are added, `flags` last.
    """
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    environment_flags = [flag for name in ("ARCHFLAGS", "CFLAGS", "LDFLAGS") for flag in shlex.split(os.environ.get(name, ""))]
    headers = [f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")]
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    unfinished = target.with_name(f".{os.getpid()}-{NAME}")  # under its name only when whole: a process may be loading it
    output = [*OF_THE_SYSTEM.get(sys.platform, ("-shared",)), "-o", str(unfinished)]
    try:
        _run([*compiler, *FLAGS, *headers, *sources, *environment_flags, *flags, *output])
        if not flags and machine() in _list_architectures():
            _run([sys.executable, "-c", IMPORT, str(unfinished)])
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _name_platform() -> str:
    """Return the platform of the wheel's tag. macOS' Python may be of two architectures, where the compiler makes code for one."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if sys.platform != "darwin":
        return platform
    architectures = _list_architectures()
    name = "universal2" if architectures == ["arm64", "x86_64"] else "_".join(architectures)
    return re.sub(r"^(macosx_\d+_\d+)_.*$", rf"\g<1>_{name}", platform)


def _list_architectures() -> list[str]:
    """Return what the compiler makes code for: the architectures that `ARCHFLAGS` names, as macOS has it, else this machine's."""
    flags = shlex.split(os.environ.get("ARCHFLAGS", ""))
    return sorted({flags[i + 1] for i, flag in enumerate(flags[:-1]) if flag == "-arch"}) or [machine()]


IMPORT = """
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
loader = ExtensionFileLoader("_kernels", sys.argv[1])
loader.exec_module(module_from_spec(spec_from_loader("_kernels", loader)))
"""


def _run(command: Sequence[str]) -> None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)  # noqa: S603 the compiler
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise CompilerError(str(problem)) from problem
    if process.returncode:
        lines = (process.stderr or process.stdout).strip().splitlines()
        message = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
        raise CompilerError(f"{command[0]} ended with {process.returncode}: {message}")
