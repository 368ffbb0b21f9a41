"""Dependencies point one way: from the command line down to errors, in the order that ORDER below gives."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Imports = Callable[..., set[str]]

ORDER = (
    ("errors", "cleanup", "scratch", "spans", "lazy", "visible", "near_words"),
    ("contracts",),
    ("hooks",),
    ("registry",),
    ("object_store",),
    ("config",),
    ("model_facts",),
    ("objective", "data", "modeling"),
    ("workers",),
    ("run",),
    ("engine",),
    ("interop",),
    ("environments",),
    ("rollout",),
    ("report", "tracking"),
    ("training",),
    ("proof",),
    ("testing", "doctor", "catalogue"),
    ("cli",),
)
LEVELS = {name: level for level, names in enumerate(ORDER) for name in names}
FACADE = LEVELS["hooks"]
"""The package itself offers what is up to the hooks, so only what is above them may import from it."""

BEYOND = {
    "skyrl_engine.engine.engine.Engine",
    "skyrl_engine.environments.functions.group_reward",
    "skyrl_engine.environments.functions.reward",
    "skyrl_engine.rollout.exported.read_rollouts",
}
"""Names beyond that, for programs and for authors: imported when first used; the engine's own code does not use them from there."""


def package_of(file: Path, engine: Path) -> str:
    """The part of the engine a file belongs to: "registry", or "" for the facade."""
    return file.relative_to(engine).with_suffix("").parts[0].removesuffix("__init__")


def wrong_ways(package: str, names: set[str]) -> Iterator[str]:
    for name in sorted(names):
        parts = name.split(".")
        if parts[0] != "skyrl_engine":
            continue
        target = parts[1] if len(parts) > 1 and parts[1] in LEVELS else ""
        if target == package:
            continue
        if package == "":
            allowed = (bool(target) and LEVELS[target] <= FACADE) or name in BEYOND
        elif target == "":
            allowed = LEVELS[package] > FACADE or name == "skyrl_engine.__version__"
        else:
            allowed = LEVELS[target] < LEVELS[package]
        if not allowed or (target == "testing" and package != "cli"):
            yield f"{package or 'the facade'} imports {name}"


def test_every_part_of_the_engine_has_its_place(engine: Path) -> None:
    parts = {path.stem for path in engine.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__", "__main__"} == set(LEVELS)


def test_no_file_imports_the_wrong_way(engine: Path, imports: Imports) -> None:
    wrong = []
    for file in engine.rglob("*.py"):
        if file.name == "__main__.py":
            continue
        package = ".".join(file.relative_to(engine.parent).parent.parts)
        found = wrong_ways(package_of(file, engine), imports(file.read_text(), package=package))
        wrong += [f"{file.relative_to(engine.parent)}: {name}" for name in found]
    assert wrong == []


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("contracts", "from skyrl_engine.registry.kinds import KINDS"),
        ("contracts", "import skyrl_engine.hooks.spec"),
        ("contracts", "from skyrl_engine import hookimpl"),
        ("registry", "def f():\n    from skyrl_engine.config import resolve"),
        ("objective", "if TYPE_CHECKING:\n    from skyrl_engine.data.table.cache import Cache"),
        ("data", "from skyrl_engine.modeling import scorer"),
        ("training", "from ..cli import app"),
        ("run", "from skyrl_engine.testing import collators"),
        ("", "from skyrl_engine.registry.loader import load"),
    ],
)
def test_a_wrong_way_would_be_seen(imports: Imports, package: str, text: str) -> None:
    assert list(wrong_ways(package, imports(text, package=f"skyrl_engine.{package}")))


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("contracts", "from skyrl_engine.errors import DataError\nfrom .plan import Layout"),
        ("registry", "from skyrl_engine import __version__"),
        ("run", "from skyrl_engine import hookimpl"),
        ("cli", "from skyrl_engine.training.sft.trainer import run_sft"),
        ("", "from skyrl_engine.contracts.kinds.loss import LossTokens"),
        ("data", "import numpy"),
    ],
)
def test_a_right_way_is_left_alone(imports: Imports, package: str, text: str) -> None:
    assert list(wrong_ways(package, imports(text, package=f"skyrl_engine.{package}"))) == []
