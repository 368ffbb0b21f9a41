"""A model's weights where they lie, in safetensors files: a rank reads the parts that it holds of a model made without values."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, evolve, field, frozen
from safetensors import safe_open
from torch import Tensor, nn

from skyrl_engine.contracts.values.model import EmptyModelConfig, ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.weight_files import safetensors_header, weight_files
from skyrl_engine.modeling.unpickling import UNREADABLE, failure

Region = tuple[slice, ...]
"""A half-open range of every dimension of a tensor."""

MOST_MAPPED: Final = 2**28
"""Bytes that are read from a file before it is opened again."""

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors files."""


@define(eq=False)
class StoredFile:
    """A safetensors file that stays open from one read to the next: opening one reads what it says of all its tensors.

    It is opened again after `MOST_MAPPED` bytes, because pages that were read belong to the process for as long as the file is open.
    """

    path: Path
    _opened: Any = field(default=None, init=False, repr=False)
    _bytes: int = field(default=0, init=False)

    def read(self, name: str, region: Region) -> Tensor:
        """Read a part of a tensor, by default the whole, in its own dtype. Raises what safetensors raises."""
        if self._opened is None or self._bytes >= MOST_MAPPED:
            self._opened, self._bytes = safe_open(self.path, framework="pt"), 0
        part: Tensor = self._opened.get_slice(name)[region or ...]
        self._bytes += part.nbytes
        return part


@frozen
class StoredTensor:
    """A tensor of a file, and the dtype that transformers reads it in."""

    file: StoredFile
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, region: Region = ()) -> Tensor:
        """Read a part of the tensor, by default the whole. Raises ModelError."""
        try:
            return self.file.read(self.name, region).to(self.dtype)
        except UNREADABLE as error:
            raise ModelError(
                f"{self.name} cannot be read from {self.file.path}: {failure(error)}", remedy="Copy or download the file again"
            ) from error


class TensorStandIn:
    """Stands for a tensor of a file while transformers loads a model from it: it has a shape, and its copy is on the meta device."""

    def __init__(self, file: StoredFile, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.stored = StoredTensor(file, name, tuple(shape), dtype)

    def __getitem__(self, _: object) -> "TensorStandIn":
        return self

    def to(self, *_: object, dtype: torch.dtype | None = None, **__: object) -> Tensor:
        """Make a tensor without values, and note in which dtype."""
        if dtype is not None:
            self.stored = evolve(self.stored, dtype=dtype)
        return torch.empty(self.stored.shape, dtype=self.stored.dtype, device="meta")

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of a safetensors file does."""
        return list(self.stored.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype, as a slice of a safetensors file does."""
        return next(name for name, dtype in _DTYPES.items() if dtype == self.stored.dtype)


@frozen(eq=False)
class StoredParameter:
    """A parameter or persistent buffer of a model, made of one tensor of the files or, by a rule of transformers, of several.

    `sources` are the tensors by the pattern of the rule that their names match; without a `rule` there is one. `asked` is the name that the
    rule gives the first of its results, `name` the one of this result.
    """

    name: str
    sources: Mapping[str, Sequence[StoredTensor]]
    rule: Any | None = None
    asked: str = ""

    def read(self, model: Any, shape: tuple[int, ...], region: Region) -> Tensor:
        """Read `region` of the parameter of a `shape`; of what a rule makes of several tensors, all are read unless it stacks them."""
        if any(part.stop <= part.start for part in region):
            ((first, *_), *_) = self.sources.values()
            return torch.empty([max(0, part.stop - part.start) for part in region], dtype=first.dtype)
        if self.rule is None:
            ((tensor,),) = self.sources.values()
            return tensor.read(region)
        sources = self.sources
        if _stacks(self.rule) and all(len(tensors) == shape[0] for tensors in sources.values()):
            sources = {pattern: tensors[region[0]] for pattern, tensors in sources.items()}
            region = (slice(None), *region[1:])
        return convert(self.rule, sources, self.asked, model)[self.name][region].clone()


def _stacks(rule: Any) -> bool:
    """Return True where each tensor gives one entry of the result's first dimension, as experts that are stacked do."""
    first, *others = rule.operations
    inner = all(
        (type(one).__name__ == "Concatenate" and one.dim > 0)
        or (type(one).__name__ == "Transpose" and min(one.dim0, one.dim1) > 0 and not getattr(one, "check_dims", False))
        for one in others
    )
    return type(first).__name__ == "MergeModulelist" and first.dim == 0 and inner


def convert(
    rule: Any, sources: Mapping[str, Sequence[StoredTensor]], asked: str, model: Any, *, reads: bool = True
) -> dict[str, Tensor]:
    """Make the tensors of a rule of transformers from their sources, by name; without `reads` on the meta device."""
    rule = copy.deepcopy(rule)
    for pattern, tensors in sources.items():
        for tensor in tensors:
            made = tensor.read if reads else partial(torch.empty, tensor.shape, dtype=tensor.dtype, device="meta")
            rule.add_tensor(asked, tensor.name, pattern, made)
    results = rule.convert(asked, model=model, config=model.config)
    return {name: result[0] if isinstance(result, list) else result for name, result in results.items()}


@frozen(eq=False)
class WeightsInFiles:
    """The places of a model's parameters and persistent buffers in its files, by their names in the model without adapters."""

    model: Any = field(repr=False)
    parameters: Mapping[str, StoredParameter]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _base_name(name) in self.parameters

    def read_sources(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read the tensors of the files, by their names there, that these parameters and buffers are made of."""
        sources = (self.parameters[name].sources.values() for name in names if name in self.parameters)
        return {tensor.name: tensor.read() for lists in sources for tensors in lists for tensor in tensors}

    def read(self, name: str, place: Tensor, region: Region | None = None) -> Tensor:
        """Read `region` (None: all) of the tensor that is to stand at `place`, which has the whole shape, in the dtype of `place`."""
        shape = tuple(place.shape)
        whole = tuple(slice(0, size) for size in shape)
        part = self.parameters[_base_name(name)].read(self.model, shape, whole if region is None else region)
        if part.is_floating_point() and part.dtype != place.dtype and torch.float64 not in (part.dtype, place.dtype):
            # as loading does: the weights' own precision first, then that which computes
            part = part.to(torch.float32)
        return part.to(place.dtype)


def _base_name(name: str) -> str:
    """Return a tensor's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


def why_not_in_parts(spec: ModelConfig, config: Any) -> str | None:
    """Return why a rank cannot read parts of the files of a model's weights, as a clause; None where it can. Raises ModelError."""
    if isinstance(spec, EmptyModelConfig):
        return "its weights are drawn"
    if spec.lora is not None and (spec.lora.load_in_4bit or (spec.lora.dora and spec.lora.path is None)):
        return "its adapters start at values of its weights" if spec.lora.dora else "its layers are rounded to 4 bits"
    if getattr(config, "quantization_config", None) is not None:
        return "its files hold rounded weights"
    files = weight_files(spec)
    if not files or any(file.suffix != ".safetensors" for file in files):
        return "its weights are not in safetensors files of a local directory"
    dtypes = {entry["dtype"] for file in files for name, entry in safetensors_header(file).items() if name != "__metadata__"}
    return f"its files hold numbers of the type {min(dtypes - _DTYPES.keys())}" if dtypes - _DTYPES.keys() else None


def list_places(spec: ModelConfig) -> dict[str, TensorStandIn]:
    """Return a stand-in for every tensor of the files of a model's weights, by its name there. Raises ModelError."""
    return {
        name: TensorStandIn(file, name, entry["shape"], _DTYPES[entry["dtype"]])
        for file in map(StoredFile, weight_files(spec))
        for name, entry in safetensors_header(file.path).items()
        if name != "__metadata__"
    }


def find_stored_weights(model: Any, places: Mapping[str, TensorStandIn]) -> WeightsInFiles | str:
    """Find the tensors of a model that transformers has loaded from `places`, by its own rules; a clause where they do not explain all of them.

    Tied parameters are found under each of their names. Other tensors, such as those that no file holds, have their values.
    """
    try:
        found = {parameter.name: parameter for parameter in _apply_rules(model, places)}
    except Exception as error:  # noqa: BLE001 - rules of any version of transformers, which loads the model whole in any case
        return f"transformers' rules for its weights cannot be followed ({type(error).__name__}: {error})"
    shared: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if tensor.is_meta:
            shared.setdefault(id(tensor), []).append(name)
    stored: dict[str, StoredParameter] = {}
    for names in shared.values():
        known = [name for name in names if name in found]
        if len(known) != 1:
            return f"its files hold {names[0]} {len(known)} times"
        stored |= dict.fromkeys(names, found[known[0]])
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    apart = [target for target, source in tied.items() if target in found and source in found]
    return f"its files hold {apart[0]} beside the weight that it is tied to" if apart else WeightsInFiles(model, stored)


def _apply_rules(model: nn.Module, places: Mapping[str, TensorStandIn]) -> Iterator[StoredParameter]:
    """Yield what transformers makes of the tensors of the files, as its `convert_and_load_state_dict_in_model` does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    own = model.state_dict()
    groups: dict[str, dict[str, list[StoredTensor]]] = {}
    for name in sorted(places, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if renamed not in own and name in own:
            renamed, pattern = rename_source_key(name, [], [], base_model_prefix=model.base_model_prefix, meta_state_dict=own)
        if renamed not in own:
            continue
        if pattern is None:
            yield StoredParameter(renamed, {name: [places[name].stored]})
        else:
            groups.setdefault(renamed, {}).setdefault(pattern, []).append(places[name].stored)
    for asked, sources in groups.items():
        rule = by_pattern[next(iter(sources))]
        for name, made in convert(rule, sources, asked, model, reads=False).items():
            if name in own and made.shape == own[name].shape:
                yield StoredParameter(name, sources, rule, asked)
