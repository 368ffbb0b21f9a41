"""The tokens whose keys and values a rank holds where its options do not say: by the memory that is free as the generator starts."""

import logging
from typing import Any

import torch
from torch import distributed

from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.memory import CacheShape, count_cache_tokens, find_free_host_bytes, format_bytes

logger = logging.getLogger(__name__)

UNKNOWN_TOKENS = 2**16
"""Tokens that are held where neither the model's configuration nor the system says how much a token takes and how much memory there is."""


def plan_cache_tokens(spec: ModelConfig, model: Any) -> int:
    """Count the tokens that a share of the free memory of the model's device holds; ranks on CPUs are taken to share a host."""
    device = next(model.parameters()).device
    shape = CacheShape.of(model.config)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else find_free_host_bytes()
    if shape is None or free is None:
        return UNKNOWN_TOKENS
    together = distributed.is_available() and distributed.is_initialized() and device.type == "cpu"
    token_bytes = shape.token_bytes(spec.dtype)
    tokens = count_cache_tokens(free, token_bytes, distributed.get_world_size() if together else 1)
    logger.info("keys and values of up to %d tokens are held: %s", tokens, format_bytes(tokens * token_bytes))
    return tokens
