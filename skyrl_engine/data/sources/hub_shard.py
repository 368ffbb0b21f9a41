"""A shard of a Hugging Face dataset that is streamed."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl_engine.data.sources.files import DatasetPart, Scan, ShardCursor, ShardRow, without_nulls
from skyrl_engine.errors import DataError


@frozen(eq=False)
class HubShard(DatasetPart):
    """A shard of a Hugging Face dataset that is streamed; `dataset` is an `IterableDataset` of one shard, and `identity` names it."""

    name: str
    dataset: Any
    identity: str
    folder: Path | None = None
    size: int | None = None

    def scan(self) -> Scan:
        raise AssertionError("nobody counts the rows of a stream")

    def read(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return ((where, values) for _, _, where, values in self._rows(0))

    def at(self, index: int) -> tuple[str, Mapping[str, Any]]:
        return next((where, values) for _, _, where, values in self._rows(index))

    def read_from(self, cursor: ShardCursor) -> Iterator[ShardRow]:
        return self._rows(cursor.row)

    def _rows(self, start: int) -> Iterator[tuple[ShardCursor, ShardCursor, str, Mapping[str, Any]]]:
        try:
            for number, values in enumerate(self.dataset.skip(start), start=start):
                yield ShardCursor(number), ShardCursor(number + 1), f"{self.name} row {number}", without_nulls(values)
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{self.name} cannot be read: {(str(error).strip().splitlines() or [type(error).__name__])[0]}",
                remedy="Check the network, and resume",
            ) from error
