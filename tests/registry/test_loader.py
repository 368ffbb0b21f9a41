"""Loading: metadata is checked before import, exactly one plugin is addressed, and whatever breaks is named with one action."""

import json
import re
import sys
from pathlib import Path

import attrs
import pytest

from skyrl_engine import LossTokens
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.errors import (
    ContractError,
    PluginBrokenError,
    PluginError,
    PluginNotFoundError,
    UnsupportedError,
)
from skyrl_engine.registry.loader import kinds_made, load
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.registry.resolve import Registry

FOCAL = '''
from attrs import define
from skyrl_engine import loss

@define
class FocalConfig:
    gamma: float = 2.0

@loss(needs=("logprobs",), config=FocalConfig)
def focal(tokens, config):
    """Focal cross-entropy (Lin et al. 2017, eq. 4), float32[n]."""
    miss = 1 - tokens.logprobs.exp()
    return -(miss ** config.gamma) * tokens.logprobs
'''


def resolve(reference: str, kind: str = "loss", base: Path | None = None) -> PluginRecord:
    return Registry.discover().resolve(kind, reference, base=base)


def is_focal(loaded) -> None:
    import torch

    assert [(field.name, field.default) for field in attrs.fields(loaded.schema)] == [("gamma", 2.0)]
    focal = loaded.make(loaded.schema(gamma=1.0), FactoryContext())
    assert (focal.name, focal.needs, focal.reducers, focal.batch_local) == ("focal", ("logprobs",), None, False)
    logprobs = torch.tensor([-0.5, -2.0])
    tokens = LossTokens({"logprobs": logprobs}, None, None)  # type: ignore[arg-type]  # focal reads logprobs only
    torch.testing.assert_close(focal(tokens), -(1 - logprobs.exp()) * logprobs)


def test_the_printed_loss_works_from_a_distribution(install) -> None:
    modules = {"printed_focal/__init__.py": "", "printed_focal/plugin.py": FOCAL}
    install("printed-focal", entry_points={"loss": {"printed": "printed_focal.plugin:focal"}}, modules=modules)
    is_focal(load(resolve("printed")))


def test_the_printed_loss_works_from_a_local_file(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(FOCAL)
    is_focal(load(resolve("./my_loss.py:focal", base=tmp_path)))


def test_a_lock_rebuilds_a_local_file_where_there_is_none(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(FOCAL)
    lock = json.loads(json.dumps(resolve("./my_loss.py:focal", base=tmp_path).lock()))
    (tmp_path / "my_loss.py").write_text("raise SystemExit('the recorded text counts, not the file')")
    is_focal(load(PluginRecord.from_lock(lock)))


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
    assert kinds_made(resolve("one", "merger")) == ["merger", "observer"]


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


def with_factory(body: str) -> str:
    return f"""
from skyrl_engine import hookimpl
from skyrl_engine.errors import UnsupportedError
class P:
    @hookimpl
    def skyrl_engine_make_loss(self, config, context):
        {body}
plain = P()
"""


def test_a_factory_that_raises_is_named(install_loss) -> None:
    install_loss("broken-loss", "3.2.1", source=with_factory("raise KeyError('gamma')"))
    with pytest.raises(PluginBrokenError) as caught:
        load(resolve("plain")).make(None, FactoryContext())
    assert caught.value.summary == (
        "loss 'plain' of broken-loss 3.2.1 failed in skyrl_engine_make_loss: KeyError: 'gamma'. "
        "Upgrade broken-loss, or choose another loss"
    )


def test_what_a_factory_refuses_with_an_engine_error_is_meant(install_loss) -> None:
    install_loss("fussy-loss", source=with_factory("raise UnsupportedError('only on Tuesdays', remedy='Wait')"))
    with pytest.raises(UnsupportedError, match="only on Tuesdays"):
        load(resolve("plain")).make(None, FactoryContext())


def test_a_factory_that_returns_nothing_breaks_the_contract(install_loss) -> None:
    install_loss("broken-loss", source=with_factory("return None"))
    with pytest.raises(ContractError, match=r"skyrl_engine_make_loss of loss 'plain' of broken-loss 1\.0\.0 returned None"):
        load(resolve("plain")).make(None, FactoryContext())


def test_a_local_file_that_lacks_the_name_suggests_one(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(FOCAL)
    with pytest.raises(PluginNotFoundError) as caught:
        load(resolve("./my_loss.py:focl", base=tmp_path))
    assert caught.value.remedy == f"Did you mean {tmp_path}/my_loss.py:focal?"


def test_a_local_file_that_fails_is_named_by_path_hash_and_line(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text("x = 1\nx.y\n")
    record = resolve("./my_loss.py:focal", base=tmp_path)
    for _ in range(2):  # a failed import leaves nothing behind that a second would take for the module
        with pytest.raises(PluginBrokenError) as caught:
            load(record)
    assert f"{tmp_path}/my_loss.py (sha256 {record.sha256[:12]})" in caught.value.cause
    assert caught.value.details == (f"{tmp_path}/my_loss.py, line 2, in <module>",)
    assert caught.value.remedy == f"Correct {tmp_path}/my_loss.py, or choose another loss"


def test_an_edited_file_is_another_plugin_and_both_stay_what_they_were(site, tmp_path: Path) -> None:
    file = tmp_path / "my_loss.py"
    records = []
    for gamma in ("2.0", "5.0"):
        file.write_text(FOCAL.replace("2.0", gamma))
        records.append(resolve("./my_loss.py:focal", base=tmp_path))
    assert [load(record).schema().gamma for record in records] == [2.0, 5.0]
    assert load(records[0]).plugin is load(records[0]).plugin
    assert records[0].sha256 != records[1].sha256


def test_a_local_file_may_postpone_its_annotations(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text("from __future__ import annotations\n" + FOCAL)
    loaded = load(resolve("./my_loss.py:focal", base=tmp_path))
    assert attrs.fields(attrs.resolve_types(loaded.schema)).gamma.type is float


def test_the_recorded_text_keeps_every_byte(site, tmp_path: Path) -> None:
    content = "\ufeff# é\r\n".encode() + FOCAL.replace("\n", "\r\n").encode()
    (tmp_path / "my_loss.py").write_bytes(content)
    record = resolve("./my_loss.py:focal", base=tmp_path)
    assert record.source_text.encode() == content
    is_focal(load(PluginRecord.from_lock(json.loads(json.dumps(record.lock())))))


def test_a_lock_whose_text_was_changed_is_refused(site, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(FOCAL)
    lock = resolve("./my_loss.py:focal", base=tmp_path).lock()
    with pytest.raises(PluginBrokenError, match="another hash"):
        PluginRecord.from_lock({**lock, "source_text": FOCAL + "#"})


@pytest.mark.parametrize("lock", [{}, {"kind": "loss", "name": "x"}, {"kind": "loss", "name": "x", "target": "y", "novel": 1}])
def test_a_lock_that_cannot_be_read_is_refused(lock: dict[str, object]) -> None:
    with pytest.raises(PluginBrokenError, match="cannot be read"):
        PluginRecord.from_lock(lock)


@pytest.mark.parametrize("record", Registry.discover().records(), ids=lambda record: record.reference)
def test_every_installed_plugin_survives_its_lock(record: PluginRecord) -> None:
    assert PluginRecord.from_lock(json.loads(json.dumps(record.lock()))) == record


NEEDED = {
    "function": {"reward": "operator:eq", "data": "tasks.jsonl"},
    "prompts": {"data": "tasks.jsonl"},
    "reasoning_gym": {"task": "spell_backward"},
    "gymnasium": {"id": "Any-v0"},
    "reward_range": {"low": 0.0, "high": 1.0},
}
"""Options without a default, of plugins that have such."""


def test_first_party_plugins_load_through_the_same_door() -> None:
    for record in Registry.discover().records():
        if record.distribution.startswith("skyrl-engine"):
            loaded = load(record)
            product = loaded.make(None if loaded.schema is None else loaded.schema(**NEEDED.get(record.name, {})), FactoryContext())
            assert product is not None


def test_a_backend_is_described_and_checked(install) -> None:
    source = """
from skyrl_engine import hookimpl
from skyrl_engine.contracts.kinds.backend import BackendDescription
from skyrl_engine.contracts.values.topology import Topology
class P:
    def __init__(self, answer): self.answer = answer
    @hookimpl
    def skyrl_engine_make_backend(self): pass
    @hookimpl
    def skyrl_engine_describe_backend(self, world_size): return self.answer(world_size)
good = P(lambda size: BackendDescription(Topology(dp=size), frozenset({"padded"})))
small = P(lambda size: BackendDescription(Topology(), frozenset()))
wrong = P(lambda size: {"dp": size})
class Silent:
    @hookimpl
    def skyrl_engine_make_backend(self): pass
silent = Silent()
"""
    names = ("good", "small", "wrong", "silent")
    install("my-backend", entry_points={"backend": {n: f"my_backend:{n}" for n in names}}, modules={"my_backend.py": source})
    assert load(resolve("good", "backend")).describe_backend(None, 4).topology.dp == 4
    with pytest.raises(ContractError, match="lays out 1 ranks in a world of 4"):
        load(resolve("small", "backend")).describe_backend(None, 4)
    with pytest.raises(ContractError, match="Return a BackendDescription"):
        load(resolve("wrong", "backend")).describe_backend(None, 4)
    with pytest.raises(PluginError, match="does not implement skyrl_engine_describe_backend"):
        load(resolve("silent", "backend"))


def test_a_generator_is_described_with_values_that_mean_something(install) -> None:
    source = """
from attrs import evolve
from skyrl_engine import hookimpl
from skyrl_engine.contracts import GeneratorDescription
RIGHT = GeneratorDescription(frozenset({"logprobs"}), ("tensors",), "process", 4)
class P:
    def __init__(self, answer): self.answer = answer
    @hookimpl
    def skyrl_engine_make_generator(self): pass
    @hookimpl
    def skyrl_engine_describe_generator(self, config): return self.answer
good = P(RIGHT)
capability = P(evolve(RIGHT, capabilities=frozenset({"logprobs", "logprobz"})))
form = P(evolve(RIGHT, accepts=("tensor",)))
place = P(evolve(RIGHT, placement="somewhere"))
memory = P(evolve(RIGHT, accepts=("module",)))
none_at_once = P(evolve(RIGHT, concurrency=0))
weighed = P(evolve(RIGHT, capabilities=frozenset({"recorded"})))
wrong = P({"accepts": ()})
"""
    wrong = {
        "capability": "capabilities must be among .* there is 'logprobz'",
        "form": "accepts must be among .* there is 'tensor'",
        "place": "placement must be one of 'rank', 'process', 'remote', is 'somewhere'",
        "memory": 'the form "module" is memory of a rank',
        "none_at_once": "concurrency must be a number from 1 on, is 0",
        "weighed": r'what is "recorded" needs no weights, so accepts must be empty, is .*tensors',
        "wrong": "it returned dict",
    }
    names = {name: f"my_generator:{name}" for name in ("good", *wrong)}
    install("my-generator", entry_points={"generator": names}, modules={"my_generator.py": source})
    assert load(resolve("good", "generator")).describe_generator(None).concurrency == 4
    for name, words in wrong.items():
        with pytest.raises(
            ContractError, match=f"skyrl_engine_describe_generator of generator '{name}' of my-generator .*: {words}"
        ):
            load(resolve(name, "generator")).describe_generator(None)


EVERY_FACTORY = '''
from skyrl_engine import hookimpl

class Collator:
    rows = "padded"
    def __init__(self, *received): self.received = received
    def plan(self, lengths, layout): pass
    def build(self, columns, micro_batch, *, fields=None): pass

class Reducer:
    empty_sequence, batch_local = "count", False
    def __init__(self, *received): self.received = received
    def weights(self, structure): pass

class Everything:
    """Takes all that the hooks offer."""
    @hookimpl
    def skyrl_engine_make_collator(self, config, context): return Collator(config, context)
    @hookimpl
    def skyrl_engine_make_reducer(self, config, context): return Reducer(config, context)

class Nothing:
    """Takes none of it, as a plugin written before an argument was added does."""
    @hookimpl
    def skyrl_engine_make_collator(self): return Collator()
    @hookimpl
    def skyrl_engine_make_reducer(self): return Reducer()

everything, nothing = Everything(), Nothing()
'''


OF_ROLLOUTS = """
from skyrl_engine import hookimpl
from skyrl_engine.contracts import AdvantageClaims, EnvironmentClaims

class Advantage:
    needs, claims = (), AdvantageClaims()
    def __call__(self, batch): pass

class Environment:
    claims = EnvironmentClaims()
    def tasks(self, split): pass
    def open(self, task, seed): pass

class Plugin:
    @hookimpl
    def skyrl_engine_make_advantage(self): return Advantage()
    @hookimpl
    def skyrl_engine_make_environment(self): return Environment()
    @hookimpl
    def skyrl_engine_make_group_filter(self): return lambda group: None

class Wrong:
    @hookimpl
    def skyrl_engine_make_advantage(self):
        made = Advantage()
        made.claims = "none"
        return made
    @hookimpl
    def skyrl_engine_make_environment(self):
        made = Environment()
        made.claims = {"max_turns": 3}
        return made
    @hookimpl
    def skyrl_engine_make_group_filter(self): return "zero_variance"

good, wrong = Plugin(), Wrong()
"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("advantage", "claims must be AdvantageClaims, is 'none'"),
        ("environment", "claims must be EnvironmentClaims, is {'max_turns': 3}"),
        ("group_filter", "it cannot be called"),
    ],
)
def test_parts_of_rollouts_are_made_and_checked(install, kind: str, words: str) -> None:
    points = {kind: {name: f"of_rollouts:{name}" for name in ("good", "wrong")}}
    install("of-rollouts", entry_points=points, modules={"of_rollouts.py": OF_ROLLOUTS})
    assert load(resolve("good", kind)).make(None, FactoryContext()) is not None
    with pytest.raises(ContractError, match=re.escape(words)):
        load(resolve("wrong", kind)).make(None, FactoryContext())


@pytest.mark.parametrize("kind", ["collator", "reducer"])
def test_a_factory_takes_as_many_of_the_arguments_as_it_likes(install, kind: str) -> None:
    points = {kind: {"everything": "every_factory:everything", "nothing": "every_factory:nothing"}}
    install("every-factory", entry_points=points, modules={"every_factory.py": EVERY_FACTORY})
    context = FactoryContext(seed=7)
    assert load(resolve("everything", kind)).make(None, context).received == (None, context)
    assert load(resolve("nothing", kind)).make(None, context).received == ()
