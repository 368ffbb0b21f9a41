"""Several mini-batches in one call: shards placed up front or one after the other, the same steps, one merge."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from skyrl_engine.engine.step import StepDriver, StepResult

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts.kinds.backend import AdamWSettings, ModelSpec
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.errors import ModelError
from skyrl_engine.proof.model import write_model
from skyrl_engine.proof.ranks import CONTEXT
from skyrl_engine.proof.rollouts import LONGEST, recorded_rollouts
from skyrl_engine.workers.launch import WorkerGroup, launch_workers
from skyrl_engine.workers.spec import WorkerSpec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture
def drive(model: Path) -> Iterator[Any]:
    """`drive(mini_batch_size)`: a fresh group of one rank, AdamW, micro-batches of two rows, and what was put when."""
    groups = []

    def make(mini_batch_size: int | None) -> tuple[StepDriver, list[str]]:
        plugins = resolve(from_dict({}, "test"), need=()).plugins
        locks = {place: selected.lock() for place, selected in plugins.items()}
        spec = WorkerSpec(locks, CONTEXT, ModelSpec(str(model)), AdamWSettings(learning_rate=1e-3), _topology(plugins), "cpu")
        group = launch_workers(spec, launch="inline")
        groups.append(group)
        order: list[str] = []
        driver = StepDriver(
            group=_Recorded(group, order),
            collator=plugins["collator"].make(CONTEXT),
            reducer=plugins["reducer"].make(CONTEXT),
            merger=plugins["merger"].make(CONTEXT),
            labels={place: str(selected.loaded.record) for place, selected in plugins.items()},
            layout=Layout(micro_batch_rows=2, mini_batch_size=mini_batch_size),
            max_sequence_length=LONGEST,
            needs=(),
        )
        return driver, order

    yield make
    for group in groups:
        group.close()


def _topology(plugins: Any) -> Any:
    backend = plugins["backend"]
    return backend.loaded.describe_backend(backend.options, 1).topology


class _Recorded(WorkerGroup):
    """The real group, and a note of when shards are put and steps taken."""

    def __init__(self, group: WorkerGroup, order: list[str]) -> None:
        super().__init__(group._transport, group.topology)
        self._order = order

    def put(self, *arguments: Any) -> Any:
        self._order.append("put")
        return super().put(*arguments)

    def optim_step(self) -> Any:
        self._order.append("step")
        return super().optim_step()


@pytest.fixture(scope="module")
def columns() -> SampleColumns:
    """Without groups, which mini-batches would not cut; 11 of the rollouts, so that the last mini-batch is smaller."""
    rollouts = recorded_rollouts(())
    return SampleColumns.create(
        input_ids=rollouts.input_ids,
        token_offsets=rollouts.token_offsets,
        action_offsets=rollouts.action_offsets,
        loss_weight=rollouts.loss_weight,
    ).take(np.arange(11))


def test_both_ways_take_the_same_steps_and_return_every_sample_once(drive: Any, columns: SampleColumns) -> None:
    results: dict[bool, StepResult] = {}
    for staged in (True, False):
        driver, order = drive(5)
        results[staged] = driver.train(columns, step=1, staged=staged)
        expected = ["put"] * 3 + ["step"] * 3 if staged else ["put", "step"] * 3
        assert order == expected
    for result in results.values():
        assert result.output.sample_ids.tolist() == list(range(11))
        assert result.metrics["samples"].result == 11
    assert results[True].metrics == results[False].metrics
    assert results[True].output.to_list() == results[False].output.to_list()


def test_several_mini_batches_are_several_calls_in_one(drive: Any, columns: SampleColumns) -> None:
    """Sums become the mean over mini-batches; the steps are those of one call per mini-batch."""
    driver, _ = drive(5)
    together = driver.train(columns, step=1)
    driver, _ = drive(None)
    parts = [
        driver.train(columns.take(range(*bounds)), step=step) for step, bounds in enumerate([(0, 5), (5, 10), (10, 11)], start=1)
    ]
    losses = [part.metrics["loss"].result for part in parts]
    assert together.metrics["loss"].result == pytest.approx(np.mean(losses), rel=1e-6)
    assert together.metrics["grad_norm"].result == pytest.approx(
        np.mean([part.metrics["grad_norm"].result for part in parts]), rel=1e-6
    )
    got = np.concatenate([part.output.fields["token_loss"].values for part in parts])
    np.testing.assert_array_equal(together.output.fields["token_loss"].values, got)


def test_evaluation_knows_no_mini_batches(drive: Any, columns: SampleColumns) -> None:
    cut, whole = (drive(size)[0].evaluate(columns, step=1) for size in (5, None))
    assert cut.metrics["loss"] == whole.metrics["loss"]


def test_a_mini_batch_that_is_not_finite_stops_before_its_step(drive: Any, columns: SampleColumns) -> None:
    driver, order = drive(5)

    class Infinite:
        empty_sequence = "count"
        batch_local = False

        def weights(self, structure: Any) -> Any:
            return np.full(len(structure.loss_weight), 1e300 if 5 in structure.sample_ids else 1e-3)

    with pytest.raises(ModelError, match="the loss of optimizer step 2 is not finite"):
        attrs.evolve(driver, reducer=Infinite()).train(columns, step=1)
    assert order == ["put", "step", "put"]
