"""Fragments: the part of each parameter whose float32 weight and AdamW moments this rank's optimizer owns, under any ZeRO stage."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn


@frozen(eq=False)
class Fragment:
    """This rank's part of a flattened parameter: its elements start, ..., start + size - 1.

    They lie at `offset`, ..., `offset` + size - 1 of `key`, the flat float32 tensor under which AdamW keeps its state.
    """

    key: Tensor
    offset: int
    start: int
    size: int

    def within(self, flat: Tensor) -> Tensor:
        """Return the view [size] of this fragment in a tensor laid out like `key`."""
        return flat.detach().view(-1).narrow(0, self.offset, self.size)

    @property
    def weight(self) -> Tensor:
        return self.within(self.key)


def fragment(engine: Any, parameter: nn.Parameter) -> Fragment | None:
    """Return this rank's part of `parameter`, or None if other ranks own all of it."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return Fragment(parameter, 0, 0, parameter.numel())
    if stage < 3:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined] # noqa: SLF001 - DeepSpeed's own checkpoints read it
        if mapping is None:
            return None
        key = engine.basic_optimizer.param_groups[mapping.param_group_index]["params"][0]
        own, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Fragment(key, own.start, whole.start, own.numel)
    zero: Any = engine.optimizer
    group, offset, padded_size = zero.grad_position[zero.get_param_id(parameter)]
    start = torch.distributed.get_rank() * padded_size
    # the parts of the last ranks end in padding, or are nothing else
    size = min(padded_size, parameter.ds_numel - start)  # type: ignore[attr-defined]
    return Fragment(zero.fp32_partitioned_groups_flat[group], offset, start, size) if size > 0 else None


def flats(engine: Any) -> list[Tensor]:
    """Return every tensor that AdamW updates on this rank."""
    if engine.zero_optimization_stage() == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]]


def moments(engine: Any, key: Tensor) -> dict[str, Tensor]:
    """Return AdamW's state of a flat tensor; it is empty before the first step."""
    return engine.basic_optimizer.state.get(key, {})  # type: ignore[no-any-return] # of the untyped engine


@torch.no_grad()
def adopt_weights(engine: Any, parameters: Mapping[str, nn.Parameter]) -> None:
    """Copy the fragments' float32 weights, after they were overwritten, into the weights that the model computes with."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return
    if stage < 3:
        engine.optimizer.update_lp_params()
        return
    # gathered copies that DeepSpeed keeps between uses hold the old weights
    engine.empty_partition_cache()
    for parameter in parameters.values():
        own = fragment(engine, parameter)
        if own is not None:
            # DeepSpeed's attribute for this rank's part
            parameter.ds_tensor.narrow(0, 0, own.size).copy_(own.weight)  # type: ignore[attr-defined]


def fragments(engine: Any, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Fragment]]:
    """Yield this rank's fragments by parameter name."""
    for name, parameter in parameters.items():
        own = fragment(engine, parameter)
        if own is not None:
            yield name, own
