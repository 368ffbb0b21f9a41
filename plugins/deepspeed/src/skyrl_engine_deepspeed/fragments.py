"""Which part of a parameter this rank's optimizer owns, and where, whatever the ZeRO stage: float32 weights and AdamW's moments lie there."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn


@frozen(eq=False)
class Fragment:
    """`flat[offset : offset + size]` is this rank's own float32 part, elements `start` and following, of a flattened parameter.

    `key` is what AdamW keeps its state under.
    """

    key: Tensor
    offset: int
    start: int
    size: int

    def within(self, flat: Tensor) -> Tensor:
        """This fragment's view [size] of a tensor laid out like `key`."""
        return flat.detach().view(-1).narrow(0, self.offset, self.size)

    @property
    def weight(self) -> Tensor:
        return self.within(self.key)


def fragment(engine: Any, parameter: nn.Parameter) -> Fragment | None:
    """This rank's part of `parameter`; None where other ranks own all of it."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return Fragment(parameter, 0, 0, parameter.numel())
    if stage < 3:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined] # noqa: SLF001 - what DeepSpeed's own checkpoints read
        if mapping is None:
            return None
        key = engine.basic_optimizer.param_groups[mapping.param_group_index]["params"][0]
        own, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Fragment(key, own.start, whole.start, own.numel)
    zero: Any = engine.optimizer
    group, offset, padded_size = zero.grad_position[zero.get_param_id(parameter)]
    start = torch.distributed.get_rank() * padded_size
    size = min(padded_size, parameter.ds_numel - start)  # type: ignore[attr-defined] # the last ranks' parts are padded, or padding alone
    return Fragment(zero.fp32_partitioned_groups_flat[group], offset, start, size) if size > 0 else None


def flats(engine: Any) -> list[Tensor]:
    """Every tensor that AdamW steps on this rank."""
    if engine.zero_optimization_stage() == 3:
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]]


def moments(engine: Any, key: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a flat tensor; empty before the first step."""
    return engine.basic_optimizer.state.get(key, {})  # type: ignore[no-any-return] # of the untyped engine


@torch.no_grad()
def adopt_weights(engine: Any, parameters: Mapping[str, nn.Parameter]) -> None:
    """Make the weights that compute those of the fragments, after the fragments were written to."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return
    if stage < 3:
        engine.optimizer.update_lp_params()
        return
    engine.empty_partition_cache()  # whole copies that are kept between uses are of before
    for parameter in parameters.values():
        own = fragment(engine, parameter)
        if own is not None:
            parameter.ds_tensor.narrow(0, 0, own.size).copy_(own.weight)  # type: ignore[attr-defined] # DeepSpeed's attribute: the rank's part


def fragments(engine: Any, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Fragment]]:
    """This rank's parts by parameter name."""
    for name, parameter in parameters.items():
        own = fragment(engine, parameter)
        if own is not None:
            yield name, own
