"""A transport that runs the engine's workers on the ranks of a `World`: no Ray, and one world for many backends in turn."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from skyrl_engine.errors import EngineError
from skyrl_engine.testing.ranks.held import get_held, hold, let_go
from skyrl_engine.testing.ranks.world import World
from skyrl_engine.workers.dispatch import Shard
from skyrl_engine.workers.ending import CLOSED, describe_ending
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.messages import Message
from skyrl_engine.workers.spec import WorkerSpec

Reply = TypeVar("Reply")


class WorldTransport:
    """A `Transport` over a world that outlives it. Starting one ends the workers of the one before."""

    concurrent = True
    ray_resources: Mapping[str, float] | None = None

    def __init__(self, world: World, spec: WorkerSpec) -> None:
        self._world = world
        self.ended: str | None = None
        world.run(_start, spec)

    def put(self, shard: Shard) -> Shard:
        return shard

    def send(self, messages: Sequence[Message[Reply] | None]) -> Callable[[], list[Reply | None]]:
        asked = [rank for rank, message in enumerate(messages) if message is not None]
        wait = self._world.begin_on(asked, on_worker, list(messages))

        def take_answers() -> list[Reply | None]:
            try:
                answers = wait()
                return [answers.get(rank) for rank in range(len(messages))]
            except EngineError as error:
                if not self._world.running:
                    self.ended = describe_ending(error)
                raise

        return take_answers

    @property
    def posted_ranks(self) -> set[int]:
        return self._world.posted_ranks

    def post(self, rank: int, message: Message[Any]) -> None:
        self._world.post(rank, on_worker, [message if place == rank else None for place in range(rank + 1)])

    def collect(self, timeout: float) -> dict[int, Any]:
        try:
            return self._world.collect(timeout)
        except EngineError as error:
            if not self._world.running:
                self.ended = describe_ending(error)
            raise

    def close(self) -> None:
        if self.ended is None:
            self.ended = CLOSED
            self._world.run(let_go, "worker")


class OwnRanksTransport(WorldTransport):
    """A `Transport` over ranks of its own, which end with it: what tests put in the place of Ray's."""

    def __init__(self, spec: WorkerSpec) -> None:
        world = World(spec.topology.world_size)
        try:
            super().__init__(world, spec)
        except BaseException:
            world.close()
            raise

    def close(self) -> None:
        self.ended = CLOSED
        self._world.close()


def group_on(world: World, spec: WorkerSpec) -> WorkerGroup:
    """Start every rank of `spec.topology` on a world of that size."""
    return WorkerGroup(WorldTransport(world, spec), spec.topology)


def _start(spec: WorkerSpec) -> None:
    import torch.distributed as dist

    from skyrl_engine.workers.worker import Worker

    rank = dist.get_rank()
    # All ranks of a world are on one machine.
    hold("worker", lambda: Worker(spec, rank, device_index=rank))


def on_worker(messages: Sequence[Message[Reply] | None]) -> Reply | None:
    """Answer this rank's message, if it has one, with the worker on this rank of the world."""
    import torch.distributed as dist

    message = messages[dist.get_rank()]
    return None if message is None else message.answer(get_held("worker"))
