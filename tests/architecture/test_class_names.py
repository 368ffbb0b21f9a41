"""Every class of the engine and of the first-party plugins has a name of its own: whoever searches for it finds one."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for folder in (ROOT / "skyrl_engine", *ROOT.glob("plugins/*/src")):
        for path in sorted(folder.rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
    assert len(places) > 400, "the folders are where they were"
