"""The tasks of a run in their order: which environment and which task a ticket is, a pure function of the run's seed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from attrs import define, field

from skyrl_engine.contracts.kinds.environment import Environment, Split, Task, Tasks
from skyrl_engine.contracts.values.returned import describe_returned
from skyrl_engine.errors import ColumnError, ContractError, DataError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import blame

_SHUFFLED: Final = 2**22
"""More tasks than these are made by a procedure; they are taken in their own order, which is random already."""


def tasks_in(part: BoundPlugin[Environment], split: Split) -> Tasks:
    """Return the tasks of a split, whose number is asked for: those of a table are read.

    Raises PluginBrokenError where the environment's code fails, and ColumnError with the key of the configuration that names its columns.
    """
    with blame(part.owner, f"tasks({split!r})"), _columns_named_at(part.place):
        tasks = part.product.tasks(split)
        if not (hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")) or isinstance(tasks, str | Mapping):
            raise ContractError(
                f"{part.label} returned {describe_returned(tasks)} from tasks({split!r})",
                remedy="Return tasks by number from tasks: a list of Task, or an object with __len__ and __getitem__",
            )
        len(tasks)
        return tasks


@contextmanager
def _columns_named_at(place: str) -> Iterator[None]:
    """Name columns in errors by their whole key: of an environment at `environments[0]`, `environments.0.map`; at no place, by its own name."""
    try:
        yield
    except ColumnError as error:
        if not place:
            raise
        raise error.under(place.replace("[", ".").replace("]", "")) from error


def refuse_no_task(part: BoundPlugin[Environment], tasks: Tasks, *, trains: bool) -> None:
    """Raise DataError for an environment without a task to train on; a run that only evaluates needs none."""
    if trains and len(tasks) == 0:
        raise DataError(f"{part.label} has no task to train on", remedy="Check the environment's options")


def task_at(part: BoundPlugin[Environment], tasks: Tasks, index: int) -> Task:
    """Return a task of an environment. Raises PluginBrokenError where its code fails, and ContractError where it makes something else."""
    with blame(part.owner, f"making task {index:,}"), _columns_named_at(part.place):
        task = tasks[index]
    if not isinstance(task, Task):
        raise ContractError(
            f"{part.label} has {describe_returned(task)} as task {index:,}",
            remedy="Return a skyrl_engine.contracts.Task for every number",
        )
    _require_plain_fields(part.label, index, task)
    return task


def _require_plain_fields(label: str, index: int, task: Task) -> None:
    types_of_field = {
        "key": (str,),
        "messages": (tuple, list),
        "prompt_ids": (tuple, list),
        "data": (Mapping,),
        "tools": (tuple, list),
    }
    for name, types in types_of_field.items():
        value = getattr(task, name)
        if not isinstance(value, types):
            raise ContractError(
                f"{label} has {describe_returned(value)} as {name} of task {index:,}",
                remedy=f"Give a {types[0].__name__} as {name} of every Task",
            )
    for message in task.messages:
        if not isinstance(message, Mapping):
            raise ContractError(
                f"{label} has {describe_returned(message)} among the messages of task {index:,}",
                remedy='Give messages as dicts with "role" and "content"',
            )


@define(eq=False)
class TaskOrder:
    """Tickets 0, 1, ... over several environments, each with its weight.

    Every ticket draws its environment; the k-th ticket of an environment takes the k-th task of that environment's order, which is another one
    in every pass over its tasks. An order that nobody trains in (`trains` is false) may lack tasks.
    """

    environments: Sequence[BoundPlugin[Environment]]
    weights: Sequence[float]
    seed: int
    trains: bool = True
    tasks: list[Tasks] = field(factory=list, init=False)
    _drawn: list[tuple[int, int]] = field(factory=list, init=False)
    _counts: list[int] = field(factory=list, init=False)
    _orders: dict[tuple[int, int], np.ndarray] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.tasks = [tasks_in(environment, "train") for environment in self.environments]
        for environment, tasks in zip(self.environments, self.tasks, strict=True):
            refuse_no_task(environment, tasks, trains=self.trains)
        self._counts = [0] * len(self.environments)

    def needs(self, tickets: int) -> list[int]:
        """int[environments]: how many tasks of each environment so many tickets take."""
        self._draw(tickets)
        taken = np.bincount([environment for environment, _ in self._drawn[:tickets]], minlength=len(self.tasks))
        return [int(number) for number in taken]

    def of(self, ticket: int) -> tuple[int, Task]:
        """Return the number of the ticket's environment, and its task."""
        self._draw(ticket + 1)
        environment, place = self._drawn[ticket]
        tasks = self.tasks[environment]
        epoch, offset = divmod(place, len(tasks))
        return environment, task_at(self.environments[environment], tasks, self._index(environment, epoch, offset, len(tasks)))

    def first(self, tickets: int, most: Sequence[int]) -> Iterator[tuple[int, Task]]:
        """Yield the tasks of so many tickets, each task once, with the number of its environment; of each environment `most` at most."""
        self._draw(tickets)
        for ticket, (environment, place) in enumerate(self._drawn[:tickets]):
            if place < min(most[environment], len(self.tasks[environment])):
                yield self.of(ticket)

    def _draw(self, tickets: int) -> None:
        shares = np.cumsum(np.asarray(self.weights, dtype=np.float64))
        while len(self._drawn) < tickets:
            ticket = len(self._drawn)
            point = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, ticket]))).random() * shares[-1]
            environment = int(np.searchsorted(shares, point, side="right")) if len(shares) > 1 else 0
            self._drawn.append((environment, self._counts[environment]))
            self._counts[environment] += 1

    def _index(self, environment: int, epoch: int, offset: int, count: int) -> int:
        if count > _SHUFFLED:
            return offset
        key = (environment, epoch)
        if key not in self._orders:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, environment, epoch, 1])))
            self._orders = {
                place: order for place, order in self._orders.items() if place[0] != environment or place[1] == epoch - 1
            }
            self._orders[key] = generator.permutation(count)
        return int(self._orders[key][offset])
