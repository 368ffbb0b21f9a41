"""Cut a batch of rollouts into optimizer steps, and order them in later epochs."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.values.columns import SampleColumns


def mini_batch_size(group_sizes: Sequence[int], parts: int) -> int:
    """Return the fewest samples per mini-batch with which whole groups, in their order, make at most `parts` mini-batches."""
    low, high = max(group_sizes, default=1), max(1, sum(group_sizes))
    while low < high:
        middle = (low + high) // 2
        if _parts(group_sizes, middle) <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def _parts(group_sizes: Sequence[int], size: int) -> int:
    count, filled = 1, 0
    for samples in group_sizes:
        if filled + samples > size:
            count, filled = count + 1, 0
        filled += samples
    return count


def group_sizes(columns: SampleColumns) -> list[int]:
    """Return the number of samples of every group, in the order of the groups; a group's samples are together."""
    ids = columns.group_ids
    bounds = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1], [True]])) if len(ids) else np.zeros(1, dtype=np.int64)
    return [int(size) for size in np.diff(bounds)]


def shuffle_groups(columns: SampleColumns, *, seed: int, step: int, epoch: int) -> npt.NDArray[np.int64]:
    """int64[N]: the samples in another order of their groups, a function of seed, step and epoch."""
    sizes = group_sizes(columns)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, step, epoch]))).permutation(len(sizes))
    parts = [np.arange(starts[group], starts[group + 1], dtype=np.int64) for group in order]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])
