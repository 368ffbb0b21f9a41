"""A loaded plugin: what the engine may ask of it."""

from typing import Any

from attrs import field, frozen

from skyrl_engine.contracts.kinds.backend import BackendDescription
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.errors import ContractError
from skyrl_engine.registry.host import PluginHost, Registration
from skyrl_engine.registry.kinds import DESCRIBE_BACKEND_HOOK, KINDS
from skyrl_engine.registry.observers import check_observer
from skyrl_engine.registry.product import check_product
from skyrl_engine.registry.record import PluginRecord


@frozen(eq=False)
class LoadedPlugin:
    """A plugin that was imported and registered. `schema` is the attrs class of its options, None when it takes none."""

    record: PluginRecord
    schema: type[Any] | None
    _registration: Registration = field(repr=False)
    _host: PluginHost = field(repr=False)

    @property
    def plugin(self) -> object:
        """The object that carries the hook implementations."""
        return self._registration.plugin

    def make(self, config: object | None, context: FactoryContext) -> Any:
        """Build the product with options of `schema` (None: the plugin's own defaults, or no options).

        Raises PluginBrokenError when the factory fails, ContractError when what it returns does not keep the kind's contract, and whatever
        EngineError the factory raises itself.
        """
        kind = KINDS[self.record.kind]
        product = self._host.call(self._registration, kind.factory_hook, config=config, context=context)
        check_product(kind, product, self._registration.owner, kind.factory_hook)
        if kind.name == "observer":
            check_observer(product, self._registration.owner)
        return product

    def describe_backend(self, config: object | None, world_size: int) -> BackendDescription:
        """How the backend lays out `world_size` ranks, and what it supports. Raises as `make` does; UnsupportedError is the plugin's own."""
        assert self.record.kind == "backend", f"{self.record} is no backend"
        owner = self._registration.owner
        description = self._host.call(self._registration, DESCRIBE_BACKEND_HOOK, config=config, world_size=world_size)
        if not isinstance(description, BackendDescription):
            raise ContractError(
                f"{DESCRIBE_BACKEND_HOOK} of {owner.label} returned {type(description).__name__}",
                remedy="Return a BackendDescription",
            )
        if description.topology.world_size != world_size:
            raise ContractError(
                f"{DESCRIBE_BACKEND_HOOK} of {owner.label} lays out {description.topology.world_size} ranks in a world of {world_size}",
                remedy="Return a topology whose sizes multiply to the world size",
            )
        return description
