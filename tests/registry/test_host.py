"""Registering says what a plugin implements, and refuses what does not fit."""

from functools import cached_property

import pytest

from skyrl_engine import hookimpl
from skyrl_engine.errors import PluginBrokenError
from skyrl_engine.registry.host import PluginHost
from skyrl_engine.registry.owner import Owner


class Watcher:
    @hookimpl
    def skyrl_engine_manifest_extra(self) -> dict[str, int]:
        return {"seen": id(self)}


class Misspelt:
    @hookimpl
    def skyrl_engine_step_finshed(self, event: object) -> None: ...


class Computing:
    """Each attribute ends the registration that reads it."""

    @property
    def first(self) -> float:
        return 1 / 0

    @cached_property
    def second(self) -> float:
        return 1 / 0


def test_registering_computes_no_attribute_of_a_plugin() -> None:
    assert PluginHost().register(Computing(), Owner("computing", "Correct it")) == set()


def test_a_host_tells_whose_answer_is_whose_and_forgets_what_it_refused() -> None:
    host, first, second = PluginHost(), Watcher(), Watcher()
    owners = [Owner(name, "Correct it") for name in ("first", "second")]
    assert host.register(first, owners[0]) == {"skyrl_engine_manifest_extra"}
    with pytest.raises(PluginBrokenError, match=r"misspelt implements the unknown hook .*Did you mean skyrl_engine_step_finished"):
        host.register(Misspelt(), Owner("misspelt", "Correct it"))
    host.register(second, owners[1])
    assert list(host.each("skyrl_engine_manifest_extra")) == [
        (owners[0], {"seen": id(first)}),
        (owners[1], {"seen": id(second)}),
    ]
