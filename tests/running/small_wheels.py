"""Small wheels for tests of catalogues, built by hatchling, and indexes of them."""

import subprocess
import sys
from pathlib import Path

from skyrl_engine.catalogue.plugin_index import IndexedDistribution, IndexedPlugin, IndexedWheel, PluginIndex
from skyrl_engine.catalogue.wheel_facts import read_wheel

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
description = "A reducer | of <b>tests</b>"
license = "MIT"
requires-python = ">=3.11"
dependencies = ["skyrl-engine{engine}"{more}]
urls = {{ Homepage = "https://acme.example/reducers" }}

[project.entry-points."skyrl_engine.reducer"]
acme_tiny = "{package}:acme_tiny"
"""

KEPT = '''
from skyrl_engine import reducer


@reducer()
def acme_tiny(structure, config):
    """The sum over tokens."""
    return structure.loss_weight.astype("float64")
'''
BROKEN = KEPT.replace('.astype("float64")', ".astype('float32')")


def build_wheel(
    folder: Path, name: str = "acme-tiny", version: str = "0.1.0", *, engine: str = ">=0.3,<0.4", code: str = KEPT, more: str = ""
) -> Path:
    """Write a distribution with the reducer `acme_tiny` into a new folder, and build its wheel; `more` are further requirements."""
    package = name.replace("-", "_")
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(code)
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name, version=version, engine=engine, package=package, more=more))
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=folder, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def index_of(wheel: Path, **changes: object) -> PluginIndex:
    """Return an index of one wheel as if it had been verified, with other values of its entry."""
    facts = read_wheel(wheel)
    values = {
        "version": facts.version,
        "file": facts.file,
        "sha256": facts.sha256,
        "size": facts.size,
        "engine": "0.3.0",
        "python": "3.11.7",
        "date": "2026-01-31",
        "plugins": tuple(IndexedPlugin(kind, name, "kept", 20) for kind, name in facts.plugins),
        "requires_engine": facts.requires_engine,
        "requires_python": facts.requires_python,
        "summary": facts.summary,
        "license": facts.license,
        "homepage": facts.homepage,
        **changes,
    }
    return PluginIndex((IndexedDistribution(facts.name, (IndexedWheel(**values),)),))
