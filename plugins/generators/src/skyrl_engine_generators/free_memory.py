"""The tokens whose keys and values a rank holds where its options do not say: by the memory that is free as the generator starts."""

import logging
from typing import Any

import torch
from torch import distributed

from skyrl_engine.contracts import ModelConfig, TensorParallelGroup
from skyrl_engine.model_facts.memory import CacheShape, count_cache_tokens, find_free_host_bytes, format_bytes
from skyrl_engine.model_facts.tensor_parallel_plan import divides_keys
from skyrl_engine.modeling.divided_sampler import collect_words

logger = logging.getLogger(__name__)

UNKNOWN_TOKENS = 2**16
"""Tokens that are held where neither the model's configuration nor the system says how much a token takes and how much memory there is."""


def plan_cache_tokens(spec: ModelConfig, model: Any, group: TensorParallelGroup | None = None) -> int:
    """Count the tokens that a share of the free memory of the model's device holds; ranks on CPUs are taken to share a host.

    Ranks of a `group` hold parts of keys and values of the same tokens, as many as the one with the least memory.
    """
    device = next(model.parameters()).device
    shape = CacheShape.of(model.config)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else find_free_host_bytes()
    if shape is None or free is None:
        return min(collect_words(UNKNOWN_TOKENS, group))
    together = distributed.is_available() and distributed.is_initialized() and device.type == "cpu"
    token_bytes = shape.token_bytes(spec.dtype)
    if group is not None and divides_keys(model.config):
        token_bytes = -(-token_bytes // group.size)
    tokens = min(collect_words(count_cache_tokens(free, token_bytes, distributed.get_world_size() if together else 1), group))
    logger.info("keys and values of up to %d tokens are held: %s", tokens, format_bytes(tokens * token_bytes))
    return tokens
