"""Real distributions, made of files: a folder on sys.path with packages and their .dist-info next to them."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

MakeDistribution = Callable[..., Path]

LOSS_MODULE = """
from skyrl_engine import loss

@loss(needs=("logprobs",))
def plain(tokens, config):
    return -tokens.logprobs
"""


def write_distribution(
    folder: Path,
    name: str,
    version: str = "1.0.0",
    *,
    entry_points: Mapping[str, Mapping[str, str]],
    requires: Sequence[str] = ("skyrl-engine>=0.3,<0.4",),
    modules: Mapping[str, str] = {},
) -> Path:
    """Install a distribution into `folder` as pip leaves it; returns its .dist-info."""
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    extras = ["Provides-Extra: runtime"] if any("extra ==" in line for line in requires) else []
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {version}",
        *extras,
        *(f"Requires-Dist: {line}" for line in requires),
    ]
    (information / "METADATA").write_text("\n".join(lines) + "\n")
    sections = [
        "\n".join([f"[skyrl_engine.{kind}]", *(f"{point} = {target}" for point, target in points.items())])
        for kind, points in entry_points.items()
    ]
    (information / "entry_points.txt").write_text("\n\n".join(sections) + "\n")
    for path, text in modules.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    importlib.invalidate_caches()
    return information


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder at the head of sys.path; modules imported from the test's folder are forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for module, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if module.startswith("skyrl_engine_local_") or (file and Path(file).is_relative_to(tmp_path)):
            del sys.modules[module]


@pytest.fixture
def install_into() -> MakeDistribution:
    """`install_into(folder, name, version, entry_points=..., ...)`: `write_distribution`."""
    return write_distribution


@pytest.fixture
def install(site: Path) -> MakeDistribution:
    """`install(name, version, entry_points=..., ...)` writes a distribution into `site`."""
    return functools.partial(write_distribution, site)


@pytest.fixture
def install_loss(install: MakeDistribution) -> MakeDistribution:
    """`install_loss(name, version, source=..., loss=..., requires=...)`: a distribution that offers one loss, made by `source`'s `plain`."""

    def make(name: str, version: str = "1.0.0", *, source: str = LOSS_MODULE, loss: str = "plain", **options: Any) -> Path:
        package = name.replace("-", "_")
        return install(
            name,
            version,
            entry_points={"loss": {loss: f"{package}.plugin:plain"}},
            modules={f"{package}/__init__.py": "", f"{package}/plugin.py": source},
            **options,
        )

    return make
