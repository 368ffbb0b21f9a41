"""Several mini-batches in one call on layouts of two and four ranks: every sample comes back once and in order, shards placed up front or not.

What one rank does: tests/training/test_staged.py; mergers by themselves: plugins/mergers/tests.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.contracts.kinds.optimizer_settings import AdamWSettings
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import PluginNotFoundError
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.proof.layouts import ParallelSizes
from skyrl_engine.proof.ranks import CONTEXT
from skyrl_engine.proof.rollouts import LONGEST, make_rollouts
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.testing.ranks.world import World
from skyrl_engine.testing.ranks.world_transport import group_on
from skyrl_engine.workers.launch import WorkerGroup, launch_workers
from skyrl_engine.workers.spec import WorkerSpec


def rarely(backend: str, layout: str) -> Any:
    return pytest.param(backend, layout, marks=pytest.mark.nightly)


PAIRS = [
    ("fsdp", "dp2"), ("megatron", "pp2"), ("megatron", "cp2"), ("deepspeed", "dp2"), rarely("fsdp", "tp2"), rarely("megatron", "tp2"),
]  # fmt: skip
QUADS = [
    ("megatron", "tp2xpp2"),
    rarely("fsdp", "tp2xdp2"),
    rarely("deepspeed", "dp4"),
    rarely("megatron", "tp2xdp2"),
    rarely("megatron", "pp2xdp2"),
]
BY_RAY = [("fsdp", "dp2"), rarely("megatron", "tp2xpp2")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def columns() -> SampleColumns:
    """11 samples of ids in no order, for mini-batches of 5, 5 and 1; without groups, which mini-batches would not cut."""
    rollouts = make_rollouts(())
    return SampleColumns.create(
        input_ids=rollouts.input_ids,
        token_offsets=rollouts.token_offsets,
        action_offsets=rollouts.action_offsets,
        loss_weight=rollouts.loss_weight,
    ).take(np.random.default_rng(0).permutation(16)[:11])


@pytest.mark.parametrize(("backend", "layout"), PAIRS)
def test_every_sample_once_and_in_order(
    pair: World, model: Path, columns: SampleColumns, tmp_path: Path, backend: str, layout: str
) -> None:
    check(backend, layout, model, columns, tmp_path, lambda spec: group_on(pair, spec))


@pytest.mark.proof
@pytest.mark.parametrize(("backend", "layout"), QUADS)
def test_every_sample_once_and_in_order_on_four_ranks(
    quad: World, model: Path, columns: SampleColumns, tmp_path: Path, backend: str, layout: str
) -> None:
    check(backend, layout, model, columns, tmp_path, lambda spec: group_on(quad, spec))


@pytest.mark.proof
@pytest.mark.parametrize(("backend", "layout"), BY_RAY)
def test_every_sample_once_and_in_order_by_ray(
    model: Path, columns: SampleColumns, tmp_path: Path, backend: str, layout: str
) -> None:
    """Shards are placed in Ray's object store."""
    check(backend, layout, model, columns, tmp_path, lambda spec: launch_workers(spec, launch="ray"))


def check(
    backend: str, layout: str, model: Path, columns: SampleColumns, directory: Path, start: Callable[[WorkerSpec], WorkerGroup]
) -> None:
    """Staged and unstaged from one state, bit for bit alike; log-probabilities of the first mini-batch are those before any step."""
    sizes = ParallelSizes.parse(layout)
    tables = {"backend": {"use": backend, **sizes.options}, "collator": {"use": "packed"}}
    try:
        plugins = resolve(from_dict(tables, "test"), need=()).plugins
    except PluginNotFoundError as error:
        pytest.skip(f"NOT PROVED HERE: {error.cause}")
    locks = {place: selected.to_lock_entry() for place, selected in plugins.items()}
    spec = WorkerSpec(
        locks, CONTEXT, ModelConfig(str(model)), AdamWSettings(learning_rate=1e-3), sizes.topology, "cpu", rows="packed"
    )
    results: list[Any] = []
    with start(spec) as group:
        assembly = Assembly.of(plugins, CONTEXT, sizes.ranks)
        cut = assembly.layout(micro_batch_tokens=2 * LONGEST)
        engine = Engine(
            assembly,
            group,
            layout=cut,
            optimizer=OptimizerConfig(learning_rate=1e-3),
            total_steps=None,
            files=ModelFiles.of(ModelConfig(str(model))),
            registry=Registry.discover(),
            generator=None,
        )
        plan = engine.plan(columns, mini_batch_size=5)
        before = engine.evaluate(plan).result().output
        engine.save(directory)
        for staged in (True, False):
            results.append(engine.train(plan, staged=staged))
            engine.load(directory)
    for result in results:
        assert result.output.sample_ids.tolist() == columns.sample_ids.tolist()
        assert result.metrics["samples"].result == len(columns)
        for row in range(5):
            np.testing.assert_allclose(result.output.fields["logprobs"][row], before.fields["logprobs"][row], atol=1e-5)
        later = [
            np.abs(result.output.fields["logprobs"][row] - before.fields["logprobs"][row]).max(initial=0) for row in range(5, 11)
        ]
        assert max(later) > 1e-4, "no step was taken between mini-batches"
    assert results[0].output.to_list() == results[1].output.to_list()
    assert results[0].metrics == results[1].metrics
