"""The files of a local model's weights, as transformers chooses them, and faults that show without reading the weights."""

import json
import math
from pathlib import Path
from typing import Any, Final

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.contracts.values.model import EmptyModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.json_file import read_object, refuse_pointer

_CHOICES: Final = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""transformers takes the first of these that a directory holds."""

_LONGEST_HEADER: Final = 100_000_000
"""The longest header in bytes that the safetensors library reads."""


def weight_files(model: ModelConfig) -> list[Path]:
    """Return the files that hold the weights of a model in a local directory; none for models on the hub and for those without values.

    Raises ModelError for a directory without weights, an index that is damaged or names files that are absent, a Git LFS pointer and a
    safetensors file that was cut off.
    """
    folder = Path(model.path).expanduser()
    if isinstance(model, EmptyModelConfig) or not folder.is_dir() or _has_named_weights(folder):
        return []
    first = next((name for name in _CHOICES if (folder / name).is_file()), None)
    if first is None:
        raise ModelError(
            f"the directory {model.path} holds no weights: neither model.safetensors nor its index, model.safetensors.index.json",
            remedy="Copy or download the model's weights too, or point model.path at the directory that save_pretrained wrote",
        )
    files = _list_indexed_files(folder, folder / first) if first.endswith(".json") else [folder / first]
    for file in files:
        _refuse_broken(file)
    return files


def refuse_broken_adapter(path: str) -> None:
    """Raise ModelError where the adapter in a local directory lacks its weights, or they were cut off."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return
    file = next((file for file in (folder / "adapter_model.safetensors", folder / "adapter_model.bin") if file.is_file()), None)
    if file is None:
        raise ModelError(
            f"the adapter {path} holds no adapter_model.safetensors",
            remedy="Copy or download the adapter's weights too, or point model.lora.path at the directory that PEFT wrote",
        )
    _refuse_broken(file)


def _refuse_broken(file: Path) -> None:
    refuse_pointer(file)
    if file.suffix == ".safetensors":
        safetensors_header(file)


def safetensors_header(file: Path) -> dict[str, Any]:
    """Return what a safetensors file says of its tensors, by name. Raises ModelError where the file is cut off or is no such file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise _damage_error(file, f"its {size:,} bytes do not hold the header that it announces")
        try:
            header = json.loads(stream.read(length))
            ends = (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
            expected = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise _damage_error(file, "its header cannot be read") from error
    if size != expected:
        raise _damage_error(file, f"it has {size:,} bytes, and its header announces {expected:,}")
    return dict(header)


def count_parameters(model: ModelConfig) -> int | None:
    """Count the numbers in the files of a model's weights; None where no safetensors file of it is in a local directory. Raises ModelError."""
    files = [file for file in weight_files(model) if file.suffix == ".safetensors"]
    shapes = [entry["shape"] for file in files for name, entry in safetensors_header(file).items() if name != "__metadata__"]
    return sum(math.prod(shape) for shape in shapes) or None


def holder_of(files: list[Path], tensor: str) -> Path | None:
    """Return the file among these that holds a tensor of this name; None where none says so, as pickled files do not."""
    return next((file for file in files if file.suffix == ".safetensors" and tensor in safetensors_header(file)), None)


def _has_named_weights(folder: Path) -> bool:
    """Return True where config.json names the file of the weights, which transformers then takes."""
    config = folder / "config.json"
    return config.is_file() and "transformers_weights" in read_object(config)


def _list_indexed_files(folder: Path, index: Path) -> list[Path]:
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ModelError(
            f'{index} names no files: its "weight_map" does not say which file holds which tensor',
            remedy="Copy it again from the model's source",
        )
    names = sorted(set(places.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ModelError(
            f"{index} names {len(names)} files of weights, and {len(absent)} of them are not there, {absent[0]} first",
            remedy="Copy or download the missing files into that directory",
        )
    return [folder / name for name in names]


def _damage_error(file: Path, what: str) -> ModelError:
    return ModelError(f"{file} is damaged: {what}", remedy="Copy or download it again")
