"""Sums of gradients over data-parallel ranks, sequence-parallel shares and the copies of a tied embedding; their norm; clipping."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from skyrl_engine.modeling.norms import clipping_factor, sum_of_squares
from skyrl_engine_megatron.groups import groups
from skyrl_engine_megatron.library import DistributedDataParallel, finalize_model_grads, parallel_state
from skyrl_engine_megatron.names import HEAD
from skyrl_engine_megatron.state import ShardedState, is_spread, list_buffers


def sum_over_ranks(models: Sequence[DistributedDataParallel]) -> None:
    """Make every rank's accumulated gradients the sum over ranks, once, after any number of passes.

    Without a count of tokens megatron-core does not divide. Sharded gradients are summed in this rank's own pieces only.
    """
    finalize_model_grads(list(models), None)


@contextmanager
def preserve_gradients(models: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Restore the accumulated gradients when this context ends, so that further passes accumulate onto them."""
    buffers = [buffer.grad_data for model in models for buffer in list_buffers(model)]
    copies = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, copy in zip(buffers, copies, strict=True):
            buffer.copy_(copy)


@torch.no_grad()
def clip(state: ShardedState, max_norm: float | None) -> float:
    """Scale summed gradients in place so that their global 2-norm is at most `max_norm`; return the norm before, equal on all ranks.

    Each element counts once: a replicated parameter on the first tensor-parallel rank, a tied embedding on the first stage. Nothing is scaled
    if `max_norm` is None or the norm is not finite.
    """
    device = next(iter(state.parameters.values())).device
    counted = [piece for name, pieces in state.pieces.items() if _is_counted(state, name) for piece in pieces]
    total, of_experts = (
        sum_of_squares((piece.gradient for piece in counted if is_spread(piece.parameter) == spread), device)
        for spread in (False, True)
    )
    if state.sharded:
        total += of_experts
        dist.all_reduce(total)
    else:
        dist.all_reduce(total, group=parallel_state.get_model_parallel_group())
        if groups.experts is not None:
            for group in (parallel_state.get_expert_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
                dist.all_reduce(of_experts, group=group)
            total += of_experts
    norm = float(total.sqrt())
    if (factor := clipping_factor(norm, max_norm)) is not None:
        for piece in state.list_pieces():
            piece.gradient.mul_(factor)
    return norm


def _is_counted(state: ShardedState, name: str) -> bool:
    entry = next((entry for entry in state.entries if entry.name == name), None)
    if entry is None:
        assert name == HEAD, f"the parameter {name} has no name in Hugging Face's model"
        return False
    return entry.divided or parallel_state.get_tensor_model_parallel_rank() == 0


def list_non_finite(state: ShardedState) -> list[str]:
    """Return Hugging Face's names of parameters whose gradient is not finite on this rank."""
    names = [piece.source for piece in state.list_pieces() if not torch.isfinite(piece.gradient).all()]
    return list(dict.fromkeys(names))
