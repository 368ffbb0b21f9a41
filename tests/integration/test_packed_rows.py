"""Packed rows from the collator to the gradient: the same as one sample at a time, however rows are filled, aligned and dealt out.

The shards of several ranks run one after the other on one rank, whose gradient is their sum; two ranks at once are the backend's own test.
float32 rounding: <= 1e-5 relative per parameter. The definition is the padded collator with one sample per micro-batch, which
test_cut_invariance.py compares with transformers itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from by_day import now

from skyrl_engine.contracts.kinds.collator import Collator
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.testing.subject import part_of
from skyrl_engine.workers.dispatch import batch_structure, cut, token_weights
from skyrl_engine.workers.messages import GatherGradients
from skyrl_engine.workers.spec import WorkerSpec
from skyrl_engine.workers.worker import Pass, Worker
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.padded.collator import PaddedCollator
from skyrl_engine_reducers.plugin import MeanConfig, token_mean

REDUCER = token_mean.skyrl_engine_make_reducer(MeanConfig())
SpecFactory = Callable[..., WorkerSpec]


@contextmanager
def worker_with(spec: WorkerSpec, collator: Collator) -> Iterator[Worker]:
    worker = Worker(evolve(spec, rows="packed"), 0)
    worker._collator = part_of(collator, "the collator", "collator")
    try:
        yield worker
    finally:
        worker.close()


def losses_and_gradients(
    spec: WorkerSpec, collator: Collator, columns: SampleColumns, layout: Layout
) -> tuple[float, float, dict[str, np.ndarray]]:
    """Evaluation loss, training loss, and the gradient of one mini-batch."""
    (mini_batch,) = collator.plan(columns.lengths, layout).mini_batches
    weights = token_weights(part_of(REDUCER, "token_mean", "reducer"), batch_structure(columns, mini_batch, None))
    shards = list(cut(columns, mini_batch, weights, ()))
    with worker_with(spec, collator) as worker:
        evaluation, training = (
            sum(worker.run(work, shard).output.metrics["loss"].value for shard in shards)
            for work in (Pass("evaluate", step=1), Pass("forward_backward", step=1))
        )
        return evaluation, training, GatherGradients().answer(worker)


@pytest.mark.parametrize("family", now(["qwen3", "llama"], "qwen3"))
@pytest.mark.parametrize("policy", now(["ffd", "balanced", "concat"], "concat"))
def test_packed_rows_train_like_single_samples(
    family: str, policy: str, models: dict[str, Path], columns: SampleColumns, worker_spec: SpecFactory
) -> None:
    spec = worker_spec(models[family], 1)
    _, loss, expected = losses_and_gradients(spec, PaddedCollator(), columns, Layout(micro_batch_rows=1))
    packed = PackedCollator(policy=policy)
    for layout in [
        Layout(),  # everything in one row
        Layout(micro_batch_tokens=48),
        Layout(micro_batch_tokens=64, tp=4),  # alignment gaps
        Layout(micro_batch_tokens=64, tp=4, dp=2),
        Layout(micro_batch_tokens=1000, dp=4),
    ]:
        evaluated, trained, gradients = losses_and_gradients(spec, packed, columns, layout)
        assert evaluated == pytest.approx(loss, rel=1e-5), layout
        assert trained == pytest.approx(loss, rel=1e-5), layout
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert np.linalg.norm(gradient - expected[name]) <= 1e-5 * np.linalg.norm(expected[name]), (layout, name)


def test_empty_rows_take_part(models: dict[str, Path], columns: SampleColumns, worker_spec: SpecFactory) -> None:
    """Two samples for four ranks."""
    few, spec = columns.take(np.array([1, 3])), worker_spec(models["qwen3"], 1)
    _, loss, expected = losses_and_gradients(spec, PaddedCollator(), few, Layout())
    evaluated, trained, gradients = losses_and_gradients(spec, PackedCollator(), few, Layout(dp=4, tp=2))
    assert evaluated == pytest.approx(loss, rel=1e-5)
    assert trained == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        assert np.linalg.norm(gradient - expected[name]) <= 1e-5 * np.linalg.norm(expected[name]), name
