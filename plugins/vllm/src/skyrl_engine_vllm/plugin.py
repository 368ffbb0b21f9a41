"""The entry point of `vllm`: its options, and its description for planning. Imports neither torch nor vllm."""

from typing import Any

from skyrl_engine import hookimpl
from skyrl_engine.contracts import Generator, GeneratorDescription
from skyrl_engine_vllm.options import FORMS, VllmOptions


class VllmPlugin:
    """Hook implementations of the generator `vllm`."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return VllmOptions

    @hookimpl
    def skyrl_engine_describe_generator(self, config: VllmOptions | None) -> GeneratorDescription:
        options = config or VllmOptions()
        # vLLM ends at log-probabilities of prompts while it serves adapters
        sleeps = ("sleep",) if options.enable_sleep_mode else ()
        of_prompts = ("prompt_logprobs",) if options.weights != "adapter" else ()
        return GeneratorDescription(
            capabilities=frozenset(
                {
                    *("logprobs", "seeded", "abort", "stop_strings", "filters"),
                    *(*of_prompts, "top_logprobs", "update_while_generating", "prefix_reuse", *sleeps),
                }
            ),
            accepts=FORMS if options.weights is None else (options.weights,),
            placement="remote",
            concurrency=options.concurrency,
        )

    @hookimpl
    def skyrl_engine_make_generator(self, config: VllmOptions | None) -> Generator:
        from skyrl_engine_vllm.generator import VllmGenerator

        return VllmGenerator(config or VllmOptions())


vllm = VllmPlugin()
