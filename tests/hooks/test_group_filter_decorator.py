"""`@group_filter` makes a plugin of a function, and what a filter answers is held to the contract."""

import numpy as np
import pluggy
import pytest
from attrs import define

from skyrl_engine import ContractError, group_filter, hookimpl
from skyrl_engine.contracts import FactoryContext, GroupView
from skyrl_engine.contracts.kinds.group_filter import LONGEST_REASON, as_drop_reason
from skyrl_engine.hooks import spec
from skyrl_engine.hooks.markers import PROJECT


def view(*rewards):
    size = len(rewards)
    flags = np.zeros(size, dtype=np.bool_)
    return GroupView("spell", np.array(rewards, dtype=np.float64), flags, np.ones(size, dtype=np.int64), flags)


def make_product(plugin, config, context):
    """Ask the plugin for its product, as the engine does."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(spec)
    manager.register(plugin)
    manager.check_pending()
    return manager.hook.skyrl_engine_make_group_filter(config=config, context=context)


@define
class Bound:
    low: float = 0.5


@group_filter(config=Bound)
def above(group, config):
    """Keep groups of a mean reward above `low`."""
    return "low" if group.rewards.mean() < config.low else None


class ByHand:
    """A filter without the decorator."""

    @hookimpl
    def skyrl_engine_make_group_filter(self, config, context):
        return lambda _group: f"seed_{context.seed}" if config is None else None


def test_a_function_becomes_a_plugin():
    product = make_product(above, Bound(0.25), FactoryContext())
    assert (product.name, product(view(0.0, 0.0)), product(view(1.0, 0.0))) == ("above", "low", None)
    assert above(view(0.5, 0.5), Bound()) is None


def test_a_plugin_by_hand():
    assert make_product(ByHand(), None, FactoryContext(seed=3))(view(1.0)) == "seed_3"


def test_a_function_of_other_arguments_is_refused():
    with pytest.raises(TypeError, match="group"):

        @group_filter()
        def wrong(rewards):
            return None


@pytest.mark.parametrize("answer", [True, False, 0, "", "  ", "two\nlines", "x" * (LONGEST_REASON + 1), ["x"]])
def test_other_answers_are_refused(answer):
    with pytest.raises(ContractError, match="acme answered") as caught:
        as_drop_reason("acme", answer)
    assert "None to keep a group" in caught.value.remedy


def test_the_engine_s_own_reason_is_refused():
    with pytest.raises(ContractError, match="that of failed attempts"):
        as_drop_reason("acme", "failed")
    assert as_drop_reason("acme", None) is None
    assert as_drop_reason("acme", "too easy") == "too easy"
