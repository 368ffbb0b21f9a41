"""One Ray actor per rank, in a placement group. Actors are thin: they hold a `Worker` and hand back failures as values.

Ray pickles actor classes by value, so nothing but the calls is written here.
"""

import contextlib
import logging
import os
import socket
import time
import traceback
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from skyrl_engine.errors import EngineError, UnsupportedError, WorkerError
from skyrl_engine.workers.dispatch import Shard
from skyrl_engine.workers.process_group import Rendezvous
from skyrl_engine.workers.spec import WorkerSpec

GRACE_SECONDS = 5.0
"""After the first failure, how long to listen for others: a dead rank explains the broken connections its peers report."""

logger = logging.getLogger(__name__)


@frozen
class Failure:
    """What a rank raised: typed errors as they are, others as text."""

    error: EngineError | None
    cause: str
    trace: str


class RankActor:
    """Lives in a Ray worker process."""

    def __init__(self) -> None:
        self._worker: Any = None

    def place(self) -> tuple[str, int, str]:
        """This node's address, a free port on it, and the node's id."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return host, probe.getsockname()[1], ray.get_runtime_context().get_node_id()

    def start(self, spec: WorkerSpec, rank: int, local_rank: int, rendezvous: Rendezvous) -> Any:
        """Make the worker; a Failure when that raises."""

        def make() -> None:
            from skyrl_engine.workers.worker import Worker

            self._worker = Worker(spec, rank, local_rank=local_rank, rendezvous=rendezvous)

        return _guarded(make)

    def call(self, method: str, arguments: tuple[Any, ...], shard: Any, keywords: dict[str, Any]) -> Any:
        """Call the worker; `shard`, when given, arrives as the object itself because it is a top-level argument."""
        arguments = arguments if shard is None else (*arguments, shard)
        return _guarded(lambda: getattr(self._worker, method)(*arguments, **keywords))


def _guarded(body: Any) -> Any:
    try:
        return body()
    except EngineError as error:
        return Failure(error, error.summary, traceback.format_exc())
    except Exception as error:  # noqa: BLE001 - every failure of a rank must reach the controller with its cause
        return Failure(None, f"{type(error).__name__}: {error}".splitlines()[0], traceback.format_exc())


class RayTransport:
    """Starts actors on the cluster at `address`, or on a local one made for the run."""

    def __init__(self, spec: WorkerSpec, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        world = spec.topology.world_size
        self._ray = ray
        self._owns_cluster = not ray.is_initialized()
        self._actors: list[Any] = []
        self._group: Any = None
        if self._owns_cluster:
            local = {} if address else {"num_cpus": max(world, os.cpu_count() or 1), "include_dashboard": False}
            ray.init(address=address, logging_level="error", log_to_driver=False, **local)
        try:
            self._start(spec, world)
        except BaseException:
            self.close()
            raise

    def _start(self, spec: WorkerSpec, world: int) -> None:
        ray = self._ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        total = ray.cluster_resources()
        gpus = spec.device != "cpu" and total.get("GPU", 0) >= 1
        resources = {"CPU": 1.0, **({"GPU": 1.0} if gpus else {})}
        short = [name for name, each in resources.items() if total.get(name, 0) < each * world]
        if short:
            have = ", ".join(f"{total.get(name, 0):g} {name}" for name in resources)
            raise UnsupportedError(
                f"{world} ranks need {world} {' and '.join(short)}, the Ray cluster has {have}",
                remedy="Lower run.ranks or grow the cluster",
            )
        self._group = placement_group([resources] * world, strategy="PACK")
        ray.get(self._group.ready())
        actor = ray.remote(RankActor)
        self._actors = [
            actor.options(
                num_cpus=1,
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            ).remote()
            for rank in range(world)
        ]
        places = self._gather("start", [actor.place.remote() for actor in self._actors])
        nodes = [node for _, _, node in places]
        local_ranks = [
            0 if gpus else nodes[:rank].count(node) for rank, node in enumerate(nodes)
        ]  # Ray shows an actor only its own GPU
        host, port, _ = places[0]
        meeting = Rendezvous(host, port)
        starts = [actor.start.remote(spec, rank, local_ranks[rank], meeting) for rank, actor in enumerate(self._actors)]
        self._gather("start", starts)

    def put(self, shard: Shard) -> Any:
        return self._ray.put(shard)

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]], keywords: dict[str, Any]) -> list[Any]:
        pending = []
        for actor, arguments in zip(self._actors, per_rank, strict=True):
            plain = tuple(argument for argument in arguments if not isinstance(argument, self._ray.ObjectRef))
            shards = [argument for argument in arguments if isinstance(argument, self._ray.ObjectRef)]
            pending.append(actor.call.remote(method, plain, shards[0] if shards else None, keywords))
        return self._gather(method, pending)

    def _gather(self, method: str, pending: list[Any]) -> list[Any]:
        """Results by rank, or the failure that explains the others: a dead rank before one that raised."""
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        deaths: dict[int, str] = {}
        ranks = {reference: rank for rank, reference in enumerate(pending)}
        waiting = list(pending)
        deadline: float | None = None
        while waiting and not deaths and (deadline is None or time.monotonic() < deadline):
            ready, waiting = self._ray.wait(waiting, num_returns=1, timeout=None if deadline is None else 0.2)
            for reference in ready:
                rank = ranks[reference]
                try:
                    result = self._ray.get(reference)
                except self._ray.exceptions.RayError as error:
                    deaths[rank] = _cause_of_death(error)
                else:
                    if isinstance(result, Failure):
                        failures[rank] = result
                        logger.error("rank %d failed in %s\n%s", rank, method, result.trace)
                    else:
                        results[rank] = result
            if (deaths or failures) and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
        if deaths or failures:
            raise _explain(method, deaths, failures)
        return [results[rank] for rank in range(len(pending))]

    def close(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        self._actors = []
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
            self._group = None
        if self._owns_cluster and self._ray.is_initialized():
            self._ray.shutdown()


def _cause_of_death(error: Exception) -> str:
    """Ray's own account, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "exit" in line.lower() or "killed" in line.lower() or "memory" in line.lower()]
    return (telling or lines or [type(error).__name__])[0].rstrip(".")


def _explain(method: str, deaths: dict[int, str], failures: dict[int, Failure]) -> EngineError:
    if deaths:
        rank = min(deaths)
        return WorkerError(
            f"rank {rank} died during {method}: {deaths[rank]}",
            rank=rank,
            remedy="Look for lack of memory or a signal on that machine, then resume from the latest checkpoint",
        )
    typed = {rank: failure for rank, failure in failures.items() if failure.error is not None}
    rank = min(typed or failures)
    failure = failures[rank]
    if failure.error is not None:
        return failure.error
    return WorkerError(
        f"rank {rank} failed in {method}: {failure.cause}",
        rank=rank,
        remedy="The log holds the rank's traceback; mend the cause and resume from the latest checkpoint",
    )
