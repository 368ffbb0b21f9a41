"""A closed backend leaves nothing running: each process group of gloo has threads that wake a hundred times a second."""

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.testing.ranks.world import World
from skyrl_engine.testing.ranks.world_transport import group_on
from skyrl_engine.workers.spec import WorkerSpec

LAYOUTS = {
    "fsdp": ({"replicate": 2}, Topology(dp=2)),
    "deepspeed": ({}, Topology(dp=2)),
    "megatron": ({"tensor_parallel": 2}, Topology(tp=2)),
}


def threads_of_groups() -> int:
    names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux' /proc")
@pytest.mark.parametrize("backend", LAYOUTS)
def test_models_opened_one_after_another_leave_no_more_threads_than_the_first(
    backend: str, pair: World, models: dict[str, Path], worker_spec: Callable[..., WorkerSpec]
) -> None:
    options, topology = LAYOUTS[backend]
    chosen = resolve(
        from_dict({"model": {"path": "unused"}, "data": {"train": "unused"}, "backend": {"use": backend, **options}}, "test")
    )
    spec = worker_spec(models["qwen3"], 2)
    spec = evolve(spec, plugins={**spec.plugins, "backend": chosen.plugins["backend"].to_lock_entry()}, topology=topology)
    left = []
    for _ in range(3):
        group_on(pair, spec).close()
        left.append(pair.run(threads_of_groups))
    assert left[0] == left[1] == left[2]
