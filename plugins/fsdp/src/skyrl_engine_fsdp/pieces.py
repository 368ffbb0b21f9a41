"""The list of a checkpoint's pieces, as JSON: which file holds which part of which tensor.

torch.distributed.checkpoint keeps this list as a pickle, `.metadata`, and whoever reads a pickle runs the code that it names. Only the list
differs here: the pieces themselves are torch's, which it reads with `weights_only=True`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

LISTING: Final = "pieces.json"


class PiecesWriter(FileSystemWriter):
    """Writes tensors as torch does, and the list of their pieces as `pieces.json`."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the list, on the one rank that torch calls this on. Raises TypeError for a value that is no tensor."""
        places: dict[str, list[dict[str, Any]]] = {}
        for result in (result_of_rank for of_rank in results for result_of_rank in of_rank):
            info = result.storage_data
            place = {"file": info.relative_path, "start": info.offset, "bytes": info.length}
            places.setdefault(result.index.fqn, []).append({"offset": list(result.index.offset or ()), **place})
        listing = {name: _describe_tensor(name, entry, places[name]) for name, entry in metadata.state_dict_metadata.items()}
        with (Path(self.path) / LISTING).open("w", encoding="utf-8") as file:
            json.dump(listing, file)
            file.flush()
            os.fsync(file.fileno())


def list_written(directory: Path, rank: int) -> list[str]:
    """Return the names of the files that this rank wrote through a `PiecesWriter`: its pieces, if it has any, and the list on rank 0."""
    return [*(path.name for path in directory.glob(f"__{rank}_*")), *([LISTING] if rank == 0 else [])]


class PiecesReader(FileSystemReader):
    """Reads what `PiecesWriter` wrote."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the list in torch's form. Raises ValueError for a list that `PiecesWriter` does not write."""
        listing = json.loads((Path(self.path) / LISTING).read_text(encoding="utf-8"))
        try:
            entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
                name: _entry(description) for name, description in listing.items()
            }
            places = {index: info for name, description in listing.items() for index, info in _places(name, description)}
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{LISTING} is not as it was written ({type(error).__name__}: {error})") from error
        return Metadata(entries, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))


def _describe_tensor(name: str, entry: Any, places: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not isinstance(entry, TensorStorageMetadata):
        raise TypeError(f"{name} is no tensor")
    return {
        "dtype": str(entry.properties.dtype).removeprefix("torch."),
        "shape": list(entry.size),
        "chunks": [{"offset": list(chunk.offsets), "shape": list(chunk.sizes)} for chunk in entry.chunks],
        "places": list(places),
    }


def _entry(described: Mapping[str, Any]) -> TensorStorageMetadata:
    dtype = getattr(torch, described["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{described['dtype']!r} is no dtype")
    chunks = [ChunkStorageMetadata(_size(chunk["offset"]), _size(chunk["shape"])) for chunk in described["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _size(described["shape"]), chunks)


def _places(name: str, described: Mapping[str, Any]) -> list[tuple[MetadataIndex, _StorageInfo]]:
    boundaries = []
    for place in described["places"]:
        if Path(place["file"]).name != place["file"]:
            raise TypeError(f"{place['file']!r} is no file of the checkpoint")
        boundaries.append(
            (MetadataIndex(name, _size(place["offset"])), _StorageInfo(place["file"], int(place["start"]), int(place["bytes"])))
        )
    return boundaries


def _size(numbers: Sequence[int]) -> torch.Size:
    return torch.Size(int(number) for number in numbers)
