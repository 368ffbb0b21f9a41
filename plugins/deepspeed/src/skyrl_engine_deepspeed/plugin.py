"""Entry point of the `deepspeed` backend. Imports no torch: describing the backend happens on the controller."""

from functools import partial
from typing import Any

from skyrl_engine import hookimpl
from skyrl_engine.contracts import OPTIONAL_SCORES, Backend, BackendDescription, ModelConfig, RowKind, Topology
from skyrl_engine_deepspeed.options import DeepSpeedConfig
from skyrl_engine_deepspeed.state_layout import describe_state


class DeepSpeedPlugin:
    """Hook implementations of the `deepspeed` backend."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[Any]:
        return DeepSpeedConfig

    @hookimpl
    def skyrl_engine_describe_backend(self, config: DeepSpeedConfig | None, world_size: int) -> BackendDescription:
        options = config or DeepSpeedConfig()
        options.refuse_contradictions()
        return BackendDescription(
            Topology(dp=world_size),
            frozenset(
                {
                    "padded",
                    "packed",
                    "tree",
                    "value_head",
                    "lora",
                    *OPTIONAL_SCORES,
                    "divergence",
                    "second_model",
                    "asynchronous_saves",
                    "reference_by_adapters",
                    "compile",
                    "attention",
                    "embedding_noise",
                    "ema",
                    "freeze",
                    "vision",
                }
            ),
            lambda _, model: options.refuse_precision(model.dtype, learns=True),
            _rehearse,
            describe_state=partial(describe_state, options, world_size),
            layout_choices={"zero_stage": (1, 2, 3), "offload_optimizer": (False, True)},
        )

    @hookimpl
    def skyrl_engine_make_backend(self, config: DeepSpeedConfig | None) -> Backend:
        from skyrl_engine_deepspeed.backend import DeepSpeedBackend

        return DeepSpeedBackend(config or DeepSpeedConfig())


def _rehearse(model: ModelConfig, rows: RowKind) -> None:
    from skyrl_engine.modeling.load_check import check_loading

    check_loading(model, rows, images=True)


deepspeed = DeepSpeedPlugin()
