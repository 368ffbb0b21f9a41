"""DoRA over linear layers that tensor-parallel ranks divide: norms of the rows of whole weights, from the parts that the ranks hold.

A layer computes with m (W + s B A) / |W + s B A|, a norm and a trained number m per output; no gradient goes through the norm (Liu et al. 2024,
arXiv 2402.09353, section 4.3). Ranks that divide the outputs hold whole rows. Ranks that divide the inputs add up the squares of their parts,
one number per output and pass.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from skyrl_engine.model_facts.tensor_parallel_plan import COLUMNS, GATHERED_COLUMNS, ROWS, SPLIT_ROWS
from skyrl_engine.modeling.lora import ADAPTER
from skyrl_engine_fsdp.gradients import local


def divide_magnitudes(layer: Any, style: str, mesh: DeviceMesh) -> None:
    """Let an adapted linear layer, divided in this style, scale what it computes by its rank's share of the magnitudes, in place.

    Magnitudes of outputs that stay divided are divided with them; of outputs that every rank goes on with, every rank has all.
    """
    magnitudes = layer.lora_magnitude_vector[ADAPTER]
    if style == COLUMNS:
        whole = magnitudes.weight
        part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        magnitudes.weight = nn.Parameter(part, requires_grad=whole.requires_grad)
    magnitudes.forward = partial(_scale, magnitudes, style, mesh.get_group())


def _scale(
    magnitudes: nn.Module,
    style: str,
    group: dist.ProcessGroup,
    inputs: Tensor,
    *,
    lora_A: nn.Module,
    lora_B: nn.Module,
    scaling: float,
    base_layer: nn.Module,
    base_result: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return what PEFT's `DoraLinearLayer.forward` does, to be added to the base layer's output; without `base_result`, that of `inputs`."""
    weights: tuple[Any, ...] = (base_layer.weight, lora_A.weight, lora_B.weight)
    with torch.no_grad():
        weight, down, up = (local(part).to(inputs.dtype) for part in weights)
        norms = _NORMS[style](weight + scaling * (up @ down), group)
        bias: Any = base_layer.bias
        if bias is not None:
            bias = _gather(local(bias), group) if style == GATHERED_COLUMNS else local(bias)
    scales = local(magnitudes.weight) / norms  # type: ignore[arg-type] # torch says that any attribute of a module may be a module
    product = base_layer(inputs) if base_result is None else base_result
    if bias is not None:
        product = product - bias
    scaled: Tensor = (scales - 1) * product + scales * lora_B(lora_A(inputs)) * scaling
    return scaled


def _norm_rows(weight: Tensor, _group: dist.ProcessGroup) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1)
    return norms


def _norm_gathered_rows(weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _gather(_norm_rows(weight, group), group)


def _norm_divided_rows(weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    squares: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt().to(weight.dtype)


def _gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts)


_NORMS: Final[Mapping[str, Callable[[Tensor, dist.ProcessGroup], Tensor]]] = {
    COLUMNS: _norm_rows,
    GATHERED_COLUMNS: _norm_gathered_rows,
    ROWS: _norm_divided_rows,
    SPLIT_ROWS: _norm_divided_rows,
}
"""Norms of the rows of whole weights, by the style in which ranks divide them."""
