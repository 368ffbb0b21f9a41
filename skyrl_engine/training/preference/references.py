"""Reference scores of a whole dataset, computed once and kept on the disk under a name made of the reference and the data.

Another model, or other data, has another name, so that scores are never taken for those of something else. What was scored is written down as
it goes: a run that ends during this pass resumes after the last score that it wrote, in the same mini-batches, to the same bytes.
"""

import hashlib
import json
import time
import zlib
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.ragged import Ragged, segment_indices
from skyrl_engine.data.dataset import TokenizedDataset
from skyrl_engine.data.table.cache import TokenCache
from skyrl_engine.engine.engine import Engine
from skyrl_engine.errors import DataError, UnsupportedError
from skyrl_engine.model_facts.identity import weights_fingerprint
from skyrl_engine.run.durable import sync, write_durably
from skyrl_engine.training.reference import REFERENCE, REFERENCE_MODEL
from skyrl_engine.training.sft.order import Position, SampleOrder
from skyrl_engine.training.sft.prepare import DataProgress
from skyrl_engine.training.sft.state import fingerprint

_SECONDS_BETWEEN_WRITES: Final = 1.0
_PLACES: Final = (
    *("path", "revision", "tokenizer", "chat_template", "value_head"),
    *("activation_checkpointing", "dropout", "neftune_alpha", "freeze", "lora"),
)
"""Keys of a model's table that do not decide the scores of a frozen one, other than its weights."""


@frozen
class ReferenceScores:
    """The file of one dataset's scores: float32 per response token, 0 where there is no loss. Next to it is what proves it whole,
    or, while it is made, how far it is.
    """

    path: Path
    tokens: int

    @classmethod
    def of(cls, folder: str | None, model: ModelConfig, columns: SampleColumns) -> "ReferenceScores":
        """Name the file for this reference and this data. Raises UnsupportedError for a model that cannot be distinguished from others."""
        weights = weights_fingerprint(model)
        if weights is None or model.lora is not None:
            reason = "it has adapters, or weights in 4 bits under them" if model.lora else "its weights are not found"
            raise UnsupportedError(
                f"the scores of the reference {model.path} cannot be kept: {reason}",
                remedy="Set reference.precompute = false",
            )
        settings = {name: value for name, value in attrs.asdict(model).items() if name not in _PLACES}
        name = json.dumps([weights, settings, fingerprint(columns)], sort_keys=True, default=str)
        key = hashlib.sha256(name.encode()).hexdigest()
        return cls(TokenCache.of(folder).directory.parent / "references" / f"{key}.f32", int(columns.action_offsets[-1]))

    @property
    def _told(self) -> Path:
        return self.path.with_suffix(".json")

    def read(self) -> npt.NDArray[np.float32] | None:
        """float32[A], mapped from the disk; None where the file is not there, not whole, or damaged."""
        facts = self._facts()
        if "crc32" not in facts or not self.path.is_file() or self.path.stat().st_size != 4 * self.tokens:
            return None
        if self.tokens == 0:
            return np.zeros(0, dtype=np.float32)
        values = np.memmap(self.path, dtype=np.float32, mode="r")
        return values if zlib.crc32(values.data) == facts["crc32"] else None

    def fill(self, engine: Engine, dataset: TokenizedDataset, *, batch_size: int, progress: DataProgress | None) -> None:
        """Score the dataset with the frozen model, from where an earlier pass ended. Raises DataError where the disk refuses."""
        order = SampleOrder.of(dataset.columns, batch_size=batch_size, shuffle=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            facts = self._facts()
            whole = self.path.is_file() and self.path.stat().st_size == 4 * self.tokens
            offset = int(facts["samples"]) if whole and facts.get("batch_size") == batch_size and "samples" in facts else 0
            if not whole:
                with self.path.open("wb") as file:
                    file.truncate(4 * self.tokens)
            self._score(engine, dataset, order, Position(0, offset), progress)
        except OSError as error:
            raise DataError(
                f"the scores of the reference cannot be written to {self.path.parent}: {error.strerror or error}",
                remedy="Free space there, set data.cache to another directory, or set reference.precompute = false",
            ) from error

    def _score(
        self, engine: Engine, dataset: TokenizedDataset, order: SampleOrder, position: Position, progress: DataProgress | None
    ) -> None:
        columns, size = dataset.columns, order.batch_size
        values = np.memmap(self.path, dtype=np.float32, mode="r+")
        written = time.monotonic()
        done = position.offset
        while position.epoch == 0 and done < order.samples:
            chosen, position = order.mini_batch(position)
            output = engine.score(engine.plan(dataset.batch(chosen)), tokens="loss", model=REFERENCE_MODEL).result()
            values[segment_indices(columns.action_offsets, chosen)] = output.on_actions("logprobs").values
            done += len(chosen)
            if progress is not None:
                progress("scoring with the reference", done, order.samples)
            if time.monotonic() - written >= _SECONDS_BETWEEN_WRITES:
                values.flush()
                sync(self.path)
                write_durably(self._told, json.dumps({"samples": done, "batch_size": size}))
                written = time.monotonic()
        values.flush()
        sync(self.path)
        write_durably(self._told, json.dumps({"crc32": zlib.crc32(values.data)}))

    def _facts(self) -> dict[str, Any]:
        try:
            facts = json.loads(self._told.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}


def with_references(dataset: TokenizedDataset, values: npt.NDArray[np.float32]) -> TokenizedDataset:
    """Return the dataset with the reference's log-probabilities as a column."""
    columns = dataset.columns
    return evolve(dataset, columns=columns.with_columns({REFERENCE: Ragged(values, columns.action_offsets)}))
