"""Plugins import public names of the engine alone, and nothing of each other."""

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Imports = Callable[..., set[str]]

PUBLIC = ("contracts", "environments", "interop", "modeling", "model_facts", "near_words", "scratch", "tracking")
"""In addition to the facade. `contracts` means the names it offers, not its files; `modeling` and `model_facts` are for backends and
generators, `environments` for environments, `tracking` for trackers, the names that `training` offers for trainers, `near_words`
for messages, `scratch` for temporary folders."""
ROOT = Path(__file__).parents[2]
PROJECTS = [path.parent for pattern in ("plugins", "contrib") for path in sorted(ROOT.glob(f"{pattern}/*/pyproject.toml"))]
PACKAGES = {project: next((project / "src").iterdir()).name for project in PROJECTS if (project / "src").exists()}


def trespasses(names: set[str], own: str, public: tuple[str, ...]) -> Iterator[str]:
    """Imports of the engine's inner parts, or of another plugin."""
    import skyrl_engine
    from skyrl_engine import contracts, training

    facade = {f"skyrl_engine.{name}" for name in skyrl_engine.__all__} | {"skyrl_engine"}
    facade |= {f"skyrl_engine.training.{name}" for name in training.__all__}
    offered = {f"skyrl_engine.contracts.{name}" for name in contracts.__all__} | {"skyrl_engine.contracts"}
    for name in sorted(names):
        head, _, rest = name.partition(".")
        inner = head == "skyrl_engine" and name not in facade and rest.partition(".")[0] not in public
        inner |= name.startswith("skyrl_engine.contracts.") and name not in offered
        other = head in PACKAGES.values() and head != own
        if inner or other:
            yield name


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_a_plugin_imports_only_what_is_public(imports: Imports, project: Path) -> None:
    own = PACKAGES[project]
    files = list((project / "src").rglob("*.py"))
    assert files
    found = {
        file.relative_to(ROOT).as_posix(): list(trespasses(imports(file.read_text(), package=own), own, PUBLIC)) for file in files
    }
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from skyrl_engine.objective.objective import make",
        "import skyrl_engine.workers.launch",
        "from skyrl_engine.hooks.markers import hookimpl",
        "from skyrl_engine import registry",
        "from skyrl_engine.contracts.values.plan import Layout",
        "from skyrl_engine.testing import collators",
        "def f():\n    from skyrl_engine_losses.plugin import cross_entropy",
    ],
)
def test_a_trespass_would_be_seen(imports: Imports, text: str) -> None:
    assert list(trespasses(imports(text), "skyrl_engine_mergers", PUBLIC))


def test_what_is_public_is_left_alone(imports: Imports) -> None:
    text = "from skyrl_engine import hookimpl\nfrom skyrl_engine.modeling.scorer import Scorer\nimport torch\nimport skyrl_engine_fsdp.plugin"
    assert list(trespasses(imports(text), "skyrl_engine_fsdp", PUBLIC)) == []


ELSEWHERE = ("vllm-server",)
"""Plugins of another program, which the engine is not beside."""


@pytest.mark.parametrize("project", [path for path in PROJECTS if path.name not in ELSEWHERE], ids=lambda project: project.name)
def test_a_plugin_states_the_engines_it_is_made_for(project: Path) -> None:
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    ranges = [line for line in metadata["dependencies"] if line.startswith("skyrl-engine")]
    assert ranges
    assert all("<" in requirement for requirement in ranges), (
        "without an upper bound, an incompatible engine is found out by a traceback"
    )


@pytest.mark.parametrize("project", [path for path in PROJECTS if path.parent.name == "plugins"], ids=lambda project: project.name)
def test_a_first_party_plugin_is_named_after_its_folder(project: Path) -> None:
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert metadata["name"] == f"skyrl-engine-{project.name}"
    assert PACKAGES[project] == f"skyrl_engine_{project.name.replace('-', '_')}"


PAGES = sorted((ROOT / "docs" / "how-to").glob("write-a*.md"))
TEMPLATES = sorted((ROOT / "skyrl_engine" / "cli" / "scaffold" / "templates").rglob("*.py.in"))


@pytest.mark.parametrize("file", [*PAGES, *TEMPLATES], ids=lambda file: file.relative_to(ROOT).as_posix())
def test_pages_and_scaffolds_show_what_is_public(imports: Imports, file: Path) -> None:
    """Examples also hold plugins to the kit, `skyrl_engine.testing`, whose names are those that it offers."""
    text = file.read_text()
    if file.suffix == ".md":
        text = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    statements = re.findall(
        r"^\s*(from skyrl_engine(?:\.[\w.]+)? import (?:\([^)]*\)|[\w, ]+)|import skyrl_engine\.[\w.]+)", text, re.MULTILINE
    )
    found = {name for statement in statements for name in trespasses(imports(statement), "", (*PUBLIC, "testing"))}
    assert found == set()
