"""The model's own configuration, for what the data must know of the model."""

from pathlib import Path
from typing import Any

from skyrl_engine.config.schema import ModelConfig


def read_model_config(model: ModelConfig) -> Any | None:
    """The transformers configuration; None where it cannot be read, which the backend reports when it loads the model."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(**location_of(model))
    except (OSError, ValueError, KeyError):
        return None


def location_of(model: ModelConfig) -> dict[str, Any]:
    """The arguments of `from_pretrained` that say where the model's files are; a local directory is read without the network."""
    folder = Path(model.path).expanduser()
    local = folder.is_dir()
    return {
        "pretrained_model_name_or_path": str(folder) if local else model.path,
        "revision": None if local else model.revision,
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": local,
    }
