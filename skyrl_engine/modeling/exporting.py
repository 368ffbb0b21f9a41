"""Write whole weights as a Hugging Face directory."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.loading import quiet_progress
from skyrl_engine.modeling.lora import has_adapters, trained, write_adapters


def write_pretrained(model: Any, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the model's configuration and `weights` by the names of `exported` (None: the model's own); adapters in PEFT's format.

    The configuration names the precision of the written weights, in which transformers loads them, not that which the model computes in.
    Raises ModelError.
    """
    try:
        with quiet_progress(), _silent("DeepSpeed"):
            if has_adapters(model):
                write_adapters(model, directory, exported(model) if weights is None else weights)
                return
            model.save_pretrained(directory, state_dict=None if weights is None else dict(weights))
            if weights is not None:
                _name_precision(model.config, directory, weights)
    except OSError as error:
        raise ModelError(
            f"the model cannot be written to {directory}: {error}", remedy="Make room there or choose another place"
        ) from error


def exported(model: Any) -> dict[str, Tensor]:
    """Return the tensors to export by name, as this rank holds them: the state dictionary or, with adapters, the trained parameters."""
    return dict(trained(model)) if has_adapters(model) else model.state_dict(keep_vars=True)


def _name_precision(config: Any, directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the precision of `weights` into the configuration, which names that of the model's own parameters so far."""
    written = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
    computes, config.dtype = config.dtype, str(written).removeprefix("torch.")
    try:
        config.save_pretrained(directory)
    finally:
        config.dtype = computes


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Silence a logger: if DeepSpeed and accelerate are installed, saving imports DeepSpeed, which logs to standard output."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
