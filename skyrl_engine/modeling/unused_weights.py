"""Tensors of a model's files that the class which trains it does not use: they are copied, under their names, into whatever is exported.

A vision-language checkpoint that is trained on text keeps its vision tower so, and a model with layers that predict several tokens those.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from attrs import evolve, frozen
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from skyrl_engine.contracts.values.model import EmptyModelConfig, ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.model_facts.facts import find_file
from skyrl_engine.model_facts.json_file import read_object
from skyrl_engine.model_facts.weight_files import safetensors_header, weight_files
from skyrl_engine.modeling.loading import build_causal_lm
from skyrl_engine.modeling.unpickling import UNREADABLE, failure, load_pickled
from skyrl_engine.modeling.value_head import NAME as HEAD

logger = logging.getLogger(__name__)

_SHARD_BYTES: Final = 5_000_000_000
"""The size of a file of copied tensors, which are in memory while it is written."""

_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def source_tensors(spec: ModelConfig) -> dict[str, Path]:
    """Return the file of every tensor in a model's files, by the tensor's name in them; empty where no file is here. Raises ModelError."""
    if isinstance(spec, EmptyModelConfig):
        return {}
    folder = Path(spec.path).expanduser()
    if not folder.is_dir():
        config = None if spec.path.startswith((".", "/", "~")) else find_file(spec, "config.json")
        if config is None:
            return {}
        folder = Path(config).parent
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        return {}
    return {name: file for file in weight_files(evolve(spec, path=str(folder))) for name in _names(file)}


def find_unused_tensors(spec: ModelConfig, names: Iterable[str]) -> list[str]:
    """Return those of the names in a model's files that the class which trains it does not load, sorted. Raises ModelError."""
    return _Places.of(spec).find_unused(names)


def complete_export(directory: Path, spec: ModelConfig, names: Iterable[str]) -> list[str]:
    """Copy into an exported model what the source holds and training did not use; return the names of those tensors.

    `spec` is the source, and `names` are those of all tensors in its files. Where something is copied, the trained tensors get the names of
    the source too, and where the source's configuration is of another class, such as one that takes images, that configuration is written:
    the export is then the source with trained weights in it. Adapters without their base are left alone. Raises ModelError where the source
    is not there any more.
    """
    written = weight_files(evolve(spec, path=str(directory))) if (directory / "config.json").is_file() else []
    held = {name: file for file in written for name in safetensors_header(file) if name != "__metadata__"}
    if not held or not set(names) - held.keys():
        return []
    here = source_tensors(spec)
    # where the source is gone, what was written tells the class
    places = _Places.of(spec if here else evolve(spec, path=str(directory), revision=None))
    # a head of values is no part of that class, and it was trained, or a reward model has no bias
    unused = [name for name in places.find_unused(names) if not (spec.value_head and name.startswith(f"{HEAD}."))]
    if not unused:
        return []
    if absent := [name for name in unused if name not in here]:
        raise ModelError(
            f"{spec.path} held {len(unused)} tensors that training does not use and an export keeps, and {absent[0]} is not there any more "
            f"({len(absent)} such tensors)",
            remedy="Put the model back, or export a checkpoint with its place: skyrl-engine export RUN OUTPUT --model PATH",
        )
    if not spec.classifier:
        # a sequence classifier is another model than the source, and has names of its own
        _rename(written, _names_of_source(places, names, held))
    added = list(_copy(directory, unused, here))
    _index(directory, [*written, *added])
    if not spec.classifier:
        _restore_configuration(directory, spec)
    logger.info(
        "copied %d tensors that training does not use from %s as they are: %s", len(unused), spec.path, describe_tensors(unused)
    )
    return unused


def describe_tensors(names: Iterable[str]) -> str:
    """Count tensors by the first parts of their names: `model.visual (33), mtp (15)`."""
    counts: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        inner = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
        first = ".".join(parts[: max(1, min(2, inner))])
        counts[first] = counts.get(first, 0) + 1
    return ", ".join(f"{first} ({count})" for first, count in counts.items())


def _names(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        return [name for name in safetensors_header(file) if name != "__metadata__"]
    return [name for name, value in _read_pickled_names(file).items() if isinstance(value, Tensor)]


def _read_pickled_names(file: Path) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = load_pickled(file)
    except UNREADABLE as error:
        raise ModelError(f"{file} cannot be read: {failure(error)}", remedy="Use the model's safetensors files") from error
    return state


@frozen(eq=False)
class _Places:
    """The tensors of the class that trains a model, by name, tied ones under each, and transformers' rules from names in files to these."""

    model: Any
    tensors: Mapping[str, Any]
    rules: Sequence[Any]

    @classmethod
    def of(cls, spec: ModelConfig) -> "_Places":
        from transformers.conversion_mapping import get_model_conversion_mapping

        plain = evolve(spec, lora=None, activation_checkpointing=False)
        with torch.random.fork_rng(devices=()), torch.device("meta"):
            model = build_causal_lm(plain, load_config(plain, images=True))
        return cls(model, model.state_dict(), get_model_conversion_mapping(model))

    def of_name(self, name: str) -> str | None:
        """Return the name that `from_pretrained` gives a stored tensor in the model; None for one that it does not use."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [rule for rule in self.rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in self.rules if isinstance(rule, WeightConverter)]
        prefix = self.model.base_model_prefix
        place: str = rename_source_key(name, renamings, converters, prefix, self.tensors)[0]
        if place not in self.tensors and name in self.tensors:
            place = rename_source_key(name, [], [], prefix, self.tensors)[0]
        return place if place in self.tensors else None

    def find_unused(self, names: Iterable[str]) -> list[str]:
        return sorted(name for name in names if self.of_name(name) is None)


def _names_of_source(places: _Places, names: Iterable[str], held: Iterable[str]) -> dict[str, str]:
    """Return the source's name for every trained tensor that is written under another one: a prefix that a composite model has."""
    written: dict[str | None, list[str]] = {}
    stored: dict[str | None, list[str]] = {}
    for groups, listed_names in ((written, held), (stored, names)):
        for name in listed_names:
            groups.setdefault(places.of_name(name), []).append(name)
    written.pop(None, None)
    renamed: dict[str, str] = {}
    for place, own in written.items():
        # several: parts of a tensor, such as experts, in one order on both sides
        theirs = stored.get(place, [])
        if len(own) == len(theirs):
            renamed |= {one: other for one, other in zip(sorted(own), sorted(theirs), strict=True) if one != other}
    return renamed


def _rename(files: Iterable[Path], renamed: Mapping[str, str]) -> None:
    """Give tensors in these files other names."""
    for file in files:
        if renamed.keys().isdisjoint(_names(file)):
            continue
        with safe_open(file, framework="pt") as opened:
            tensors = {renamed.get(name, name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        save_file(tensors, file, metadata={"format": "pt"})


def _copy(directory: Path, names: Iterable[str], here: Mapping[str, Path]) -> Iterator[Path]:
    """Write the tensors of these names into new files of the directory, one file at a time in memory; yield the files."""
    batch: dict[str, Tensor] = {}
    number = 0

    def write() -> Path:
        nonlocal number
        number += 1
        file = directory / f"unused-{number}.safetensors"
        save_file(batch, file, metadata={"format": "pt"})
        batch.clear()
        return file

    size = 0
    for name in sorted(names, key=lambda name: (str(here[name]), name)):
        tensor = _read(here[name], name)
        if batch and size + tensor.nbytes > _SHARD_BYTES:
            yield write()
            size = 0
        batch[name] = tensor
        size += tensor.nbytes
    if batch:
        yield write()


def _read(file: Path, name: str) -> Tensor:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            read: Tensor = opened.get_tensor(name)
        return read
    # contiguous memory of its own: safetensors refuses tensors that share theirs
    return _read_pickled_names(file)[name].detach().clone().contiguous()  # type: ignore[no-any-return] # a tensor, by `_names`


def _index(directory: Path, files: list[Path]) -> None:
    """Number the files of weights and write the index by which transformers finds tensors in several of them."""
    placed: dict[str, str] = {}
    total = 0
    aside = [file.rename(file.with_name(f"part-{number}.safetensors")) for number, file in enumerate(files)]
    for number, file in enumerate(aside, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header = safetensors_header(file)
        placed |= dict.fromkeys((tensor_name for tensor_name in header if tensor_name != "__metadata__"), name)
        total += sum(
            entry["data_offsets"][1] - entry["data_offsets"][0]
            for tensor_name, entry in header.items()
            if tensor_name != "__metadata__"
        )
        file.rename(directory / name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _restore_configuration(directory: Path, spec: ModelConfig) -> None:
    """Write the source's configuration where the export's is that of a part of it, in the precision that was written, and its processors."""
    path = find_file(spec, "config.json")
    assert path is not None, "the source's weights were just read"
    stated, written = read_object(Path(path)), read_object(directory / "config.json")
    if stated.get("model_type") == written.get("model_type"):
        return
    precision = written.get("dtype", written.get("torch_dtype"))
    for part in (stated, *(value for value in stated.values() if isinstance(value, dict))):
        if "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = precision
    stated["dtype"] = precision
    (directory / "config.json").write_text(json.dumps(stated, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name in _PROCESSORS:
        if (file := find_file(spec, name)) is not None:
            (directory / name).write_bytes(Path(file).read_bytes())
