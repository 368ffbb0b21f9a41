"""`@correction` makes a plugin of a function, and a class may carry the hook itself."""

import pluggy
import pytest
from attrs import define

from skyrl_engine import correction, hookimpl
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.correction import FunctionCorrection
from skyrl_engine.hooks import spec
from skyrl_engine.hooks.markers import PROJECT


@define
class Options:
    high: float = 2.0


@correction(needs=("old_logprobs", "rollout_logprobs"), config=Options)
def capped(tokens, config):
    return min(tokens, config.high)


class ByHand:
    @hookimpl
    def skyrl_engine_make_correction(self, config, context):
        return FunctionCorrection("by_hand", lambda tokens, _: tokens, config, ())


def make_product(plugin: object, config: object) -> FunctionCorrection:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(spec)
    manager.register(plugin)
    manager.check_pending()
    product: FunctionCorrection = manager.hook.skyrl_engine_make_correction(config=config, context=FactoryContext())
    return product


def test_the_engine_makes_it_through_the_hooks() -> None:
    product = make_product(capped, Options(high=3.0))
    assert (product.name, product.needs) == ("capped", ("old_logprobs", "rollout_logprobs"))
    assert product(5.0) == 3.0  # type: ignore[arg-type] # what the function does with its tokens is its own business
    assert capped.skyrl_engine_config_schema() is Options


def test_a_plugin_may_be_written_without_the_decorator() -> None:
    assert make_product(ByHand(), None)(7) == 7  # type: ignore[arg-type]


def test_what_a_correction_needs_may_depend_on_its_config() -> None:
    plugin = correction(needs=lambda config: ("old_logprobs",) if config.high > 1 else (), config=Options)(capped.function)
    assert plugin.skyrl_engine_make_correction(Options(high=2.0)).needs == ("old_logprobs",)
    assert plugin.skyrl_engine_make_correction(Options(high=0.5)).needs == ()


def test_names_must_be_a_tuple() -> None:
    with pytest.raises(TypeError, match=r"needs=\('old_logprobs',\)"):
        correction(needs="old_logprobs")  # type: ignore[arg-type]


def test_a_function_that_takes_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="must take"):
        correction(needs=("old_logprobs",))(lambda tokens: tokens)
