"""Tensor parallelism by DTensor: layers are divided by transformers' own plan, embedding and head along the vocabulary."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from skyrl_engine.model_facts.tensor_parallel_plan import (
    COLUMNS,
    EXPERTS,
    GATHERED_COLUMNS,
    LATENT,
    LINEAR,
    LOCAL_HEADS,
    ROWS,
    SINKS,
    SPLIT_ROWS,
    match_styles,
    styles_of,
)
from skyrl_engine.modeling.lora import ADAPTER
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.vision import language_part
from skyrl_engine_fsdp.experts import divide_experts
from skyrl_engine_fsdp.layer_styles import indivisible_error
from skyrl_engine_fsdp.magnitudes import divide_magnitudes
from skyrl_engine_fsdp.parameter_views import view_parameters
from skyrl_engine_fsdp.rank_sums import sum_backward
from skyrl_engine_fsdp.vocabulary import divide_vocabulary, get_local

_DIVISIONS: Final[Mapping[str, Callable[[], ParallelStyle]]] = {
    COLUMNS: ColwiseParallel,
    ROWS: RowwiseParallel,
    # every rank goes on alike with whole outputs, so that their gradient is whole on each, and a part of it this rank's
    GATHERED_COLUMNS: partial(ColwiseParallel, output_layouts=Replicate()),
    SPLIT_ROWS: partial(RowwiseParallel, input_layouts=Replicate()),
}
"""The division of linear layers by style."""


@frozen
class LayerPlan:
    """A tensor-parallel plan: the style by which each module is divided, by a pattern such as "layers.*.mlp.up_proj"."""

    styles: Mapping[str, str]

    @classmethod
    def of(cls, config: Any, *, experts: bool = True) -> "LayerPlan":
        """Return transformers' plan for a configuration that `layer_styles.refuse_model` has accepted, with its `experts` or without them."""
        return cls({pattern: style for pattern, style in styles_of(config).items() if experts or style != EXPERTS})

    def modules(self, decoder: nn.Module, ranks: int) -> dict[str, str]:
        """Return the style of every module of `decoder` that the plan divides, by name. Raises UnsupportedError if one cannot be divided."""
        styles = match_styles(self.styles, (name for name, _ in decoder.named_modules()))
        for name, style in styles.items():
            module = decoder.get_submodule(name)
            if style in LINEAR:
                linear = getattr(module, "base_layer", module)
                if not isinstance(linear, nn.Linear):
                    raise indivisible_error(f"{name} of {type(decoder).__name__} is a {type(module).__name__}, not a linear layer")
                size = linear.out_features if style in (COLUMNS, GATHERED_COLUMNS) else linear.in_features
                if size % ranks:
                    raise indivisible_error(f"{ranks} ranks cannot share the {size} numbers of {name} in {type(decoder).__name__}")
        if not styles:
            raise indivisible_error(f"{type(decoder).__name__} has none of the parts that its tensor-parallel plan divides")
        return styles


def parallelize(model: Any, scorer: Scorer, plan: LayerPlan, mesh: DeviceMesh) -> None:
    """Divide, in place, the layers by `plan` and embedding and head along the vocabulary; every rank keeps its part of the values it has.

    A vision tower stays whole on every rank, which all compute the same features and the same gradient.
    """
    decoder: Any = language_part(scorer.decoder)
    styles = plan.modules(decoder, mesh.size())
    group = mesh.get_group()
    linear: dict[str, ParallelStyle] = {}
    for name, style in styles.items():
        if style in LINEAR:
            linear |= {part: _DIVISIONS[style]() for part in _list_divided_layers(name, decoder.get_submodule(name), style)}
    parallelize_module(decoder, mesh, linear, src_data_rank=None)
    for name, style in styles.items():
        module: Any = decoder.get_submodule(name)
        if style in LINEAR and ADAPTER in getattr(module, "lora_magnitude_vector", ()):
            divide_magnitudes(module, style, mesh)
        elif style == LOCAL_HEADS:
            view_parameters(module, lambda weight: sum_backward(weight, group))
        elif style == LATENT:
            _share_rotary_part(module, decoder.config.qk_rope_head_dim, group)
        elif style == EXPERTS:
            divide_experts(name, decoder, mesh)
        elif style == SINKS:
            sinks = distribute_tensor(module.sinks.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.sinks = nn.Parameter(sinks, requires_grad=module.sinks.requires_grad)
            view_parameters(module, get_local)
    divide_vocabulary(model, scorer, mesh)


def _list_divided_layers(name: str, module: Any, style: str) -> list[str]:
    """Return the linear layers that are divided of a module: itself, or under an adapter its base layer and the matrix on the divided side.

    The other matrix of an adapter is whole on every rank, which all compute the same between the two: the outputs of A, as many as the rank of
    the adapter.
    """
    if not hasattr(module, "base_layer"):
        return [name]
    if ADAPTER not in module.lora_A:
        return [f"{name}.base_layer"]
    matrix = "lora_B" if style in (COLUMNS, GATHERED_COLUMNS) else "lora_A"
    return [f"{name}.base_layer", f"{name}.{matrix}.{ADAPTER}"]


def _share_rotary_part(projection: nn.Module, size: int, group: dist.ProcessGroup) -> None:
    """Sum over ranks the gradient of the last `size` outputs, which each rank's heads use directly; the rest goes through a divided layer."""

    def after(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return torch.cat([output[..., :-size], sum_backward(output[..., -size:], group)], dim=-1)

    projection.register_forward_hook(after)
