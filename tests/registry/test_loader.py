"""Loading: metadata is checked before import, exactly one plugin is addressed, and whatever breaks is named with one action."""

import sys
from pathlib import Path

import pytest
from focal_of_the_docs import FOCAL, is_focal, resolve

from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.errors import (
    ContractError,
    PluginBrokenError,
)
from skyrl_engine.registry.loader import list_implemented_kinds, load
from skyrl_engine.registry.resolve import Registry


def test_the_printed_loss_works_from_a_distribution(install) -> None:
    modules = {"printed_focal/__init__.py": "", "printed_focal/plugin.py": FOCAL}
    install("printed-focal", entry_points={"loss": {"printed": "printed_focal.plugin:focal"}}, modules=modules)
    is_focal(load(resolve("printed")))


def test_an_alias_is_the_same_object_under_another_name(install) -> None:
    install(
        "two-names",
        entry_points={"loss": {"one": "two_names:focal", "other": "two_names:focal"}},
        modules={"two_names.py": FOCAL},
    )
    one, other = load(resolve("one")), load(resolve("other"))
    assert one.plugin is other.plugin
    assert (one.record.name, other.record.name) == ("one", "other")


def test_a_module_can_be_the_plugin(install) -> None:
    source = """
from skyrl_engine import hookimpl
@hookimpl
def skyrl_engine_make_merger():
    class Merger:
        def merge(self, outputs, plan): return (outputs, plan)
    return Merger()
"""
    install("module-plugin", entry_points={"merger": {"mine": "module_plugin"}}, modules={"module_plugin.py": source})
    loaded = load(resolve("mine", "merger"))
    assert loaded.schema is None
    assert loaded.make(None, FactoryContext()).merge(1, 2) == (1, 2)


TWO_KINDS = """
from attrs import define
from skyrl_engine import hookimpl

@define
class Both:  # compared by value and not hashable, as attrs makes classes
    made: int = 0

    @hookimpl
    def skyrl_engine_make_merger(self, context):
        self.made += 1
        return Merger(context.seed)

    @hookimpl
    def skyrl_engine_make_observer(self):
        return self

    @hookimpl
    def skyrl_engine_step_finished(self, event): pass

@define
class Merger:
    seed: int
    def merge(self, outputs, plan): pass

one, other = Both(), Both()
"""


def test_plugins_of_one_module_that_compare_equal_are_kept_apart(install) -> None:
    points = {"merger": {"one": "two_kinds:one", "other": "two_kinds:other"}, "observer": {"watch": "two_kinds:one"}}
    install("two-kinds", entry_points=points, modules={"two_kinds.py": TWO_KINDS})
    one, other = load(resolve("one", "merger")), load(resolve("other", "merger"))
    watch = load(resolve("watch", "observer"))
    assert one.make(None, FactoryContext(seed=3)).seed == 3
    assert (one.plugin.made, other.plugin.made) == (1, 0)
    assert watch.make(None, FactoryContext()) is one.plugin


def test_the_kinds_that_an_object_makes(install) -> None:
    install("two-kinds", entry_points={"merger": {"one": "two_kinds:one"}}, modules={"two_kinds.py": TWO_KINDS})
    assert list_implemented_kinds(resolve("one", "merger")) == ["merger", "observer"]


def test_a_class_in_place_of_an_instance_is_refused(install) -> None:
    install("two-kinds", entry_points={"merger": {"klass": "two_kinds:Both"}}, modules={"two_kinds.py": TWO_KINDS})
    with pytest.raises(PluginBrokenError, match=r"is the class Both.*Point at an instance"):
        load(resolve("klass", "merger"))


# What can be wrong with a plugin: its source, what the error says.
BROKEN = {
    "raises": ("raise RuntimeError('no licence.')", "failed in its import: RuntimeError: no licence. Upgrade it: "),
    "exits": ("raise SystemExit(1)", "failed in its import: SystemExit: 1. Upgrade it: "),
    "raises beside Exception": (
        "class Panic(BaseException): pass\nraise Panic('at the disco')",
        "failed in its import: Panic: at the disco. Upgrade it: ",
    ),
    "syntax": ("def plain(:", "failed in its import: SyntaxError"),
    "missing module": ("import not_a_module_anywhere", "ModuleNotFoundError: No module named 'not_a_module_anywhere'"),
    "missing attribute": ("", "AttributeError"),
    "needs as text": (
        "from skyrl_engine import loss\n@loss(needs=('logprobs'))\ndef plain(tokens, config): pass",
        "TypeError: needs is the text 'logprobs'; write needs=('logprobs',)",
    ),
    "loss takes too little": (
        "from skyrl_engine import loss\n@loss(needs=('logprobs',))\ndef plain(tokens): pass",
        "TypeError: plain(tokens) must take (tokens, config)",
    ),
    "no hook": ("plain = object()", "does not implement skyrl_engine_make_loss"),
    "undecorated": ("def plain(tokens, config): pass", "or a function with skyrl_engine.loss"),
    "another kind": (
        "from skyrl_engine import reducer\n@reducer()\ndef plain(structure, config): pass",
        "does not implement skyrl_engine_make_loss. Set it as reducer",
    ),
    "unknown hook": (
        "from skyrl_engine import hookimpl\nclass P:\n  @hookimpl\n  def skyrl_engine_make_los(self): pass\nplain = P()",
        "implements the unknown hook skyrl_engine_make_los. Did you mean skyrl_engine_make_loss?",
    ),
    "unknown argument": (
        "from skyrl_engine import hookimpl\nclass P:\n  @hookimpl\n  def skyrl_engine_make_loss(self, konfig): pass\nplain = P()",
        "has a hook that does not fit: ",
    ),
    "schema raises": (
        (
            "from skyrl_engine import hookimpl\nclass P:\n  @hookimpl\n  def skyrl_engine_make_loss(self): pass\n"
            "  @hookimpl\n  def skyrl_engine_config_schema(self): return 1 / 0\nplain = P()"
        ),
        "failed in skyrl_engine_config_schema: ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize("flaw", BROKEN)
def test_a_broken_plugin_is_named_with_version_cause_and_action(install_loss, flaw: str) -> None:
    source, expected = BROKEN[flaw]
    install_loss("broken-loss", "3.2.1", source=source)
    with pytest.raises(PluginBrokenError) as caught:
        load(resolve("plain"))
    assert caught.value.exit_code == 3
    assert "loss 'plain' of broken-loss 3.2.1" in caught.value.cause
    assert expected in caught.value.summary
    assert "\n" not in caught.value.summary


def test_a_reward_function_is_told_where_it_belongs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(text, task):\n    return 1.0\n")
    with pytest.raises(PluginBrokenError) as caught:
        load(Registry.discover().resolve("environment", f"{tmp_path}/mine.py:score"))
    assert f"--reward {tmp_path}/mine.py:score --data" in caught.value.remedy


def test_the_place_of_a_syntax_error_is_where_it_is_written(install_loss) -> None:
    install_loss("broken-loss", "3.2.1", source="x = 1\ndef plain(:")
    with pytest.raises(PluginBrokenError) as caught:
        load(resolve("plain"))
    (place,) = caught.value.details
    assert place.endswith(".py, line 2, in <module>")


def test_the_place_of_the_failure_is_told(install_loss) -> None:
    install_loss("broken-loss", source="\n\nraise RuntimeError('here')")
    with pytest.raises(PluginBrokenError) as caught:
        load(resolve("plain"))
    (place,) = caught.value.details
    assert place.endswith("broken_loss/plugin.py, line 3, in <module>")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_place_of_a_mistake_is_the_plugins_own_line_though_the_engine_finds_it(install_loss) -> None:
    install_loss("broken-loss", source="from skyrl_engine import loss\n\n@loss(needs=())\ndef focal(tokens):\n    return tokens\n")
    with pytest.raises(PluginBrokenError, match=r"must take \(tokens, config\)") as caught:
        load(resolve("plain"))
    (place,) = caught.value.details
    assert place.endswith("broken_loss/plugin.py, line 3, in <module>")


@pytest.mark.parametrize("flaw", BROKEN)
def test_a_broken_plugin_that_nobody_requested_harms_nobody(install_loss, install, flaw: str) -> None:
    install_loss("broken-loss", source=BROKEN[flaw][0], loss="broken")
    install("sound-loss", entry_points={"loss": {"sound": "sound_loss:focal"}}, modules={"sound_loss.py": FOCAL})
    is_focal(load(resolve("sound")))
    assert "broken_loss.plugin" not in sys.modules


@pytest.mark.parametrize("schema", ["dict", "object()", "type('Plain', (), {})"])
def test_a_schema_that_is_no_attrs_class_breaks_the_contract(install_loss, schema: str) -> None:
    source = (
        "from skyrl_engine import hookimpl\nclass P:\n  @hookimpl\n  def skyrl_engine_make_loss(self): pass\n"
        f"  @hookimpl\n  def skyrl_engine_config_schema(self): return {schema}\nplain = P()"
    )
    install_loss("broken-loss", source=source)
    with pytest.raises(ContractError, match="Return an attrs class"):
        load(resolve("plain"))


NEEDED = {
    "function": {"reward": "operator:eq", "data": "tasks.jsonl"},
    "prompts": {"data": "tasks.jsonl"},
    "reasoning_gym": {"task": "spell_backward"},
    "gymnasium": {"id": "Any-v0"},
    "reward_range": {"low": 0.0, "high": 1.0},
    "mlflow": {"uri": "http://127.0.0.1:1"},
    "openai": {"url": "http://127.0.0.1:1/v1", "model": "m"},
}
"""Options without a default, of plugins that have such."""


def test_first_party_plugins_load_through_the_same_door() -> None:
    for record in Registry.discover().records():
        if record.distribution.startswith("skyrl-engine"):
            loaded = load(record)
            product = loaded.make(None if loaded.schema is None else loaded.schema(**NEEDED.get(record.name, {})), FactoryContext())
            assert product is not None
