"""Entry point of the `fsdp` backend. Imports no torch: describing the backend happens on the controller."""

from functools import partial
from typing import Any

from skyrl_engine import hookimpl
from skyrl_engine.contracts import (
    MOST_TENSOR_PARALLEL,
    OPTIONAL_SCORES,
    Backend,
    BackendDescription,
    Capability,
    ModelConfig,
    RowKind,
    Topology,
    list_divisors,
)
from skyrl_engine_fsdp.context_limits import name_division, refuse_context
from skyrl_engine_fsdp.float8 import refuse_device, refuse_float8
from skyrl_engine_fsdp.layer_styles import refuse_experts, refuse_model
from skyrl_engine_fsdp.options import WHOLE_ROWS, FsdpConfig
from skyrl_engine_fsdp.state_layout import describe_state


class FsdpPlugin:
    """Hook implementations of the `fsdp` backend."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return FsdpConfig

    @hookimpl
    def skyrl_engine_describe_backend(self, config: FsdpConfig | None, world_size: int) -> BackendDescription:
        config = config or FsdpConfig()
        topology = config.topology(world_size)
        capabilities: frozenset[Capability] = frozenset(
            {
                "padded",
                "packed",
                "tree",
                "value_head",
                "tensor_parallel",
                "context_parallel",
                "lora",
                "reference_by_adapters",
                "divergence",
                *OPTIONAL_SCORES,
                "second_model",
                "asynchronous_saves",
                "sgd",
                "lion",
                "parameter_groups",
                "freeze",
                "ema",
                "compile",
                "attention",
                "vision",
            }
        )
        if not config.cpu_offload:
            # FSDP2 copies host memory to pin it, so that nobody would share it
            capabilities |= {"offload", "adapter_sets", "stochastic_rounding"}
        choices = {
            "tensor_parallel": list_divisors(world_size, MOST_TENSOR_PARALLEL),
            "context_parallel": list_divisors(world_size),
            "expert_parallel": list_divisors(world_size),
            "cpu_offload": (False, True),
        }
        # codes of 4 bits have no columns that tensor-parallel ranks could divide. Compiled layers `refuse_model` refuses there, with the reason
        if topology.tp == 1:
            capabilities |= {"load_in_4bit", "embedding_noise"}
            if not config.cpu_offload:
                capabilities |= WHOLE_ROWS
        return BackendDescription(
            topology,
            capabilities,
            partial(_refuse, config),
            partial(_rehearse, config, topology),
            refuse_device=lambda _, device: refuse_device(config, device),
            describe_state=partial(describe_state, config, topology),
            layout_choices=choices,
        )

    @hookimpl
    def skyrl_engine_make_backend(self, config: FsdpConfig | None) -> Backend:
        from skyrl_engine_fsdp.backend import FsdpBackend

        return FsdpBackend(config or FsdpConfig())


def _refuse(options: FsdpConfig, config: Any, model: ModelConfig) -> None:
    refuse_context(options, model)
    refuse_float8(options, model)
    if options.expert_parallel > 1:
        refuse_experts(options, config, model)
    if options.tensor_parallel > 1:
        refuse_model(options.tensor_parallel, config, model)


def _rehearse(options: FsdpConfig, topology: Topology, model: ModelConfig, rows: RowKind) -> None:
    from skyrl_engine.modeling.load_check import check_loading

    divided_by = name_division(options) if topology.cp > 1 else None
    check_loading(model, rows, images=True, divided_by=divided_by)


fsdp = FsdpPlugin()
