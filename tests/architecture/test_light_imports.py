"""Imports stay light: no torch in contracts, hooks, registry and config; no NumPy or pluggy where plugins are only found and named."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Imports = Callable[..., set[str]]

HEAVY = {"torch", "ray", "transformers", "datasets", "pyarrow", "safetensors"}
NEVER = HEAVY - {"pyarrow"}
"""Arrow tables become columns in contracts/, by a function that imports pyarrow when it is called with one."""

TORCH_FREE = ("contracts", "hooks", "registry", "config")
RESOLUTION = ("kinds", "known", "record", "discovery", "plugin_ref", "selection", "suggest", "resolve", "compat")


def heads(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", TORCH_FREE)
def test_no_heavy_import_at_run_time_not_even_inside_functions(engine: Path, imports: Imports, package: str) -> None:
    files = list((engine / package).rglob("*.py"))
    assert files
    heavy = {file.name: heads(imports(file.read_text(), at_run_time=True)) & NEVER for file in files}
    assert {name: found for name, found in heavy.items() if found} == {}


def loaded_after(code: str) -> set[str]:
    """Top-level modules of a fresh interpreter that ran `code`."""
    report = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    ran = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.parametrize("package", TORCH_FREE)
def test_importing_every_module_brings_nothing_heavy(engine: Path, package: str) -> None:
    modules = [
        ".".join(file.relative_to(engine.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in (engine / package).rglob("*.py")
    ]
    assert not loaded_after("\n".join(f"import {module}" for module in modules)) & HEAVY


def test_finding_and_naming_plugins_takes_neither_numpy_nor_pluggy() -> None:
    modules = loaded_after("\n".join(f"import skyrl_engine.registry.{name}" for name in RESOLUTION))
    assert not modules & {*HEAVY, "numpy", "pluggy", "cattrs", "rich"}
    assert "skyrl_engine" in modules


def test_the_objective_takes_no_pluggy() -> None:
    """It calls plugins' products and names their owners; hooks are called where products are made."""
    assert not loaded_after("import skyrl_engine.objective.objective, skyrl_engine.objective.score") & {"pluggy"}


def test_loading_the_installed_plugins_takes_no_torch() -> None:
    """They are imported on the controller only to be configured and described."""
    code = """
from skyrl_engine.registry.loader import load
from skyrl_engine.registry.resolve import Registry
loaded = [load(record) for record in Registry.discover().records() if record.distribution.startswith("skyrl-engine")]
assert len(loaded) >= 7
[each.describe_backend(None if each.schema is None else each.schema(), 2) for each in loaded if each.record.kind == "backend"]
"""
    modules = loaded_after(code)
    assert "skyrl_engine_losses" in modules
    assert not modules & HEAVY
