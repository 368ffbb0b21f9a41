"""Entry points of the generators. Imports no torch: planning asks for descriptions on the controller."""

from typing import Any

from skyrl_engine import hookimpl
from skyrl_engine.contracts import Generator, GeneratorDescription
from skyrl_engine_generators.options import HfOptions


class HfPlugin:
    """Hook implementations of the generator `hf`."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return HfOptions

    @hookimpl
    def skyrl_engine_describe_generator(self, config: HfOptions | None) -> GeneratorDescription:
        return GeneratorDescription(
            capabilities=frozenset(
                {
                    *(
                        "logprobs",
                        "seeded",
                        "batch_invariant",
                        "abort",
                        "stop_strings",
                        "filters",
                        "update_while_generating",
                        "prefix_reuse",
                        "sleep",
                        "streaming",
                        "tensor_parallel",
                    ),
                    *("prompt_logprobs", "top_logprobs", "top_prompt_logprobs"),
                }
            ),
            accepts=("module", "tensors"),
            placement="rank",
            concurrency=(config or HfOptions()).slots,
            cache_tokens=(config or HfOptions()).cache_tokens or "free",
        )

    @hookimpl
    def skyrl_engine_make_generator(self, config: HfOptions | None) -> Generator:
        from skyrl_engine_generators.generator import HfGenerator

        return HfGenerator(config or HfOptions())


hf = HfPlugin()
