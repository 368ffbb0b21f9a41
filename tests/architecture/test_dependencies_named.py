"""A dependency is named, with its reason, in docs/explanation/dependencies.md."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~;\[ ]", line)[0].lower() for line in requirements if line and not line.startswith(("-", "#"))}


def test_every_dependency_has_its_reason():
    files = [
        path for path in ROOT.glob("requirements-*.txt") if path.name not in ("requirements-lock.txt", "requirements-vllm.txt")
    ]
    wanted = {name for path in files for name in names(path.read_text().splitlines())}
    for path in [ROOT / "pyproject.toml", *ROOT.glob("*/*/pyproject.toml")]:
        project = tomllib.loads(path.read_text())["project"]
        for requirements in [project["dependencies"], *project.get("optional-dependencies", {}).values()]:
            wanted |= names(requirements)
    wanted = {name for name in wanted if not name.startswith("skyrl-engine")}
    page = (ROOT / "docs" / "explanation" / "dependencies.md").read_text().lower()
    named = {name.strip() for line in page.splitlines() if line.startswith("|") for name in re.split(r",|\|", line.split("|")[1])}
    assert wanted <= named, f"not named: {sorted(wanted - named)}"
