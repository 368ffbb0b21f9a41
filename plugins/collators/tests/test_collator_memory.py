"""The memory that a build needs besides its outputs, counted allocation by allocation: NumPy and the kernels both report to tracemalloc."""

import tracemalloc

import numpy as np
import pytest

from skyrl_engine.contracts import Layout, SampleColumns, offsets_of
from skyrl_engine_collators import kernels
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.padded.collator import PaddedCollator


def require_compiled_module():
    try:
        return kernels.load()
    except ImportError as problem:
        pytest.skip(f"no compiled kernels ({problem}); install plugins/collators where there is a C compiler")


def columns_of(samples, longest):
    generator = np.random.default_rng(0)
    lengths = generator.integers(16, longest + 1, samples)
    actions = generator.integers(1, lengths + 1)
    total = int(actions.sum())
    return SampleColumns.create(
        input_ids=generator.integers(0, 150_000, int(lengths.sum())),
        token_offsets=offsets_of(lengths),
        action_offsets=offsets_of(actions),
        columns={name: generator.random(total, dtype=np.float32) for name in ("rewards", "rollout_logprobs")},
    )


def output_bytes(batch):
    arrays = [batch.gather.actions, batch.gather.rows, batch.gather.columns, batch.sequence_lengths.values]
    arrays += [] if batch.cu_seqlens is None else [batch.cu_seqlens.values]
    return sum(tensor.nbytes for tensor in batch.fields.values()) + sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("longest", [256, 2048])
@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator(max_tokens_per_microbatch=8192)], ids=["padded", "packed"])
def test_compiled_builds_need_less_than_a_tenth_of_their_outputs_beside_them(monkeypatch, collator, longest):
    require_compiled_module()
    monkeypatch.setenv(kernels.VARIABLE, "native")
    columns = columns_of(1024, longest)
    rows = collator.plan(columns.lengths, Layout(dp=8)).joined
    size = output_bytes(collator.build(columns, rows))
    tracemalloc.start()
    try:
        batch = collator.build(columns, rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size <= peak < size * 1.1, f"{peak} bytes in all for {size}, so not every allocation is counted, or too many are made"
    assert output_bytes(batch) == size


def test_packing_needs_little_memory():
    """Scratch memory of first fit: sizes, two orders and the bin of each item, and a tree over the bins: below 60 bytes for each of n items."""
    compiled = kernels.Kernels(require_compiled_module())
    sizes = np.random.default_rng(0).integers(16, 257, 100_000)
    tracemalloc.start()
    try:
        compiled.first_fit(sizes, 8192)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 60 * len(sizes)
