"""Refuse what a rank's device cannot do for the model that it is given, while planning and again when it loads the model."""

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.modeling.attention_kernel import refuse_kernel


def refuse_on_device(model: ModelConfig, device: str, rows: RowKind) -> None:
    """Raises UnsupportedError where `device` ("cpu", "cuda:0") cannot compile the model's layers, or attend to `rows` by its kernel."""
    if model.compile:
        from skyrl_engine.modeling.compiling import refuse_without_compiler

        refuse_without_compiler(device)
    refuse_kernel(model, device, rows)
