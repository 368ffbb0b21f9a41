"""The shape of a model as its configuration tells it, for the arithmetic of memory."""

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import EngineError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.model_facts.rank_memory import ModelShape


def read_model_shape(model: ModelConfig) -> ModelShape | None:
    """Make the model without values and return its shape; None where it cannot be made, which is refused elsewhere."""
    from skyrl_engine.modeling.list_shapes import list_parameter_shapes

    try:
        return ModelShape(load_config(model, images=True), model, list_parameter_shapes(model))
    except EngineError:
        return None
