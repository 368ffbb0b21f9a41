"""The longest sample that a model can take, where the configuration sets no limit of its own."""

from attrs import evolve

from skyrl_engine.config.schema import DataConfig, ModelConfig
from skyrl_engine.model_facts.configuration import read_model_config


def limited_to_model(data: DataConfig, model: ModelConfig) -> DataConfig:
    """`data` with `max_length` set, to the model's context length where it is not set already; unchanged where neither says."""
    return data if data.max_length is not None else evolve(data, max_length=model_context_length(model))


def model_context_length(model: ModelConfig) -> int | None:
    """The longest sequence the model's configuration allows, in tokens; None where it does not say (the backend reports a broken one)."""
    config = read_model_config(model)
    length = None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None
