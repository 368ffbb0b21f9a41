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
    list_divisors,
)
from skyrl_engine_fsdp.layer_styles import refuse_model
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
                *OPTIONAL_SCORES,
                "second_model",
                "sgd",
                "lion",
                "parameter_groups",
                "ema",
                "compile",
                "attention",
            }
        )
        if not config.cpu_offload:
            capabilities |= {"offload"}
        choices = {"tensor_parallel": list_divisors(world_size, MOST_TENSOR_PARALLEL), "cpu_offload": (False, True)}
        # transformers' tensor-parallel plans cut the linear layers of a text decoder; they say nothing about adapters and vision towers,
        # and a head that is divided compares with no teacher's. Compiled layers `refuse_model` refuses there, with the reason
        if topology.tp == 1:
            undivided: frozenset[Capability] = frozenset(
                {"lora", "load_in_4bit", "reference_by_adapters", "vision", "divergence", "embedding_noise"}
            )
            if not config.cpu_offload:
                undivided |= WHOLE_ROWS
            # FSDP2 copies host memory to pin it, so that nobody would share it
            shared: frozenset[Capability] = frozenset() if config.cpu_offload else frozenset({"adapter_sets"})
            return BackendDescription(
                topology,
                capabilities | undivided | shared,
                rehearse=partial(_rehearse, images=True),
                describe_state=partial(describe_state, config, topology),
                layout_choices=choices,
            )
        return BackendDescription(
            topology,
            capabilities,
            partial(refuse_model, topology.tp),
            partial(_rehearse, images=False),
            describe_state=partial(describe_state, config, topology),
            layout_choices=choices,
        )

    @hookimpl
    def skyrl_engine_make_backend(self, config: FsdpConfig | None) -> Backend:
        from skyrl_engine_fsdp.backend import FsdpBackend

        return FsdpBackend(config or FsdpConfig())


def _rehearse(model: ModelConfig, rows: RowKind, *, images: bool) -> None:
    from skyrl_engine.modeling.load_check import check_loading

    check_loading(model, rows, images=images)


fsdp = FsdpPlugin()
