"""A loaded plugin and the calls that the engine makes to it."""

from typing import Any

from attrs import field, frozen

from skyrl_engine.contracts.kinds.backend import BackendDescription
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.generator import GeneratorDescription
from skyrl_engine.errors import ContractError
from skyrl_engine.registry.host import PluginHost
from skyrl_engine.registry.kinds import DESCRIBE_BACKEND_HOOK, DESCRIBE_GENERATOR_HOOK, KINDS
from skyrl_engine.registry.owner import Owner
from skyrl_engine.registry.product import check_product
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.registry.values import of_backend_description, of_generator_description


@frozen(eq=False)
class LoadedPlugin:
    """A plugin that was imported and registered.

    `schema` is the attrs class of its options, None when it takes none; `plugin` the object that implements the hooks.
    """

    record: PluginRecord
    schema: type[Any] | None
    plugin: object
    _host: PluginHost = field(repr=False)

    def make(self, config: object | None, context: FactoryContext) -> Any:
        """Build the product with options of `schema` (None: the plugin's own defaults, or no options).

        Raises PluginBrokenError when the factory fails, ContractError when what it returns does not keep the kind's contract, and whatever
        EngineError the factory raises itself.
        """
        kind = KINDS[self.record.kind]
        product = getattr(self._host.hook, kind.factory_hook)(config=config, context=context)
        check_product(kind, product, Owner.of(self.record), kind.factory_hook)
        return product

    def describe_backend(self, config: object | None, world_size: int) -> BackendDescription:
        """Ask the backend to lay out `world_size` ranks and to declare its capabilities.

        Raises as `make` does; UnsupportedError is the plugin's own.
        """
        assert self.record.kind == "backend", f"{self.record} is no backend"
        description: BackendDescription = self._host.hook.skyrl_engine_describe_backend(config=config, world_size=world_size)
        if problems := list(of_backend_description(description)):
            raise ContractError(
                f"{DESCRIBE_BACKEND_HOOK} of {self.record}: {problems[0]}",
                remedy="Return a BackendDescription with such values",
                details=problems[1:],
            )
        if description.topology.world_size != world_size:
            raise ContractError(
                f"{DESCRIBE_BACKEND_HOOK} of {self.record} lays out {description.topology.world_size} ranks in a world of {world_size}",
                remedy="Return a topology whose sizes multiply to the world size",
            )
        return description

    def describe_generator(self, config: object | None) -> GeneratorDescription:
        """Ask the generator for its capabilities, the weights it takes and its placement. Raises as `make` does."""
        assert self.record.kind == "generator", f"{self.record} is no generator"
        description: GeneratorDescription = self._host.hook.skyrl_engine_describe_generator(config=config)
        if problems := list(of_generator_description(description)):
            raise ContractError(
                f"{DESCRIBE_GENERATOR_HOOK} of {self.record}: {problems[0]}",
                remedy="Return a GeneratorDescription with such values",
                details=problems[1:],
            )
        return description
