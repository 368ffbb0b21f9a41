"""Cut a training batch into mini-batches, one optimizer step each."""

import numpy as np

from skyrl_engine import DataError
from skyrl_engine.contracts import Bundles, IntArray, SampleLengths, inseparable


def mini_batches(lengths: SampleLengths, size: int | None) -> list[IntArray]:
    """Return the samples (int64, ascending) of each mini-batch: at most `size`, in the given order, with whole groups and units.

    Raises DataError if a group has more samples than a mini-batch holds.
    """
    if not len(lengths):
        return []
    everything = np.arange(len(lengths), dtype=np.int64)
    if size is None or size >= len(lengths):
        return [everything]
    bundles = Bundles.by_label(everything, inseparable(lengths.group_ids, lengths.unit_ids))
    sizes = bundles.sizes
    if sizes.max() > size:
        sample = int(bundles.members[int(np.argmax(sizes))][0])
        raise DataError(
            f"the group of sample {int(lengths.sample_ids[sample])} (group {int(lengths.group_ids[sample])}) has {int(sizes.max())} "
            f"samples where a mini-batch holds {size}, and mini-batches never cut a group",
            remedy=f"Raise the mini-batch size to at least {int(sizes.max())} samples",
        )
    cuts = [0]
    filled = 0
    for bundle, count in enumerate(sizes.tolist()):
        if filled + count > size:
            cuts.append(bundle)
            filled = 0
        filled += count
    return bundles.runs(cuts)
