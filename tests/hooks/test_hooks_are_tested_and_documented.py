"""Every hook is used by a test and written in docs/reference/hooks.md with its exact signature and text."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from skyrl_engine.hooks import spec
from skyrl_engine.hooks.markers import PROJECT
from skyrl_engine.registry.kinds import CONFIG_SCHEMA_HOOK, KINDS, OBSERVER_HOOKS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/hooks.md"
DEFINITIONS = {
    node.name: node
    for node in ast.parse(inspect.getsource(spec)).body
    if isinstance(node, ast.FunctionDef) and hasattr(getattr(spec, node.name), f"{PROJECT}_spec")
}


def signature(definition: ast.FunctionDef) -> str:
    returns = ast.unparse(definition.returns) if definition.returns else "None"
    return f"def {definition.name}({ast.unparse(definition.args)}) -> {returns}"


def section(name: str) -> str:
    found = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found, f"{PAGE.name} has no section {name}"
    return found[1]


def test_the_specification_is_read_whole() -> None:
    assert len(DEFINITIONS) == sum(name.startswith(PROJECT) for name in vars(spec)) >= 14


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_test_implements_the_hook(name: str) -> None:
    files = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/test_*.py")]
    assert any(f"def {name}(" in file.read_text() for file in files), f"no test implements {name}"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_page_gives_the_exact_signature(name: str) -> None:
    assert f"```pyi\n{signature(DEFINITIONS[name])}\n```" in section(name)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_page_says_what_the_hook_says_and_since_when(name: str) -> None:
    text = inspect.getdoc(getattr(spec, name))
    assert text
    assert "versionadded: " in text, f"{name} does not say since when"
    expected = re.sub(r"versionadded: ([\d.]+)", r"Since \1.", text)
    assert " ".join(expected.split()) in " ".join(section(name).split())


def test_the_page_has_no_other_hooks() -> None:
    assert set(re.findall(r"^### (\w+)$", PAGE.read_text(), re.MULTILINE)) == set(DEFINITIONS)


def test_the_page_lists_every_kind() -> None:
    rows = re.findall(r"^\| (\w+) \| `([\w.]+)` \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    assert [(kind, group, re.findall(r"`(\w+)`", hooks)) for kind, group, hooks, _ in rows] == [
        (kind.name, kind.group, list(kind.hooks)) for kind in KINDS.values()
    ]
    assert [product.strip("`") for *_, product in rows if product.startswith("`")] == [
        kind.contract for kind in KINDS.values() if kind.contract
    ]


def test_every_hook_is_a_factory_an_observers_or_the_schema() -> None:
    factories = [hook for kind in KINDS.values() for hook in kind.hooks]
    assert sorted([CONFIG_SCHEMA_HOOK, *factories, *OBSERVER_HOOKS]) == sorted(DEFINITIONS)


def test_addressed_hooks_give_one_result_and_the_start_is_remembered() -> None:
    options = {name: getattr(getattr(spec, name), f"{PROJECT}_spec") for name in DEFINITIONS}
    assert {name for name in options if options[name]["firstresult"]} == set(DEFINITIONS) - set(OBSERVER_HOOKS)
    assert [name for name in options if options[name]["historic"]] == ["skyrl_engine_session_started"]


def test_every_kind_has_its_place_on_the_page() -> None:
    for kind in KINDS.values():
        page, _, anchor = kind.page.partition("#")
        assert ROOT / "docs" / page == PAGE
        assert f"### {anchor}\n" in PAGE.read_text()


def test_the_observer_on_the_page_works(capsys: pytest.CaptureFixture[str]) -> None:
    from skyrl_engine.contracts.kinds.observer import StepFinished
    from skyrl_engine.run.observer_calls import ObserverBus

    (example,) = (
        text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "skyrl_engine_make_observer" in text
    )
    names: dict[str, object] = {}
    exec(example, names)
    ObserverBus([names["LossPrinter"]()]).step_finished(StepFinished(1, 3, {"loss": 0.5}, 0.1))  # type: ignore[operator]  # a class
    assert capsys.readouterr().out == "step 1: loss 0.500\n"
