"""Low-rank adapters of Hugging Face's linear layers, beside megatron-core's, each of which computes several of them at once.

A layer of outputs divided among tensor-parallel ranks has A whole, and the rows of B that belong to the rank's outputs; one of divided inputs
has the columns of A that belong to the rank's inputs, and B whole. What passes between the ranks are r numbers per token. Under sequence
parallelism the whole matrix sees the rank's share of the tokens, and its gradients are added up over the ranks, as those of norms are.

Magnitudes of DoRA (Liu et al. 2024, arXiv 2402.09353, eq. 5) belong to outputs: a layer of divided outputs has whole rows, and so their norms;
the ranks of one of divided inputs add up the squares of their parts of the rows.

With dropout, in passes that learn, each adapter reads inputs of which `adapter_dropout` drops some. With DoRA the frozen weight beside it does
so too, as in PEFT.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from skyrl_engine import UnsupportedError
from skyrl_engine_megatron.adapter_dropout import choose_kept, hash_name
from skyrl_engine_megatron.decoder import Decoder
from skyrl_engine_megatron.division import Along, Division, Fused, Stacked, Whole
from skyrl_engine_megatron.library import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from skyrl_engine_megatron.names import MegatronParameter

_COLUMNS, _ROWS = ("linear_qkv", "linear_fc1"), ("linear_proj", "linear_fc2")
_NAMES = {"A": "lora_A.default.weight", "B": "lora_B.default.weight", "M": "lora_magnitude_vector.default.weight"}


@frozen
class Adapter:
    """An adapter of one of Hugging Face's linear layers: its rank, the factor of the product of its matrices, and whether it is of DoRA.

    `dropout` is the rate at which its inputs are dropped in passes that learn.
    """

    rank: int
    scale: float
    has_magnitudes: bool = False
    dropout: float = 0.0


Adapters = Mapping[str, Adapter]
"""Adapters by the names of Hugging Face's linear layers."""


def list_adapters(model: Any) -> dict[str, Adapter]:
    """Return the adapters that `modeling.lora.add_adapters` put into a transformers model, which need have no values."""
    return {
        name: Adapter(
            module.r["default"],
            float(module.scaling["default"]),
            bool(len(module.lora_magnitude_vector)),
            # PEFT puts an identity there for the rate 0
            float(getattr(module.lora_dropout["default"], "p", 0.0)),
        )
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def adapter_entries(adapters: Adapters, base: Sequence[MegatronParameter], path: str) -> tuple[MegatronParameter, ...]:
    """Return the matrices of adapters, beside the parameters `base` of the model, as `names.entries` returns those.

    Raises UnsupportedError for adapters of layers that this backend does not adapt, and for a stage of the pipeline that gets none.
    """
    made, left = [], dict(adapters)
    for entry in base:
        layer, _, kind = entry.name.rpartition(".")
        place = layer.rpartition(".")[2]
        if kind != "weight" or place not in (*_COLUMNS, *_ROWS):
            continue
        for source, (rows, columns) in entry.sources:
            module = source.removesuffix(".weight")
            if (adapter := left.pop(module, None)) is None:
                continue
            # a tensor of several layers' outputs, one after another, is divided as its weight is
            outputs: Division = entry.division if isinstance(entry.division, Fused) else Along(0)
            inputs: Division = Whole()
            if place in _ROWS:
                inputs, outputs = Along(1), Whole()
            shapes: list[tuple[str, tuple[int, ...], Division]] = [
                ("A", (adapter.rank, columns), inputs),
                ("B", (rows, adapter.rank), outputs),
                *([("M", (rows,), outputs)] if adapter.has_magnitudes else ()),
            ]
            for matrix, shape, division in shapes:
                name = f"{layer}.adapters.{module.rpartition('.')[2]}.{matrix}"
                sources = ((f"{module}.{_NAMES[matrix]}", shape),)
                made.append(MegatronParameter(name, sources, division, entry.part, entry.stage))
    if left:
        raise UnsupportedError(
            f"{path} would have an adapter of {min(left)}, which the megatron backend does not adapt",
            remedy='Name others of its linear layers in model.lora.targets, or set backend.use = "fsdp"',
        )
    bare = {entry.stage for entry in base} - {entry.stage for entry in made}
    if bare:
        raise UnsupportedError(
            f"pipeline stage {min(bare)} would have no adapter, because the adapters are of some layers alone",
            remedy="Set backend.pipeline_parallel = 1, or adapt layers of every stage",
        )
    return tuple(made)


class LinearAdapters(nn.Module):
    """The adapters of one of megatron-core's linear layers, whose outputs they add to; `groups` blocks of outputs have a part of each source.

    `sources` are the last names of the layers that it computes, with their numbers of outputs on this rank; `adapters` have the same names,
    and `layers` says how Hugging Face's model names each whole. `token_keys` int64[tokens] are those of `adapter_dropout`, which the layer
    around it sets for every call; None where nothing is dropped.
    """

    token_keys: Tensor | None = None

    def __init__(
        self,
        sources: Mapping[str, int],
        adapters: Adapters,
        layers: Mapping[str, str],
        linear: nn.Module,
        *,
        columns: bool,
        groups: int,
        shared: bool,
    ) -> None:
        super().__init__()
        self.sources, self.columns, self.groups, self.shared = dict(sources), columns, groups, shared
        self.scales = {name: adapter.scale for name, adapter in adapters.items()}
        self.dropouts = {name: (adapter.dropout, hash_name(layers[name])) for name, adapter in adapters.items() if adapter.dropout}
        self.with_magnitudes = {name for name, adapter in adapters.items() if adapter.has_magnitudes}
        self.off = False
        weight: Tensor = linear.weight  # type: ignore[assignment] # megatron-core's are parameters
        for name, adapter in adapters.items():
            shapes: dict[str, tuple[int, ...]] = {"A": (adapter.rank, weight.shape[1]), "B": (sources[name], adapter.rank)}
            if adapter.has_magnitudes:
                shapes["M"] = (sources[name],)
            matrices = nn.ParameterDict({matrix: nn.Parameter(weight.new_empty(shape)) for matrix, shape in shapes.items()})
            # megatron-core adds up the gradients of what sees a share of the tokens
            for matrix in {"A"} if columns else shapes.keys() - {"A"}:
                matrices[matrix].sequence_parallel = shared
            self.add_module(name, matrices)

    def forward(self, input_T1H: Tensor, output_T1O: Tensor, linear: Any) -> Tensor:
        """Return what is added to the output of the layer."""
        outputs: list[Tensor] = []
        if self.with_magnitudes:
            # without a bias that megatron-core has added already
            plain_T1O = output_T1O if linear.bias is None or linear.skip_bias_add else output_T1O - linear.bias
            sizes = [rows // self.groups for rows in self.sources.values()]
            bases = dict(zip(self.sources, plain_T1O.unflatten(-1, (self.groups, -1)).split(sizes, -1), strict=True))
            weights = dict(zip(self.sources, linear.weight.unflatten(0, (self.groups, -1)).split(sizes, 1), strict=True))
        for name, rows in self.sources.items():
            if name in self.scales:
                read_T1H = self._drop(name, input_T1H)
                own = self._compute(name, read_T1H)
                if name in self.with_magnitudes:
                    weight_OI = weights[name].flatten(0, 1)
                    base = bases[name].flatten(-2) if read_T1H is input_T1H else self._multiply(read_T1H, weight_OI)
                    factor_O = self._scale_rows(name, weight_OI)
                    own = factor_O * own + (factor_O - 1) * base
                outputs.append(own)
            else:
                tokens = outputs[0].shape[0] if outputs else self._count_tokens(input_T1H)
                outputs.append(input_T1H.new_zeros(tokens, 1, rows))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([output.view(*output.shape[:-1], self.groups, -1) for output in outputs], -1).flatten(-2)

    def _scale_rows(self, name: str, weight_OI: Tensor) -> Tensor:
        """Return the magnitudes over the norms of the adapted weight's rows, [outputs]; no gradient goes through the norms (section 4.3)."""
        matrices: Any = self.get_submodule(name)
        wide = torch.promote_types(weight_OI.dtype, torch.float32)
        with torch.no_grad():
            adapted_OI = weight_OI.to(wide) + self.scales[name] * (matrices["B"].to(wide) @ matrices["A"].to(wide))
            squares_O = adapted_OI.square().sum(1)
            if not self.columns:
                dist.all_reduce(squares_O, group=parallel_state.get_tensor_model_parallel_group())
        factor_O: Tensor = matrices["M"] / squares_O.sqrt().to(weight_OI.dtype)
        return factor_O

    def _count_tokens(self, input_T1H: Tensor) -> int:
        ranks = parallel_state.get_tensor_model_parallel_world_size() if self.shared and self.columns else 1
        return len(input_T1H) * ranks

    def _drop(self, name: str, input_T1H: Tensor) -> Tensor:
        """Return the inputs that this adapter reads; the very tensor where nothing is dropped."""
        if self.token_keys is None or name not in self.dropouts:
            return input_T1H
        (rate, layer), keys_T, first = self.dropouts[name], self.token_keys, 0
        rank = parallel_state.get_tensor_model_parallel_rank()
        if not self.columns:
            first = rank * input_T1H.shape[-1]
        elif self.shared:
            keys_T = keys_T.chunk(parallel_state.get_tensor_model_parallel_world_size())[rank]
        kept_T1H = choose_kept(keys_T, layer, first, input_T1H.shape[-1], rate)[:, None]
        return torch.where(kept_T1H, input_T1H * (1 / (1 - rate)), 0)

    def _multiply(self, input_T1H: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the product of inputs with this rank's part of a frozen weight, as the layer itself computes it."""
        if not self.columns:
            product_T1O = nn.functional.linear(input_T1H, weight_OI)
            reduce = reduce_scatter_to_sequence_parallel_region if self.shared else reduce_from_tensor_model_parallel_region
            reduced_T1O: Tensor = reduce(product_T1O)
            return reduced_T1O
        if self.shared:
            return nn.functional.linear(
                gather_from_sequence_parallel_region(input_T1H, tensor_parallel_output_grad=True), weight_OI
            )
        return nn.functional.linear(copy_to_tensor_model_parallel_region(input_T1H), weight_OI)

    def _compute(self, name: str, input_T1H: Tensor) -> Tensor:
        matrices: Any = self.get_submodule(name)
        inner_T1R = nn.functional.linear(input_T1H, matrices["A"])
        if self.columns and self.shared:
            inner_T1R = gather_from_sequence_parallel_region(inner_T1R, tensor_parallel_output_grad=True)
        elif self.columns:
            inner_T1R = copy_to_tensor_model_parallel_region(inner_T1R)
        elif self.shared:
            inner_T1R = reduce_scatter_to_sequence_parallel_region(inner_T1R)
        else:
            inner_T1R = reduce_from_tensor_model_parallel_region(inner_T1R)
        return nn.functional.linear(inner_T1R, matrices["B"]) * self.scales[name]


def attach_adapters(decoders: Sequence[Decoder], adapters: Adapters, base: Sequence[MegatronParameter]) -> None:
    """Put adapters without values beside the linear layers of these pieces of the model, and freeze all else but a value head."""
    entries = {entry.name.removesuffix(".weight"): entry for entry in base}
    for decoder in decoders:
        for name, parameter in decoder.named_parameters():
            parameter.requires_grad_(name.startswith("value_head."))
        for layer in decoder.decoder.layers:
            for place, linear in list(layer.named_modules()):
                if place.rpartition(".")[2] not in (*_COLUMNS, *_ROWS):
                    continue
                if (entry := entries.get(f"decoder.layers.{layer.layer_number - 1}.{place}")) is not None:
                    _attach(linear, entry, adapters, shared=decoder.config.sequence_parallel)
            layer.dropping = [module for module in layer.modules() if isinstance(module, LinearAdapters) and module.dropouts]


def share_frozen(decoders: Sequence[Decoder], others: Sequence[Decoder]) -> None:
    """Put the frozen parameters of `others`, the same pieces of the model with other adapters, in the place of these pieces' own."""
    for decoder, other in zip(decoders, others, strict=True):
        theirs = dict(other.named_parameters())
        for place, module in decoder.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.requires_grad:
                    module.register_parameter(name, theirs[f"{place}.{name}"])


def _attach(linear: nn.Module, entry: MegatronParameter, adapters: Adapters, *, shared: bool) -> None:
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    columns = entry.name.rpartition(".weight")[0].rpartition(".")[2] in _COLUMNS
    modules = {source.removesuffix(".weight"): shape[0] for source, shape in entry.sources}
    own = {module.rpartition(".")[2]: adapters[module] for module in modules if module in adapters}
    if not own:
        return
    groups = 1
    if isinstance(entry.division, Stacked) and entry.division.groups is not None:
        groups = entry.division.groups // ranks
    sources = {module.rpartition(".")[2]: rows // ranks if columns else rows for module, rows in modules.items()}
    layers = {module.rpartition(".")[2]: module for module in modules}
    added = LinearAdapters(sources, own, layers, linear, columns=columns, groups=groups, shared=shared)
    linear.add_module("adapters", added)
    linear.register_forward_hook(
        lambda module, inputs, output: output if added.off else (output[0] + added(inputs[0], output[0], module), *output[1:])
    )


@contextmanager
def adapters_off(decoders: Sequence[Decoder]) -> Iterator[None]:
    """Let the model compute without adapters until the context is left."""
    added = [module for decoder in decoders for module in decoder.modules() if isinstance(module, LinearAdapters)]
    for module in added:
        module.off = True
    try:
        yield
    finally:
        for module in added:
            module.off = False


def merge(name: str, weight: Tensor, adapters: Adapters, values: Mapping[str, Tensor]) -> Tensor:
    """Return the weight of this name with its adapter merged, in the precision of the adapters' `values` by name."""
    module = name.removesuffix(".weight")
    precision = next(iter(values.values())).dtype
    if module not in adapters or module == name:
        return weight.to(precision)
    down_RI, up_OR = (values[f"{module}.{_NAMES[matrix]}"] for matrix in "AB")
    merged_OI: Tensor = weight.to(precision) + adapters[module].scale * (up_OR @ down_RI)
    if not adapters[module].has_magnitudes:
        return merged_OI
    factor_O: Tensor = values[f"{module}.{_NAMES['M']}"] / torch.linalg.norm(merged_OI, dim=1)
    return factor_O[:, None] * merged_OI
