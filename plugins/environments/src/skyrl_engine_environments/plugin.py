"""Entry points of the environments. What each needs besides the engine is imported when it is made."""

from typing import Any

from skyrl_engine import hookimpl
from skyrl_engine.contracts import Environment
from skyrl_engine_environments.options import FunctionOptions, GymnasiumOptions, PromptsOptions, ReasoningGymOptions


class FunctionEnvironmentPlugin:
    """Hook implementations of `function`."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return FunctionOptions

    @hookimpl
    def skyrl_engine_make_environment(self, config: FunctionOptions) -> Environment:
        from skyrl_engine_environments.function import make

        return make(config)


class PromptsPlugin:
    """Hook implementations of `prompts`."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return PromptsOptions

    @hookimpl
    def skyrl_engine_make_environment(self, config: PromptsOptions) -> Environment:
        from skyrl_engine_environments.prompts import make

        return make(config)


class ReasoningGymPlugin:
    """Hook implementations of `reasoning_gym`."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return ReasoningGymOptions

    @hookimpl
    def skyrl_engine_make_environment(self, config: ReasoningGymOptions) -> Environment:
        from skyrl_engine_environments.reasoning_gym import ReasoningGymEnvironment

        return ReasoningGymEnvironment(config)


class GymnasiumPlugin:
    """Hook implementations of `gymnasium`."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return GymnasiumOptions

    @hookimpl
    def skyrl_engine_make_environment(self, config: GymnasiumOptions) -> Environment:
        from skyrl_engine_environments.gymnasium import GymnasiumEnvironment

        return GymnasiumEnvironment(config)


function = FunctionEnvironmentPlugin()
prompts = PromptsPlugin()
reasoning_gym = ReasoningGymPlugin()
gymnasium = GymnasiumPlugin()
