"""The entry point of `replay`: its option, and its description for planning."""

from typing import Any

from attrs import field, frozen
from attrs.validators import min_len

from skyrl_engine import hookimpl
from skyrl_engine.contracts import PLACE, Generator, GeneratorDescription


@frozen
class ReplayOptions:
    """Options of `replay`."""

    rollouts: str = field(validator=min_len(1), metadata={PLACE: "path"})
    """The recording to give again: a run directory, or a file that `skyrl-engine rollouts export` wrote."""


class ReplayPlugin:
    """Hook implementations of `replay`."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return ReplayOptions

    @hookimpl
    def skyrl_engine_describe_generator(self) -> GeneratorDescription:
        """Take no weights. Log-probabilities are those of the sampler that was recorded, whose tokens stop strings and filters cut."""
        return GeneratorDescription(
            capabilities=frozenset({"recorded", "logprobs", "abort", "stop_strings", "filters"}),
            accepts=(),
            placement="rank",
            concurrency=1024,
        )

    @hookimpl
    def skyrl_engine_make_generator(self, config: ReplayOptions) -> Generator:
        from acme_replay_generator.generator import ReplayGenerator

        return ReplayGenerator(config.rollouts)


replay = ReplayPlugin()
