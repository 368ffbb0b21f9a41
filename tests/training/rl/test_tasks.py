"""Which task a ticket is follows from the seed alone; environments get their shares, and every pass takes every task once."""

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_engine.contracts.kinds.environment import Task
from skyrl_engine.errors import ContractError, DataError, PluginBrokenError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import Owner
from skyrl_engine.training.rl import tasks as module
from skyrl_engine.training.rl.tasks import TaskOrder


def part(count: int, name: str = "sums") -> Any:
    own = [Task(f"{name}-{number}", prompt_ids=(1,)) for number in range(count)]
    return bind_tasks(own, name)


def bind_tasks(own: Any, name: str = "sums") -> BoundPlugin[Any]:
    product = SimpleNamespace(tasks=lambda split: own if split == "train" else [])
    return BoundPlugin(product, Owner(name, "Correct it"), "environments[0]", name)


def order(*counts: int, weights: tuple[float, ...] | None = None, seed: int = 3) -> TaskOrder:
    parts = [part(count, f"e{place}") for place, count in enumerate(counts)]
    return TaskOrder(parts, weights or (1.0,) * len(counts), seed)


def keys(order: TaskOrder, count: int) -> list[str]:
    return [order.of(ticket)[1].key for ticket in range(count)]


def test_every_pass_takes_every_task_once_in_another_order() -> None:
    seen = keys(order(10), 30)
    passes = [seen[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(own) == sorted(passes[0]) and len(set(own)) == 10 for own in passes)
    assert len({tuple(own) for own in passes}) == 3
    assert keys(order(10, seed=4), 10) != passes[0]


def test_a_ticket_is_the_same_task_whenever_it_is_asked_for() -> None:
    whole = keys(order(7, 3), 60)
    tasks = order(7, 3)
    assert [tasks.of(ticket)[1].key for ticket in (59, 0, 31, 31, 58)] == [whole[ticket] for ticket in (59, 0, 31, 31, 58)]


def test_environments_get_their_shares_and_keep_their_own_order() -> None:
    tasks = order(5, 5, weights=(3.0, 1.0))
    drawn = [tasks.of(ticket)[0] for ticket in range(2000)]
    assert 0.22 < sum(drawn) / 2000 < 0.28
    own = [tasks.of(ticket)[1].key for ticket in range(40) if drawn[ticket] == 1][:5]
    assert sorted(own) == [f"e1-{number}" for number in range(5)]
    assert tasks.needs(40) == [drawn[:40].count(0), drawn[:40].count(1)]


def test_tasks_of_a_procedure_are_taken_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHUFFLED", 9)
    assert keys(order(10), 11) == [*(f"e0-{number}" for number in range(10)), "e0-0"]


def test_an_environment_without_tasks_is_refused() -> None:
    with pytest.raises(DataError, match="e1 has no task to train on"):
        order(3, 0)


class Failing:
    """Tasks whose making fails."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Task:
        raise LookupError(f"no number {index}")


def test_an_environment_is_blamed_for_tasks_that_it_cannot_make() -> None:
    with pytest.raises(PluginBrokenError, match=r"sums failed in making task \d: LookupError: no number") as caught:
        TaskOrder([bind_tasks(Failing())], (1.0,), 3).of(0)
    assert caught.value.remedy == "Correct it"
    with pytest.raises(ContractError, match="sums has dict as task 0"):
        TaskOrder([bind_tasks([{"prompt": "go"}])], (1.0,), 3).of(0)
    broken = BoundPlugin(SimpleNamespace(), Owner("sums", "Correct it"), "environments[0]", "sums")
    with pytest.raises(PluginBrokenError, match=r"sums failed in tasks\('train'\): AttributeError"):
        TaskOrder([broken], (1.0,), 3)
