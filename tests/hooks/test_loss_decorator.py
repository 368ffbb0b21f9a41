"""`@loss` makes a plugin of a function; what cannot be right is refused where it is written."""

import pluggy
import pytest
from attrs import define

from skyrl_engine import loss
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.hooks import spec
from skyrl_engine.hooks.markers import PROJECT


@define
class Options:
    gamma: float = 2.0


@loss(needs=("logprobs", "advantages"), config=Options, reducers=["sequence_mean"], batch_local=True)  # type: ignore[arg-type]  # a list will do
def weighted(tokens, config):
    return tokens * config.gamma


def test_the_engine_makes_it_through_the_hooks() -> None:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(spec)
    manager.register(weighted)
    manager.check_pending()
    assert manager.hook.skyrl_engine_config_schema() is Options
    product = manager.hook.skyrl_engine_make_loss(config=Options(gamma=3.0), context=FactoryContext())
    assert (product.name, product.needs, product.reducers) == ("weighted", ("logprobs", "advantages"), ("sequence_mean",))
    assert product.batch_local is True
    assert product(2.0) == 6.0


def test_the_function_stays_callable() -> None:
    assert weighted(2.0, Options()) == 4.0
    assert weighted.name == "weighted"


def test_plugins_are_compared_by_identity() -> None:
    same = loss(needs=("logprobs", "advantages"), config=Options, reducers=("sequence_mean",), batch_local=True)(weighted.function)
    assert same != weighted
    assert len({same, weighted}) == 2


@pytest.mark.parametrize("option", ["needs", "reducers"])
def test_text_in_place_of_names_is_refused(option: str) -> None:
    """("logprobs") is text, and would be taken as eight names of one letter."""
    with pytest.raises(TypeError, match=rf"{option} is the text 'logprobs'; write {option}=\('logprobs',\)"):
        loss(**{"needs": ("logprobs",), option: "logprobs"})  # type: ignore[arg-type]  # the mistake itself


@define
class Anchored:
    anchor: str = "old"


@loss(needs=lambda config: ("logprobs", f"{config.anchor}_logprobs"), config=Anchored)
def anchored(tokens, config):
    return tokens


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_what_a_loss_needs_may_depend_on_its_config(anchor: str) -> None:
    assert anchored.skyrl_engine_make_loss(Anchored(anchor)).needs == ("logprobs", f"{anchor}_logprobs")


def test_needs_by_config_are_a_tuple_in_the_product_and_never_a_text() -> None:
    listed = loss(needs=lambda _: ["logprobs"], config=Anchored)(anchored.function)  # type: ignore[arg-type,return-value]  # a list will do
    assert listed.skyrl_engine_make_loss(Anchored()).needs == ("logprobs",)
    text = loss(needs=lambda _: "logprobs", config=Anchored)(anchored.function)  # type: ignore[arg-type,return-value]  # the mistake itself
    with pytest.raises(TypeError, match=r"write needs=\('logprobs',\)"):
        text.skyrl_engine_make_loss(Anchored())


def one(tokens):
    pass


def three(tokens, config, extra):
    pass


def named(*, tokens, config):
    pass


@pytest.mark.parametrize("function", [one, three, named])
def test_a_function_of_other_arguments_is_refused(function) -> None:
    with pytest.raises(TypeError, match=r"must take \(tokens, config\)"):
        loss(needs=("logprobs",))(function)
