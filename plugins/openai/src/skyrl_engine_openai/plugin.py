"""The entry point of `openai`: its options, and its description for planning. Imports neither torch nor httpx."""

from typing import Any

from skyrl_engine import hookimpl
from skyrl_engine.contracts import Generator, GeneratorDescription
from skyrl_engine_openai.options import OpenaiOptions


class OpenaiPlugin:
    """Hook implementations of the generator `openai`."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return OpenaiOptions

    @hookimpl
    def skyrl_engine_describe_generator(self, config: OpenaiOptions) -> GeneratorDescription:
        return GeneratorDescription(
            capabilities=frozenset({"abort", "stop_strings", "filters"}),
            accepts=(),
            placement="remote",
            concurrency=config.concurrency,
        )

    @hookimpl
    def skyrl_engine_make_generator(self, config: OpenaiOptions) -> Generator:
        from skyrl_engine_openai.generator import OpenaiGenerator

        return OpenaiGenerator(config)


openai = OpenaiPlugin()
