"""Runs by reinforcement on two ranks that are real processes: one dies, the controller dies, and 400 steps hold no more memory than 100."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_ranks import Kill, own_ranks, resident
from rl_runs import Rl, kill_run, numbers_of, steps_of, weights_of

from skyrl_engine import hookimpl
from skyrl_engine.cli.demo.recipe import Exchange
from skyrl_engine.cli.demo.tiny import make_model
from skyrl_engine.contracts.kinds.observer import StepFinished
from skyrl_engine.errors import WorkerError
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.workers.ray_cluster import connect, import_ray

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves sockets of its own to the garbage collector
]

TWO = ("run.ranks=2", "run.launch=ray", "rl.groups=4", "checkpoint.every=1")


@pytest.fixture
def _cluster() -> Iterator[None]:
    ray = import_ray()
    connect(ray, None, 2)
    yield
    ray.shutdown()


def require_same(got: Path, wanted: Path) -> None:
    assert weights_of(got) == weights_of(wanted)
    assert numbers_of(got) == numbers_of(wanted)


@pytest.mark.usefixtures("_cluster")
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed", "megatron"])
def test_a_rank_that_dies_ends_the_run_and_a_resume_repeats_it(rl: Rl, backend: str) -> None:
    tables = (*TWO, f"backend.use={backend}", "rl.steps=5", "checkpoint.every=2")
    whole = run_rl(rl("whole", *tables)).directory
    with pytest.raises(WorkerError, match=r"rank [01] died during") as caught:
        run_rl(rl("parts", *tables), observers=[Kill(after=3)])
    assert "resume from the latest checkpoint" in caught.value.remedy
    require_same(run_rl(rl("parts", *tables), resume=True).directory, whole)


def test_a_controller_that_dies_takes_its_ranks_along_and_a_resume_repeats_it(
    rl: Rl, tables_of: Callable[..., dict[str, Any]]
) -> None:
    tables = (*TWO, "rl.steps=3")
    for moment, count in (("sampling", 2), ("learning", 1), ("publishing", 2)):
        kill_run(tables_of("parts"), tables, moment, count)
    require_same(run_rl(rl("parts", *tables), resume=True).directory, run_rl(rl("whole", *tables)).directory)


class Memory:
    """Bytes that controller and ranks hold after every step."""

    def __init__(self) -> None:
        self.held: list[dict[str, int]] = []

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        assert event.step == len(self.held) + 1
        ranks = {f"rank process {number}": resident(number) for number in own_ranks()}
        self.held.append({"controller": resident(), **ranks})


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_cluster")
def test_400_steps_hold_no_more_memory_than_100(rl: Rl, tmp_path: Path) -> None:
    """The demo's model, and all the while a second one, a penalty that follows the divergence, filters, evaluations, checkpoints and pruned
    rollouts.
    """
    make_model(tmp_path / "demo", [Exchange("go on", "on go")])
    memory = Memory()
    tables = ("rl.steps=400", "checkpoint.every=20", "checkpoint.keep=2", "rollouts.keep=20", "rl.kl={coef=0.1, target=0.1}")
    more = ("evaluation={every=50, samples=2, temperature=1.0, tasks=2}", "group_filters=[{use='zero_variance'}]")
    model = f"model.path={tmp_path / 'demo'}"
    result = run_rl(rl("run", *TWO[:3], model, "optimizer.learning_rate=1e-4", *tables, *more), observers=[memory])
    assert len(steps_of(result.directory)) == 400
    assert len(memory.held[99]) == 3
    print(
        "MiB after 100, 200, 300 and 400 steps:",
        [{name: held >> 20 for name, held in sizes.items()} for sizes in memory.held[99::100]],
    )
    for name, before in memory.held[99].items():
        after = memory.held[399][name]
        assert after < 1.02 * before, (name, before, after, [sizes[name] >> 10 for sizes in memory.held[::20]])
