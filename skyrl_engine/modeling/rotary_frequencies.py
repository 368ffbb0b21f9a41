"""Rotary frequencies that are fixed for a run, in models for which transformers chooses them in every forward pass."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.thresholds import choose_rotary_length

_FIXED = "fixed"
"""A type that transformers' decorator `dynamic_rope_update` leaves alone."""


@torch.no_grad()
def fix_rotary_frequencies(model: Any, wanted: int | None) -> int | None:
    """Fix the frequencies of `model` for rows of at most the returned length in tokens; None: they do not depend on lengths.

    transformers chooses them by the longest position of a forward pass, so that a sample's loss and gradient depend on the samples next to it
    in its micro-batch. Here they are those for a row of `choose_rotary_length(config, wanted)` tokens, in every pass. Works on a skeleton too,
    whose buffers get their values from another rank. Raises ModelError if the model chooses in code of its own.
    """
    length = choose_rotary_length(model.config, wanted)
    if length is None:
        return None
    embeddings = list(_embeddings(model))
    for embedding in embeddings:
        if isinstance(embedding.rope_type, dict):
            for layer, kind in embedding.rope_type.items():
                _fix(embedding, f"{layer}_inv_freq", kind, length, layer_type=layer)
            embedding.rope_type = dict.fromkeys(embedding.rope_type, _FIXED)
        else:
            _fix(embedding, "inv_freq", embedding.rope_type, length)
            embedding.rope_type = _FIXED
    if not embeddings:
        raise _by_own_code(model)
    return length


@torch.no_grad()
def check_fixed(model: Any, length: int) -> None:
    """Try a model with values: the angles of the first positions must be the same, bit for bit, next to a short row and next to the longest.

    Raises ModelError otherwise.
    """
    device = next(model.parameters()).device
    hidden = torch.zeros(1, 1, 1, device=device)
    short = torch.arange(2, device=device)[None]
    with_longest = torch.cat([short, short.new_tensor([[length - 1]])], dim=1)
    for embedding in _embeddings(model):
        layers = [{"layer_type": layer} for layer in embedding.rope_type] if isinstance(embedding.rope_type, dict) else [{}]
        for layer in layers:
            alone, among = (embedding(hidden, positions, **layer) for positions in (short, with_longest))
            if any(not torch.equal(a, b[:, :2]) for a, b in zip(alone, among, strict=True)):
                raise _by_own_code(model)


def _embeddings(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "rope_type") and hasattr(module, "config"))


def _fix(embedding: Any, name: str, kind: str, length: int, **layer: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind in ROPE_INIT_FUNCTIONS and ("dynamic" in kind or kind == "longrope"):
        buffer: Tensor = getattr(embedding, name)
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](embedding.config, buffer.device, seq_len=length, **layer)
        buffer.copy_(frequencies)


def _by_own_code(model: Any) -> ModelError:
    return ModelError(
        f"{type(model).__name__} chooses its rotary positions by the longest row of a micro-batch in code of its own, so that its loss would "
        f"depend on how a batch is cut",
        remedy="Set data.max_length to the length that the model was first trained for, or use another model",
    )
