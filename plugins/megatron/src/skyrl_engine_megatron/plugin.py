"""Entry point of the `megatron` backend. Imports no torch: describing the backend happens on the controller."""

from functools import partial
from typing import Any

from attrs import evolve

from skyrl_engine import hookimpl
from skyrl_engine.contracts import (
    MOST_TENSOR_PARALLEL,
    OPTIONAL_SCORES,
    Backend,
    BackendDescription,
    Capability,
    ModelConfig,
    RowKind,
    list_divisors,
)
from skyrl_engine.model_facts.weight_files import weight_files
from skyrl_engine_megatron.adapter_limits import refuse_dropout_in_trees
from skyrl_engine_megatron.limits import refuse_model, refuse_trees, refuse_trees_of_model
from skyrl_engine_megatron.options import MegatronConfig
from skyrl_engine_megatron.state_layout import describe_state

_ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Work reaches the device in the order in which it is launched: tensor-parallel layers launch a sum over ranks and then the product that is to
hide it, and with several queues the product may come first and the sum wait for it."""


_CAPABILITIES: frozenset[Capability] = frozenset(
    {
        "padded",
        "packed",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "vision",
        "compile",
        "attention",
        "ema",
        "second_model",
        "asynchronous_saves",
        "value_head",
        "divergence",
        "lora",
        "reference_by_adapters",
        "adapter_sets",
        "parameter_groups",
        "freeze",
        "embedding_noise",
        *OPTIONAL_SCORES,
    }
)


class MegatronPlugin:
    """Hook implementations of the `megatron` backend."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return MegatronConfig

    @hookimpl
    def skyrl_engine_describe_backend(self, config: MegatronConfig | None, world_size: int) -> BackendDescription:
        options = config or MegatronConfig()
        trees: set[Capability] = {"tree"} if options.context_parallel == 1 else set()
        return BackendDescription(
            options.topology(world_size),
            _CAPABILITIES | trees,
            partial(refuse_model, options),
            partial(_rehearse, options),
            means_over_step=options.router_losses,
            describe_state=partial(describe_state, options, options.topology(world_size)),
            layout_choices={
                "tensor_parallel": list_divisors(world_size, MOST_TENSOR_PARALLEL),
                "pipeline_parallel": list_divisors(world_size),
                "context_parallel": list_divisors(world_size),
                "expert_parallel": list_divisors(world_size),
            },
            environment=_ONE_QUEUE if options.tensor_parallel > 1 else {},
        )

    @hookimpl
    def skyrl_engine_make_backend(self, config: MegatronConfig | None) -> Backend:
        from skyrl_engine_megatron.backend import MegatronBackend

        return MegatronBackend(config or MegatronConfig())


def _rehearse(options: MegatronConfig, model: ModelConfig, rows: RowKind) -> None:
    from skyrl_engine.model_facts.configuration import load_config
    from skyrl_engine.modeling.attention_kernel import refuse_rows_of_kernel
    from skyrl_engine.modeling.embedding_noise import refuse_noise
    from skyrl_engine.modeling.loading import load_skeleton
    from skyrl_engine.modeling.unpickling import refuse_code

    refuse_rows_of_kernel(model, rows)
    if rows == "tree":
        refuse_trees(options)
        refuse_noise(model)
        refuse_dropout_in_trees(model)
        refuse_trees_of_model(load_config(model, images=True), model.path)
    refuse_code(weight_files(model))
    if model.freeze:
        # refuses patterns that match nothing
        load_skeleton(evolve(model, compile=False, activation_checkpointing=False), images=True)


megatron = MegatronPlugin()
