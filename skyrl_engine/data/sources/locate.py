"""Open the source of rows that a user names: a file, a folder, a saved dataset, an address of an object store or a hub id."""

import glob
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from types import MappingProxyType
from typing import Any, TypeVar

from attrs import evolve

from skyrl_engine.contracts.values.source_names import make_distinct
from skyrl_engine.data.sources.files import (
    ArrowFile,
    CsvFile,
    DataFile,
    DatasetPart,
    JsonArray,
    JsonLines,
    LoadedDataset,
    ParquetFile,
)
from skyrl_engine.data.sources.hub_shard import HubShard
from skyrl_engine.data.sources.rows import Source
from skyrl_engine.errors import DataError
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.object_store.address import hide_secrets, is_address
from skyrl_engine.object_store.place import StorePlace
from skyrl_engine.object_store.remote_file import RemoteFile

F = TypeVar("F", Path, str)

_HUB_ERRORS = (OSError, ValueError, RuntimeError, ImportError)
_SPLIT_WORDS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")


def _json_part(path: DataFile) -> DatasetPart:
    """Open a `.json` file, which is an array or lines of objects; its first character tells which."""
    with path.open("rb") as file:
        while (character := file.read(1)).isspace():
            pass
    return JsonArray(path) if character == b"[" else JsonLines(path)


_PARTS: Mapping[str, Callable[[DataFile], DatasetPart]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".jsonl.gz": JsonLines,
    ".json": _json_part,
    ".csv": CsvFile,
    ".tsv": CsvFile,
    ".parquet": ParquetFile,
    ".arrow": ArrowFile,
    ".feather": ArrowFile,
    ".ipc": ArrowFile,
}


def open_source(
    location: str | Sequence[str],
    *,
    split: str,
    subset: str | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
    names_key: str = "data.map",
    streaming: bool = False,
) -> Source:
    """Open one split of a dataset, or of several, one after the other; `names` and `names_key` are as `Source` takes them.

    `streaming` gives shards, of which nothing is read here, and nothing of which is kept on the disk.

    Raises DataError.
    """
    if isinstance(location, str):
        return evolve(_open_one(location, split=split, subset=subset, streaming=streaming), names=names, names_key=names_key)
    sources = [_open_one(place, split=split, subset=subset, streaming=streaming) for place in location]
    parts = [part for source in sources for part in source.parts]
    titles = make_distinct([_title_of(place) for place in location])
    datasets = [(title, len(source.parts)) for title, source in zip(titles, sources, strict=True)]
    return Source(", ".join(location), parts, names, names_key, datasets if len(datasets) > 1 else ())


def _title_of(location: str) -> str:
    """Return a short name for a dataset: that of its file, without its ending, of its folder, or of the hub id without its owner."""
    name = Path(location).name or location
    return name.removesuffix(_kind(Path(name)) or "") or name


def _open_one(location: str, *, split: str, subset: str | None, streaming: bool) -> Source:
    """Open one split of one dataset.

    A file is its own split, and so are the files of a pattern (`data/*.jsonl`). In a folder, files whose name or folder begins with a split's
    name (`train-00000.parquet`, `test/a.jsonl`) belong to that split; where no name does so, all files do. `subset` names a folder inside it.
    Anything that is no path is a hub id.
    Raises DataError.
    """
    if is_address(location):
        return _open_address(location, split=split, subset=subset, streaming=streaming)
    path = Path(location).expanduser()
    if path.is_file():
        if subset is not None:
            raise DataError(
                f"data.subset is {subset!r}, and the file {location} has no subsets",
                remedy="Remove data.subset, or name a folder or a hub id",
            )
        return _of_files(location, [path], streaming=streaming)
    if path.is_dir():
        return _open_folder(path, location, split=split, subset=subset, streaming=streaming)
    if path.exists():
        raise DataError(f"{location} is neither a file nor a folder", remedy="Name a data file, or a folder of them")
    if _is_pattern(location):
        if subset is not None:
            raise DataError(f"data.subset is {subset!r}, and {location} names files", remedy="Remove data.subset")
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207  # Path.glob takes no absolute patterns
        found = sorted(Path(name) for name in names if Path(name).is_file())
        if not found:
            raise DataError(
                f"no file is named like {location}", remedy="Correct the pattern: * stands for any name, ** for folders"
            )
        return _of_files(location, found, streaming=streaming)
    if "://" in location:
        raise DataError(
            f"the dataset {hide_secrets(location)} holds an address, but does not begin with its protocol",
            remedy="Name a file, a folder, a hub id or an address such as s3://bucket/rows.jsonl",
        )
    if _looks_like_path(location):
        raise DataError(f"the dataset {location} does not exist", remedy=_path_hint(path))
    if streaming:
        return Source(location, _stream_from_hub(location, split=split, subset=subset))
    return Source(location, [_load_from_hub(location, split=split, subset=subset)])


def _is_pattern(location: str) -> bool:
    return any(mark in location for mark in "*?[")


def _of_files(location: str, paths: Sequence[DataFile], *, streaming: bool) -> Source:
    parts = [_part(path) for path in paths]
    whole = next((part for part in parts if streaming and isinstance(part, JsonArray)), None)
    if whole is not None:
        raise DataError(
            f"{whole.path} holds one JSON array, which is read whole, and data.streaming is on",
            remedy="Store one object per line (.jsonl), or set data.streaming = false",
        )
    return Source(location, parts)


def _part(path: DataFile) -> DatasetPart:
    kind = _kind(path)
    if kind is None:
        raise DataError(f"{path} is not in a format that can be read", remedy=f"Use a file that ends in one of {', '.join(_PARTS)}")
    return _PARTS[kind](path)


def _kind(path: DataFile | PurePath) -> str | None:
    return next((suffix for suffix in _PARTS if path.name.lower().endswith(suffix)), None)


def _open_folder(path: Path, location: str, *, split: str, subset: str | None, streaming: bool) -> Source:
    if subset is not None:
        path = path / subset
        if not path.is_dir():
            raise DataError(f"the subset {subset!r} is no folder in {location}", remedy=_path_hint(path))
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        if streaming:
            return _of_files(location, _list_saved(path, location, split), streaming=True)
        return Source(location, [_load_saved(path, location, split)])
    if _is_model(path):
        raise DataError(
            f"{location} is the folder of a model, not of data",
            remedy="Name the model in model.path (--model), and data in its place",
        )
    files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) and not _hidden(file.relative_to(path)))
    if not files:
        raise DataError(
            f"the folder {location} holds no data file", remedy=f"Put files into it that end in one of {', '.join(_PARTS)}"
        )
    return _of_files(
        location, _choose_files({file: file.relative_to(path) for file in files}, location, split), streaming=streaming
    )


def _choose_files(names: Mapping[F, PurePath], location: str, split: str) -> list[F]:
    """Return the files of a folder that belong to a split; `names` are theirs from the folder on. Raises DataError."""
    # a table next to other data is often about it
    files = [file for file, name in names.items() if _PARTS[_kind(name) or ""] is not CsvFile] or list(names)
    splits = {file: _split_of(names[file]) for file in files}
    if not any(splits.values()):
        return files
    chosen = [file for file in files if splits[file] == split.lower()]
    if not chosen:
        found = sorted({name for name in splits.values() if name})
        raise DataError(
            f"the folder {location} has no file of the split {split!r}, only of {', '.join(found)}",
            remedy="Set data.train_split or data.eval_split to one of them",
        )
    return chosen


def _open_address(location: str, *, split: str, subset: str | None, streaming: bool) -> Source:
    """Open a file, a pattern of files or a folder of an object store. Raises DataError and StoreError."""
    place = StorePlace.of(location)
    if any(mark in location for mark in "*["):  # a question mark begins the query of an address
        if subset is not None:
            raise DataError(f"data.subset is {subset!r}, and {location} names files", remedy="Remove data.subset")
        found = sorted(path for path in place.call(partial(_glob, place), doing="list") if _kind(PurePosixPath(path)))
        if not found:
            raise DataError(
                f"no data file is named like {location}", remedy="Correct the pattern: * stands for any name, ** for folders"
            )
        files = [RemoteFile(StorePlace(place.files.unstrip_protocol(path), path, place.files)) for path in found]
        return _of_files(location, files, streaming=streaming)
    if _is_file(place):
        if subset is not None:
            raise DataError(
                f"data.subset is {subset!r}, and the file {location} has no subsets", remedy="Remove data.subset, or name a folder"
            )
        return _of_files(location, [RemoteFile(place)], streaming=streaming)
    folder = place if subset is None else place / subset
    names = {name: PurePosixPath(name) for name in folder.find()}
    if not names:
        raise DataError(
            f"there is nothing at {folder}", remedy="Correct data.train, data.eval or data.subset, and check that the file is there"
        )
    if any(name.name in ("dataset_dict.json", "state.json") for name in names.values()):
        raise DataError(
            f"{folder} is a dataset that save_to_disk wrote, which is read from this machine alone",
            remedy=f"Name its files, {location}/*.arrow, or download it",
        )
    wanted = {name: path for name, path in names.items() if _kind(path) and not _hidden(path)}
    if not wanted:
        raise DataError(
            f"the folder {location} holds no data file", remedy=f"Put files into it that end in one of {', '.join(_PARTS)}"
        )
    chosen = _choose_files(wanted, location, split)
    return _of_files(location, [RemoteFile(folder / name) for name in chosen], streaming=streaming)


def _glob(place: StorePlace) -> list[str]:
    place.files.invalidate_cache()
    return [str(path) for path in place.files.glob(place.path)]


def _is_file(place: StorePlace) -> bool:
    try:
        place.size()
    except FileNotFoundError:
        return False
    return True


def _is_model(path: Path) -> bool:
    """Return True for a folder that `save_pretrained` of a model, an adapter or a tokenizer wrote."""
    return any((path / name).is_file() for name in ("config.json", "adapter_config.json", "tokenizer_config.json")) and any(
        any(path.glob(name)) for name in ("*.safetensors", "pytorch_model*.bin", "tokenizer.json", "tokenizer.model", "vocab.json")
    )


def _hidden(relative: PurePath) -> bool:
    return any(part.startswith((".", "_")) for part in relative.parts)


def _split_of(relative: PurePath) -> str | None:
    """Return the split that a file's own name, or else one of its folders, begins with."""
    for name in reversed(relative.parts):
        word = re.match(r"[a-z]+", name.lower())
        if word and word.group() in _SPLIT_WORDS:
            return word.group()
    return None


def _load_saved(path: Path, location: str, split: str) -> LoadedDataset:
    """Load a dataset that `save_to_disk` wrote. Its digest is that of its files: a copy keeps it, and an edit changes it."""
    import datasets

    try:
        loaded: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"the saved dataset {location} cannot be loaded: {error}", remedy="Save it again with save_to_disk"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(
                f"the saved dataset {location} has no split {split!r}, only {', '.join(loaded)}",
                remedy="Set data.train_split or data.eval_split to one of them",
            )
        path, loaded = path / split, loaded[split]
    files = sorted(file for file in path.iterdir() if file.is_file())
    digest = Source(location, [ArrowFile(file) for file in files if file.suffix == ".arrow"]).digest
    state = (path / "state.json").read_text(encoding="utf-8") if (path / "state.json").is_file() else ""
    return LoadedDataset(location, loaded, digest + state, path.absolute())


def _list_saved(path: Path, location: str, split: str) -> list[Path]:
    """List the Arrow files of a split that `save_to_disk` wrote, in the order of its `state.json`."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
        if split not in splits:
            raise DataError(
                f"the saved dataset {location} has no split {split!r}, only {', '.join(splits)}",
                remedy="Set data.train_split to one of them",
            )
        path = path / split
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return [path / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the saved dataset {location} cannot be loaded: {error}", remedy="Save it again with save_to_disk"
        ) from error


def _stream_from_hub(location: str, *, split: str, subset: str | None) -> list[HubShard]:
    import datasets

    try:
        loaded: Any = datasets.load_dataset(location, subset, split=split, streaming=True)
        count = int(loaded.num_shards)
        return [
            HubShard(
                f"{location} shard {number}",
                loaded.shard(num_shards=count, index=number),
                f"{location}:{subset}:{split}:{number} of {count}",
            )
            for number in range(count)
        ]
    except _HUB_ERRORS as error:
        raise _not_on_hub(location, error) from error


def _load_from_hub(location: str, *, split: str, subset: str | None) -> LoadedDataset:
    import datasets

    try:
        loaded: Any = datasets.load_dataset(location, subset, split=split)
    except _HUB_ERRORS as error:
        raise _not_on_hub(location, error) from error
    # the fingerprint is the only name datasets gives to content, and it offers no public way to it
    return LoadedDataset(location, loaded, f"{location}:{subset}:{split}:{loaded._fingerprint}")  # noqa: SLF001


def _not_on_hub(location: str, error: BaseException) -> DataError:
    detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return DataError(
        f"the dataset {location!r} is no file or folder here and cannot be loaded from the hub",
        remedy="Check the name, data.subset, the split and the network (HF_HUB_OFFLINE forbids downloads), or use a local file",
        details=[f"{type(error).__name__}: {detail}"],
    )


def _looks_like_path(location: str) -> bool:
    """Return True for anything but a hub id, which is `name` or `owner/name` without a data suffix."""
    return location.startswith((".", "~", "/")) or location.count("/") > 1 or "\\" in location or _kind(Path(location)) is not None


def _path_hint(path: Path) -> str:
    folder = path.parent
    entries = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return did_you_mean(path.name, entries, show=lambda near: str(folder / near)) or "Correct data.train, data.eval or data.subset"
