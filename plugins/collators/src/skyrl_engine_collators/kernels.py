"""The kernels that write rows: the compiled ones if they are installed, NumPy otherwise. Both give the same bytes.

The environment variable SKYRL_ENGINE_KERNELS forces one: `native` or `numpy`.
"""

import logging
import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Literal, Protocol, cast

import numpy as np

from skyrl_engine import DataError, UnsupportedError
from skyrl_engine.contracts import AnyArray, IntArray, MicroBatchPlan, Ragged, SampleColumns

VARIABLE = "SKYRL_ENGINE_KERNELS"
INTERFACE = 4
"""The interface of the compiled module that this Python code was written for."""

Source = AnyArray | Literal["ones", "counted"]
logger = logging.getLogger(__name__)


class CompiledModule(Protocol):
    """The functions of `_kernels`, which native/*.c describe. They raise TypeError or ValueError before anything is written."""

    INTERFACE: int

    def write_rows(
        self, fields: tuple[tuple[AnyArray, int, Source], ...], starts: IntArray, lengths: IntArray, places: IntArray, /
    ) -> None: ...

    def write_gather(
        self,
        actions: IntArray,
        rows: IntArray,
        columns: IntArray,
        sample_rows: IntArray,
        action_counts: IntArray,
        scored: IntArray,
        first_columns: IntArray,
        /,
    ) -> None: ...

    def count_scored(self, samples: IntArray, token_offsets: IntArray, action_offsets: IntArray, /) -> int: ...

    def write_padded(
        self,
        out: IntArray,
        contents: str,
        index: IntArray,
        lengths: IntArray,
        input_ids: AnyArray,
        token_offsets: IntArray,
        action_offsets: IntArray,
        samples: IntArray,
        row_offsets: IntArray,
        shapes: tuple[tuple[int, int, int], ...],
        pad: int,
        /,
    ) -> tuple[int, ...]: ...

    def balance(self, costs: IntArray, ranks: int, most: int, chosen: IntArray, /) -> None: ...

    def first_fit(self, sizes: IntArray, capacity: int, items: IntArray, offsets: IntArray, /) -> int: ...

    def measure_lists(self, rows: list[Any], lengths: IntArray, /) -> bool: ...

    def read_lists(self, rows: list[Any], lengths: IntArray, out: AnyArray, /) -> bool: ...


class Kernels:
    """The compiled functions, which raise the engine's errors."""

    def __init__(self, module: CompiledModule) -> None:
        self._module = module

    def write_rows(
        self, fields: Sequence[tuple[AnyArray, int, Source]], *, starts: IntArray, lengths: IntArray, places: IntArray
    ) -> None:
        """`out.flat[places[i] : places[i] + lengths[i]] = source[starts[i] : starts[i] + lengths[i]]` for all n pieces, and `fill`
        elsewhere, for every field (out, fill, source) in one pass.

        Outputs are int64 or float32, C-contiguous, all with equally many elements. A source is an array (int32 or int64 for int64, uint8
        or float32 for float32), "ones", or "counted": 0, 1, ... in every piece. `starts`, `lengths`, `places` int64[n]; places ascend,
        pieces do not overlap. Raises DataError where a piece or an array does not fit; then nothing was written.
        """
        try:
            self._module.write_rows(tuple(fields), starts, lengths, places)
        except (TypeError, ValueError) as problem:
            raise _kernel_error(problem) from problem

    def write_gather(
        self,
        out: tuple[IntArray, IntArray, IntArray],
        *,
        sample_rows: IntArray,
        actions: IntArray,
        scored: IntArray,
        first_columns: IntArray,
    ) -> None:
        """The gather index into `out` (actions, rows, columns: int64, one entry per scored token).

        Sample i of n has `actions[i]` response tokens; the last `scored[i]` of them are predicted in row `sample_rows[i]`, from
        column `first_columns[i]` on. int64[n] each. Raises DataError where they do not fit; then nothing was written.
        """
        try:
            self._module.write_gather(*out, sample_rows, actions, scored, first_columns)
        except (TypeError, ValueError) as problem:
            raise _kernel_error(problem) from problem

    def write_padded(
        self, columns: SampleColumns, micro_batches: Sequence[MicroBatchPlan], contents: str, pad_token_id: int
    ) -> tuple[IntArray, IntArray, IntArray, tuple[int, ...]]:
        """Padded rows of several micro-batches, in one call.

        Returns the token fields int64, [len(contents), R, W] of each micro-batch, one after the other; the gather indices int64[3, n];
        the samples' lengths int64; and how many entries of the gather indices each micro-batch has. Letters of `contents` stand for
        `input_ids` (t), `attention_mask` (m) and `position_ids` (p). Raises DataError where the samples do not fit into the rows.
        """
        offsets = (columns.token_offsets, columns.action_offsets)
        shapes = tuple(
            [(len(micro_batch.row_offsets) - 1, micro_batch.width, micro_batch.action_width) for micro_batch in micro_batches]
        )
        if len(micro_batches) == 1:
            samples, row_offsets = micro_batches[0].samples, micro_batches[0].row_offsets
        else:
            samples = np.concatenate([micro_batch.samples for micro_batch in micro_batches])
            row_offsets = np.concatenate([micro_batch.row_offsets for micro_batch in micro_batches])
        try:
            out = np.empty(len(contents) * sum([rows * width for rows, width, _ in shapes]), dtype=np.int64)
            index = np.empty((3, self._module.count_scored(samples, *offsets)), dtype=np.int64)
            lengths = np.empty(len(samples), dtype=np.int64)
            scored = self._module.write_padded(
                out, contents, index, lengths, columns.input_ids, *offsets, samples, row_offsets, shapes, pad_token_id
            )
        except (TypeError, ValueError) as problem:
            raise _kernel_error(problem) from problem
        return out, index, lengths, scored

    def balance(self, costs: IntArray, ranks: int, most: int) -> IntArray:
        """The rank of each item, int64[n]: in the given order, each to the rank with the least so far that has fewer than `most` items."""
        chosen = np.empty(len(costs), dtype=np.int64)
        try:
            self._module.balance(costs, ranks, most, chosen)
        except (TypeError, ValueError) as problem:
            raise _kernel_error(problem) from problem
        return chosen

    def first_fit(self, sizes: IntArray, capacity: int) -> Ragged:
        """Bins of items as `packed.first_fit` makes them. Raises DataError for a size that is not between 1 and `capacity`."""
        items, offsets = np.empty(len(sizes), dtype=np.int64), np.empty(len(sizes) + 1, dtype=np.int64)
        try:
            bins = self._module.first_fit(sizes, capacity, items, offsets)
        except (TypeError, ValueError) as problem:
            raise _kernel_error(problem) from problem
        return Ragged(items, offsets[: bins + 1])

    def read_lists(self, rows: list[Any], dtype: type[np.generic]) -> tuple[AnyArray, IntArray] | None:
        """Read lists as the `ListReader` of `contracts.ingest`; only values of exactly the types int, bool and float."""
        lengths = np.empty(len(rows), dtype=np.int64)
        if not self._module.measure_lists(rows, lengths):
            return None
        values = np.empty(int(lengths.sum()), dtype=dtype)
        return (values, lengths) if self._module.read_lists(rows, lengths, values) else None


def _kernel_error(problem: Exception) -> DataError:
    return DataError(
        f"the compiled kernel refuses this batch, nothing was written: {problem}",
        remedy="Make the columns with SampleColumns.create",
    )


def kernels() -> Kernels | None:
    """Return the compiled kernels, or None if NumPy does the work. Raises UnsupportedError for a setting that cannot be followed."""
    return _kernels_for(os.environ.get(VARIABLE, ""))


@cache
def _kernels_for(setting: str) -> Kernels | None:
    if setting not in ("", "native", "numpy"):
        raise UnsupportedError(f"{VARIABLE} is {setting!r}", remedy=f"Set {VARIABLE} to native or numpy, or unset it")
    if setting == "numpy":
        return None
    try:
        return Kernels(load())
    except ImportError as problem:
        if setting == "native":
            raise UnsupportedError(
                f"{VARIABLE}=native, but skyrl-engine-collators has no usable compiled kernels ({problem})",
                remedy="Reinstall skyrl-engine-collators where there is a C compiler, or unset the variable",
            ) from problem
        logger.warning(
            "collators run on NumPy, with the same results but slower: skyrl-engine-collators has no usable compiled kernels (%s); install its "
            "wheel for this platform, or where there is a C compiler",
            problem,
        )
        return None


def load() -> CompiledModule:
    """Return the compiled module. Raises ImportError if it is absent or has another interface."""
    module = cast("CompiledModule", import_module("skyrl_engine_collators._kernels"))
    if module.INTERFACE != INTERFACE:
        raise ImportError(f"they have interface {module.INTERFACE}, this version needs {INTERFACE}")
    return module


def read_lists(rows: list[Any], dtype: type[np.generic]) -> tuple[AnyArray, IntArray] | None:
    """Read lists for `SampleColumns.from_lists` and `from_rollouts` with the compiled kernels; return None if NumPy does the work."""
    compiled = kernels()
    return None if compiled is None else compiled.read_lists(rows, dtype)
