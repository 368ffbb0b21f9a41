"""A gradient that `discard` drops leaves no trace: the next steps are, bit for bit, those of an engine that never had it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_engine import Engine
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import LoraConfig

GOOD = SampleColumns.from_lists(input_ids=[[5, 6, 7, 8], [5, 9, 10]], num_actions=[2, 2])
BAD = SampleColumns.from_lists(input_ids=[[40, 41, 42, 43, 44]], num_actions=[4])
BACKENDS: list[tuple[str, dict[str, Any]]] = [
    ("fsdp", {}),
    ("deepspeed", {"zero_stage": 1}),
    ("deepspeed", {"zero_stage": 3}),
    ("megatron", {}),
]


def step(engine: Engine) -> tuple[float, dict[str, Any]]:
    engine.forward_backward(engine.plan(GOOD)).result()
    return engine.optim_step().result().grad_norm, engine.weights()


def drop(engine: Engine) -> None:
    for _ in range(2):
        engine.forward_backward(engine.plan(BAD)).result()
        engine.discard()
    # nothing is there to be dropped
    engine.discard()


def require_equal(found: list[tuple[float, dict[str, Any]]], due: list[tuple[float, dict[str, Any]]]) -> None:
    for (norm, weights), (wanted, expected) in zip(found, due, strict=True):
        assert norm == wanted
        assert all(np.array_equal(weights[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(("backend", "options"), BACKENDS)
def test_steps_after_a_dropped_gradient(model: Path, backend: str, options: dict[str, Any]) -> None:
    tables = {"model": {"path": str(model)}, "optimizer": {"learning_rate": 1e-2}, "backend": {"use": backend, **options}}
    with Engine.open(tables) as engine:
        expected = [step(engine), step(engine)]
    with Engine.open(tables) as engine:
        found = []
        for _ in expected:
            drop(engine)
            assert not any(gradient.any() for gradient in engine.gradients().values())
            found.append(step(engine))
        assert engine.step == 2
    require_equal(found, expected)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_set_of_adapters_drops_its_own_gradient(model: Path, backend: str) -> None:
    """The gradient of the base's own adapters and that of another set are accumulated while the third drops its own."""
    tables = {"model": {"path": str(model), "lora": {"rank": 2}}, "optimizer": {"learning_rate": 1e-2}, "backend": {"use": backend}}
    kinds = [LoraConfig(rank=2), LoraConfig(rank=4)]
    with Engine.open(tables) as base:
        expected = [
            [step(adapter_set), step(adapter_set)] for adapter_set in (base, *(base.add_adapters(lora, seed=3) for lora in kinds))
        ]
    with Engine.open(tables) as base:
        one, other = (base.add_adapters(lora, seed=3) for lora in kinds)
        found: dict[Engine, list[Any]] = {adapter_set: [] for adapter_set in (base, one, other)}
        for _ in range(2):
            for adapter_set in (base, one):
                adapter_set.forward_backward(adapter_set.plan(GOOD)).result()
            drop(other)
            for adapter_set in (base, one):
                found[adapter_set].append((adapter_set.optim_step().result().grad_norm, adapter_set.weights()))
            found[other].append(step(other))
    for got, wanted in zip(found.values(), expected, strict=True):
        require_equal(got, wanted)
