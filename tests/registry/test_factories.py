"""Products and descriptions are checked: a factory that raises or returns nothing is named, and so is each wrong value."""

import re

import pytest
from focal_of_the_docs import resolve

from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.observer import StepFinished
from skyrl_engine.errors import (
    ContractError,
    PluginBrokenError,
    PluginError,
    UnsupportedError,
)
from skyrl_engine.registry.loader import load
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.run.observer_calls import ObserverBus


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


def test_an_observer_plugin_is_made_and_checked(install) -> None:
    source = """
from skyrl_engine import hookimpl
class Plugin:
    def __init__(self, product): self.product = product
    @hookimpl
    def skyrl_engine_make_observer(self): return self.product
class Counter:
    steps = 0
    @hookimpl
    def skyrl_engine_step_finished(self): self.steps += 1
good, deaf = Plugin(Counter()), Plugin(object())
"""
    points = {"observer": {"good": "my_watch:good", "deaf": "my_watch:deaf"}}
    install("my-watch", entry_points=points, modules={"my_watch.py": source})
    registry = Registry.discover()
    observer = load(registry.resolve("observer", "good")).make(None, FactoryContext())
    ObserverBus([observer]).step_finished(StepFinished(1, 3, {"loss": 1.0}, 0.1))
    assert observer.steps == 1
    with pytest.raises(ContractError, match=r"observer 'deaf' of my-watch 1\.0\.0: object implements no observer hook"):
        load(registry.resolve("observer", "deaf")).make(None, FactoryContext())
