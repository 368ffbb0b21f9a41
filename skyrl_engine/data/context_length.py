"""The longest sample that a model can take, where the configuration sets no limit of its own."""

from pathlib import Path
from typing import Any

from attrs import evolve

from skyrl_engine.config.schema import DataConfig, ModelConfig


def limited_to_model(data: DataConfig, model: ModelConfig) -> DataConfig:
    """`data` with `max_length` set, to the model's context length where it is not set already; unchanged where neither says."""
    return data if data.max_length is not None else evolve(data, max_length=model_context_length(model))


def model_context_length(model: ModelConfig) -> int | None:
    """The longest sequence the model's configuration allows, in tokens; None where it does not say (the backend reports a broken one)."""
    from transformers import AutoConfig

    folder = Path(model.path).expanduser()
    local = folder.is_dir()
    try:
        config: Any = AutoConfig.from_pretrained(
            str(folder) if local else model.path,
            revision=None if local else model.revision,
            trust_remote_code=model.trust_remote_code,
        )
    except (OSError, ValueError, KeyError):
        return None
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None
