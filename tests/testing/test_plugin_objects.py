"""A suite takes the plugin itself: a decorated function, or an object with hook implementations, installed or of a test's own file."""

import pytest
from attrs import define

from skyrl_engine import hookimpl, loss
from skyrl_engine.errors import ConfigError, PluginBrokenError, PluginNotFoundError
from skyrl_engine.testing import LossConformance, MergerConformance, select_plugin
from skyrl_engine_losses.plugin import cross_entropy
from skyrl_engine_mergers import plugin as mergers


@define
class FocalConfig:
    gamma: float = 2.0


@loss(needs=("logprobs",), config=FocalConfig)
def focal(tokens, config):
    """Focal cross-entropy."""
    return -((1 - tokens.logprobs.exp()) ** config.gamma) * tokens.logprobs


class HalfAPlugin:
    @hookimpl
    def skyrl_engine_config_schema(self):
        return None


half = HalfAPlugin()


class TestFocal(LossConformance):
    plugin = focal
    options = {"gamma": 1.0}  # noqa: RUF012 the suite reads it, nothing changes it
    examples = 3


class TestInstalled(LossConformance):
    plugin = cross_entropy
    examples = 3


class TestObjectOfHooks(MergerConformance):
    plugin = mergers.ordered
    examples = 3


def test_an_installed_plugin_is_its_entry_point():
    record = select_plugin("loss", cross_entropy, {}).loaded.record
    assert (record.source, record.distribution) == ("distribution", "skyrl-engine-losses")


def test_a_plugin_of_a_file_is_the_very_object_with_its_options():
    chosen = select_plugin("loss", focal, {"gamma": 3.0})
    assert chosen.loaded.record.reference == f"{__file__}:focal"
    assert chosen.table == {"gamma": 3.0}
    assert chosen.loaded.plugin is focal


def test_another_process_finds_it_again():
    from skyrl_engine.config import SelectedPlugin

    again = SelectedPlugin.from_lock(select_plugin("loss", focal, {"gamma": 3.0}).to_lock_entry())
    assert again.table == {"gamma": 3.0}


def test_options_that_it_does_not_take_are_refused():
    with pytest.raises(ConfigError, match="alpha"):
        select_plugin("loss", focal, {"alpha": 1.0})


def test_a_plugin_without_the_hook_is_refused():
    with pytest.raises(PluginBrokenError, match="does not implement skyrl_engine_make_loss"):
        select_plugin("loss", half, {})


def test_a_plugin_that_no_module_holds_is_refused():
    with pytest.raises(PluginNotFoundError, match="is no value of a module"):
        select_plugin("loss", HalfAPlugin(), {})
