"""Several mini-batches in one call: shards placed up front or one after the other, the same steps, one merge."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.engine.results import PassResult
from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.proof.ranks import CONTEXT
from skyrl_engine.proof.rollouts import make_rollouts
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.testing.subject import part_of
from skyrl_engine.workers.launch import WorkerGroup, launch_workers
from skyrl_engine.workers.messages import StepOptimizer

OPTIMIZER = OptimizerConfig(learning_rate=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture
def drive(model: Path) -> Iterator[Any]:
    """`drive()`: a fresh engine on one rank, AdamW, micro-batches of two rows, and what was put when."""
    groups = []

    def make(**settings: Any) -> tuple[Engine, list[str]]:
        plugins = resolve(from_dict({"collator": {"use": "padded"}}, "test"), need=()).plugins
        assembly = Assembly.of(plugins, CONTEXT, 1)
        spec = assembly.worker_spec(ModelConfig(str(model)), OPTIMIZER.settings(), device="cpu")
        group = launch_workers(spec, launch="inline")
        groups.append(group)
        order: list[str] = []
        engine = Engine(
            attrs.evolve(assembly, **settings),
            _Recorded(group, order),
            layout=assembly.layout(micro_batch_rows=2),
            optimizer=OPTIMIZER,
            total_steps=None,
            files=ModelFiles.of(ModelConfig(str(model))),
            registry=Registry.discover(),
            generator=None,
        )
        return engine, order

    yield make
    for group in groups:
        group.close()


class _Recorded(WorkerGroup):
    """The real group, and a note of when shards are put and steps taken."""

    def __init__(self, group: WorkerGroup, order: list[str]) -> None:
        super().__init__(group._transport, group.topology)
        self._order = order

    def put(self, *arguments: Any) -> Any:
        self._order.append("put")
        return super().put(*arguments)

    def send(self, message: Any) -> Any:
        if isinstance(message, StepOptimizer):
            self._order.append("step")
        return super().send(message)


@pytest.fixture(scope="module")
def columns() -> SampleColumns:
    """Without groups, which mini-batches would not cut; 11 of the rollouts, so that the last mini-batch is smaller."""
    rollouts = make_rollouts(())
    return SampleColumns.create(
        input_ids=rollouts.input_ids,
        token_offsets=rollouts.token_offsets,
        action_offsets=rollouts.action_offsets,
        loss_weight=rollouts.loss_weight,
    ).take(np.arange(11))


def test_both_ways_take_the_same_steps_and_return_every_sample_once(drive: Any, columns: SampleColumns) -> None:
    results: dict[bool, PassResult] = {}
    for staged in (True, False):
        engine, order = drive()
        results[staged] = engine.train(engine.plan(columns, mini_batch_size=5), staged=staged)
        expected = ["put"] * 3 + ["step"] * 3 if staged else ["put", "step"] * 3
        assert order == expected
    for result in results.values():
        assert result.output.sample_ids.tolist() == list(range(11))
        assert result.metrics["samples"].result == 11
    assert results[True].metrics == results[False].metrics
    assert results[True].output.to_list() == results[False].output.to_list()


def test_several_mini_batches_are_several_calls_in_one(drive: Any, columns: SampleColumns) -> None:
    """Sums become the mean over mini-batches; the steps are those of one call per mini-batch."""
    engine, _ = drive()
    together = engine.train(engine.plan(columns, mini_batch_size=5))
    engine, _ = drive()
    parts = [engine.train(engine.plan(columns.take(range(*bounds)))) for bounds in ((0, 5), (5, 10), (10, 11))]
    losses = [part.metrics["loss"].result for part in parts]
    assert together.metrics["loss"].result == pytest.approx(np.mean(losses), rel=1e-6)
    assert together.metrics["grad_norm"].result == pytest.approx(
        np.mean([part.metrics["grad_norm"].result for part in parts]), rel=1e-6
    )
    got = np.concatenate([part.output.fields["token_loss"].values for part in parts])
    np.testing.assert_array_equal(together.output.fields["token_loss"].values, got)


def test_an_evaluation_over_mini_batches_is_one_mean(drive: Any, columns: SampleColumns) -> None:
    engine, _ = drive()
    cut, whole = (engine.evaluate(engine.plan(columns, mini_batch_size=size)).result() for size in (5, None))
    assert cut.metrics["loss"].result == pytest.approx(whole.metrics["loss"].result, rel=1e-6)
    assert cut.output.sample_ids.tolist() == whole.output.sample_ids.tolist()


def test_a_mini_batch_that_is_not_finite_stops_before_its_step(drive: Any, columns: SampleColumns) -> None:
    class Infinite:
        empty_sequence = "count"
        batch_local = False

        def weights(self, structure: Any) -> Any:
            return np.full(len(structure.loss_weight), 1e300 if 5 in structure.sample_ids else 1e-3)

    engine, order = drive(reducer=part_of(Infinite(), "reducer 'infinite'", "reducer"))
    with pytest.raises(ModelError, match="the loss of optimizer step 2 is not finite"):
        engine.train(engine.plan(columns, mini_batch_size=5))
    assert order == ["put", "step", "put"]
