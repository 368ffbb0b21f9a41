"""Tensor parallelism by DTensor: layers are divided by transformers' own plan, embedding and head along the vocabulary."""

import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine_fsdp.layer_styles import COLUMNS, LOCAL_HEADS, indivisible_error, styles_of
from skyrl_engine_fsdp.parameter_views import view_parameters
from skyrl_engine_fsdp.rank_sums import sum_backward
from skyrl_engine_fsdp.vocabulary import divide_vocabulary


@frozen
class LayerPlan:
    """A tensor-parallel plan: the style by which each module is divided, by a pattern such as "layers.*.mlp.up_proj"."""

    styles: Mapping[str, str]

    @classmethod
    def of(cls, config: Any) -> "LayerPlan":
        """Return transformers' plan for a configuration that `layer_styles.refuse_model` has accepted."""
        return cls(styles_of(config))

    def modules(self, decoder: nn.Module, ranks: int) -> dict[str, str]:
        """Return the style of every module of `decoder` that the plan divides, by name. Raises UnsupportedError if one cannot be divided."""
        patterns = {re.compile(re.escape(pattern).replace(r"\*", r"\d+")): style for pattern, style in self.styles.items()}
        styles: dict[str, str] = {}
        for name, module in decoder.named_modules():
            style = next((style for pattern, style in patterns.items() if pattern.fullmatch(name)), None)
            if style is None:
                continue
            if style != LOCAL_HEADS:
                if not isinstance(module, nn.Linear):
                    raise indivisible_error(f"{name} of {type(decoder).__name__} is a {type(module).__name__}, not a linear layer")
                size = module.out_features if style == COLUMNS else module.in_features
                if size % ranks:
                    raise indivisible_error(f"{ranks} ranks cannot share the {size} numbers of {name} in {type(decoder).__name__}")
            styles[name] = style
        if not styles:
            raise indivisible_error(f"{type(decoder).__name__} has none of the parts that its tensor-parallel plan divides")
        return styles


def parallelize(model: Any, scorer: Scorer, plan: LayerPlan, mesh: DeviceMesh) -> None:
    """Divide, in place, the layers by `plan` and embedding and head along the vocabulary; every rank keeps its part of the values it has."""
    styles = plan.modules(scorer.decoder, mesh.size())
    linear: dict[str, ParallelStyle] = {
        name: ColwiseParallel() if style == COLUMNS else RowwiseParallel() for name, style in styles.items() if style != LOCAL_HEADS
    }
    parallelize_module(scorer.decoder, mesh, linear, src_data_rank=None)
    group = mesh.get_group()
    for name, style in styles.items():
        if style == LOCAL_HEADS:
            view_parameters(scorer.decoder.get_submodule(name), lambda weight: sum_backward(weight, group))
    divide_vocabulary(model, scorer, mesh)
