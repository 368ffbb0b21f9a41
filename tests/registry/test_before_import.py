"""Decisions from metadata alone, before a plugin is imported: requirements, the engine's version, locks."""

import sys

import attrs
import pytest

from skyrl_engine.errors import (
    PluginBrokenError,
    PluginIncompatibleError,
    PluginNotFoundError,
)
from skyrl_engine.registry.loader import load
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.registry.resolve import Registry


def resolve(reference: str) -> PluginRecord:
    return Registry.discover().resolve("loss", reference)


def test_a_missing_runtime_requirement_is_told_before_import(install_loss) -> None:
    requires = ["skyrl-engine>=0.1", "no-such-thing>=2; extra == 'runtime'", "attrs>=999; extra == 'runtime'"]
    install_loss("needy-loss", source="raise RuntimeError('imported')", requires=requires)
    with pytest.raises(PluginIncompatibleError) as caught:
        load(resolve("plain"))
    assert f"no-such-thing>=2, which is not installed and attrs>=999, and {attrs.__version__} is installed" in caught.value.cause
    assert caught.value.remedy == 'Install what it needs: python -m pip install "needy-loss[runtime]==1.0.0"'
    assert "needy_loss.plugin" not in sys.modules


def test_requirements_that_do_not_apply_here_are_not_checked(install_loss) -> None:
    requires = [
        "no-such-thing; extra == 'dev'",
        "no-such-thing; extra == 'runtime' and python_version < '3'",
        "attrs>=20; extra == 'runtime'",
    ]
    install_loss("calm-loss", requires=requires)
    assert load(resolve("plain")).record.distribution == "calm-loss"


@pytest.mark.parametrize("requirement", ["skyrl-engine>=0.4", "skyrl_engine<0.3", "skyrl-engine==7.*"])
def test_a_plugin_for_another_engine_is_told_before_import(install_loss, requirement: str) -> None:
    install_loss("strange-loss", "3.2.1", source="raise RuntimeError('imported')", requires=[requirement])
    with pytest.raises(PluginIncompatibleError) as caught:
        load(resolve("plain"))
    assert caught.value.cause.startswith("loss 'plain' of strange-loss 3.2.1 is made for skyrl-engine ")
    assert caught.value.remedy.endswith('python -m pip install --upgrade strange-loss "skyrl-engine==0.3.0"')
    assert "strange_loss.plugin" not in sys.modules


def test_a_release_candidate_of_the_engine_is_in_range(install_loss, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_engine.registry.compat.__version__", "0.3.1rc1")
    install_loss("fine-loss")
    load(resolve("plain"))


def test_an_unreadable_requirement_is_told_for_the_plugin_asked_for(install_loss) -> None:
    install_loss("odd-loss", requires=["torch >>> 2"])
    with pytest.raises(PluginBrokenError, match="'torch >>> 2', which cannot be read"):
        load(resolve("plain"))


def test_a_lock_of_another_version_is_refused(install_loss) -> None:
    install_loss("moving-loss", "1.1.0", source="raise RuntimeError('imported')")
    record = attrs.evolve(resolve("plain"), version="1.0.0")
    with pytest.raises(PluginIncompatibleError) as caught:
        load(PluginRecord.from_lock(record.to_lock_entry()))
    assert caught.value.cause == "loss 'plain' of moving-loss 1.0.0 is asked for, but version 1.1.0 is installed here"
    assert caught.value.remedy.endswith('python -m pip install "moving-loss==1.0.0"')


def test_a_lock_of_another_target_is_refused(install_loss) -> None:
    install_loss("moving-loss")
    for change in ({"target": "elsewhere:plain"}, {"name": "vanished"}):
        with pytest.raises(PluginIncompatibleError, match="in the installation here"):
            load(attrs.evolve(resolve("plain"), **change))


def test_a_lock_of_what_is_not_installed_is_refused() -> None:
    record = PluginRecord("loss", "ppo", "x:y", distribution="not-here", version="1.0.0")
    with pytest.raises(PluginNotFoundError, match=r'pip install "not-here==1\.0\.0"'):
        load(record)
