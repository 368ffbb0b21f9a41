"""Calls to one Ray actor per rank, in a placement group; of several failures, the one that explains the others is raised."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs

from skyrl_engine.cleanup import close_after, finally_close
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.errors import EngineClosedError, EngineError, PluginError, WorkerError
from skyrl_engine.workers.dispatch import Shard
from skyrl_engine.workers.ending import CLOSED, describe_ending
from skyrl_engine.workers.messages import Message
from skyrl_engine.workers.parcel import Parcel
from skyrl_engine.workers.process_group import Rendezvous
from skyrl_engine.workers.rank_log import RankLog, ranks_in_words
from skyrl_engine.workers.ray_actor import Failure, Place, RankActor
from skyrl_engine.workers.ray_cluster import (
    Connection,
    by_machine,
    connect,
    describe_death,
    disconnect,
    end_own_processes,
    import_ray,
    multiply,
    rank_resources,
    wait_for_room,
)
from skyrl_engine.workers.ray_watch import GCS_SECONDS, OWN_GCS_SECONDS, RayWatch
from skyrl_engine.workers.spec import WorkerSpec

WAIT_SECONDS = 0.2
"""A wait for answers looks so often whether Ray is still there."""

NEWS_SECONDS = 2.0
"""The end of Ray is known at the latest so long after it raised an error because of it."""

GRACE_SECONDS = 5.0
"""After the first failure, how long to listen for others: a dead rank explains the broken connections its peers report."""

_POSTED: Final = "poll"
"""The verb of calls that are posted."""

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")


class RayTransport:
    """Starts actors on the cluster at `address`, or on a local one made for the run, with `spare_cpus` beside those of the ranks."""

    concurrent = True

    def __init__(self, spec: WorkerSpec, address: str | None, spare_cpus: float = 0.0) -> None:
        self._ray = import_ray()
        self._actors: list[Any] = []
        self._places: list[Place] = []
        self._known_failures: Counter[int] = Counter()
        self._log: RankLog | None = None
        self._group: Any = None
        self._watch: RayWatch | None = None
        self._posted: dict[int, Any] = {}
        self._arrived: dict[int, Any] = {}
        self.ended: str | None = None
        self.ray_resources: Mapping[str, float] | None = None
        self._connection: Connection = connect(self._ray, address, spec.topology.world_size + spare_cpus)
        self._connected = True
        try:
            self._watch = RayWatch(self._ray, gcs_seconds=OWN_GCS_SECONDS if self._connection == "started" else GCS_SECONDS)
            with self._using_ray("start"):
                self._start(spec)
        except BaseException as error:
            close_after(error, self.close)
            raise

    def _start(self, spec: WorkerSpec) -> None:
        ray, world = self._ray, spec.topology.world_size
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.ray_resources = resources = rank_resources(spec.device, ray.cluster_resources(), world)
        self._group = placement_group([resources] * world, strategy="PACK")
        wait_for_room(ray, self._group.wait, multiply(resources, world), who=f"{world} ranks", remedy="lower run.ranks")
        actor = ray.remote(RankActor)
        started_with = on_start(spec, resources)
        self._actors = [
            actor.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                **started_with,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            ).remote()
            for bundle in range(world)
        ]
        places: list[Place] = self._gather("start", [actor.place.remote() for actor in self._actors])
        order = by_machine([place.machine for place in places])
        self._actors = [self._actors[bundle] for bundle in order]
        self._places = [places[bundle] for bundle in order]
        self._log = RankLog(ray, self._places)
        for rank, place in enumerate(self._places):
            logger.info("rank %d: on %s, %s", rank, place, _role(spec.topology, rank))
        first = self._places[0]
        # Decided here, once: machines that differ must not choose different devices.
        spec = attrs.evolve(spec, device="cuda" if "GPU" in resources else "cpu")
        meeting = Rendezvous(first.host, first.port)
        self._gather("start", [actor.start.remote(spec, rank, meeting) for rank, actor in enumerate(self._actors)])

    def put(self, shard: Shard) -> Any:
        parcel = Parcel.of(shard)
        with self._using_ray("put"):
            return self._ray.put(parcel)

    def send(self, messages: Sequence[Message[Reply] | None]) -> Callable[[], list[Reply | None]]:
        verb = next(message.verb for message in messages if message is not None)
        self._wait_for_posted_calls([rank for rank, message in enumerate(messages) if message is not None])
        pending: list[Any] = []
        for rank, (actor, message) in enumerate(zip(self._actors, messages, strict=True)):
            if message is None:
                pending.append(None)
                continue
            with self._using_ray(verb):
                # Ray resolves a reference only where it is an argument of its own
                pending.append(actor.call.remote(message.with_shard(None), message.shard, self._known_failures[rank]))
        return lambda: self._gather(verb, pending)

    @property
    def posted_ranks(self) -> set[int]:
        return {*self._posted, *self._arrived}

    def post(self, rank: int, message: Message[Any]) -> None:
        if self.ended is not None:
            raise EngineClosedError(self.ended)
        assert rank not in self._posted, f"rank {rank} has a posted call"
        with self._using_ray(message.verb):
            self._posted[rank] = self._actors[rank].call.remote(message, None, self._known_failures[rank])

    def collect(self, timeout: float) -> dict[int, Any]:
        deadline = time.monotonic() + timeout
        while self._posted:
            waiting = 0.0 if self._arrived else max(0.0, deadline - time.monotonic())
            with self._using_ray(_POSTED):
                calls = list(self._posted.values())
                ready, _ = self._ray.wait(calls, num_returns=1, timeout=min(waiting, WAIT_SECONDS))
                if ready:
                    ready, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
                failed = any(self._has_failed(call) for call in ready)
            # a failure is explained by those of all others
            answered = set(calls if failed else ready)
            self._wait_for_posted_calls([rank for rank, call in self._posted.items() if call in answered])
            if ready or waiting <= WAIT_SECONDS:
                break
        arrived, self._arrived = self._arrived, {}
        return arrived

    def _wait_for_posted_calls(self, ranks: Sequence[int]) -> None:
        """Wait for the posted calls of these ranks, and keep their replies for `collect`. After a failure none is posted any more."""
        asked = [rank for rank in ranks if rank in self._posted]
        if not asked:
            return
        calls: list[Any] = [None] * len(self._actors)
        for rank in asked:
            calls[rank] = self._posted.pop(rank)
        try:
            replies = self._gather(_POSTED, calls)
        except EngineError:
            self._posted.clear()
            raise
        self._arrived.update((rank, replies[rank]) for rank in asked)

    def _has_failed(self, call: Any) -> bool:
        try:
            return isinstance(self._ray.get(call), Failure)
        except self._ray.exceptions.RayError:
            return True

    def _gather(self, verb: str, pending: list[Any]) -> list[Any]:
        """Results by rank, or the failure that explains the others; ranks that wait for a failed or dead one are ended with it.

        None stands for the call, and for the result, of a rank that was sent nothing.
        """
        if self.ended is not None:
            raise EngineClosedError(self.ended)
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        deaths: dict[int, str] = {}
        ranks = {reference: rank for rank, reference in enumerate(pending) if reference is not None}
        waiting = list(ranks)
        deadline: float | None = None
        while waiting and not deaths and (deadline is None or time.monotonic() < deadline):
            with self._using_ray(verb):
                ready, waiting = self._ray.wait(waiting, num_returns=1, timeout=WAIT_SECONDS)
                if ready and waiting:
                    # all that are there at once: a wait looks at every answer that is due, and a wait for each is quadratic in the ranks
                    others, waiting = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
                    ready += others
            for reference in ready:
                rank = ranks[reference]
                try:
                    result = self._ray.get(reference)
                except self._ray.exceptions.RayTaskError as error:  # outside the worker: what was sent could not be unpacked
                    failures[rank] = Failure(None, f"{type(error.cause).__name__}: {error.cause}".splitlines()[0], str(error))
                except self._ray.exceptions.RayError as error:
                    deaths[rank] = describe_death(error)
                else:
                    if isinstance(result, Failure):
                        failures[rank] = result
                        if result.was_begun:
                            self._known_failures[rank] += 1
                            logger.error("rank %d failed in %s\n%s", rank, verb, result.trace)
                    else:
                        results[rank] = result
            if (deaths or failures) and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
        if deaths or failures:
            if deaths:
                self._refuse_lost_ray(verb, within=NEWS_SECONDS)
            failure = (self._find_lost_node(min(deaths), verb) if deaths else None) or _explain(
                verb, deaths, failures, self._places
            )
            if deaths or waiting:
                self._end(describe_ending(failure))
            raise failure
        return [results.get(rank) for rank in range(len(pending))]

    @contextlib.contextmanager
    def _using_ray(self, verb: str) -> Iterator[None]:
        """Refuse to use Ray where it has ended, and what it raises because of that."""
        self._refuse_lost_ray(verb)
        try:
            yield
        except (self._ray.exceptions.RayError, OSError):  # the latter of Ray's own sockets
            self._refuse_lost_ray(verb, within=NEWS_SECONDS)
            raise

    def _refuse_lost_ray(self, verb: str, *, within: float = 0.0) -> None:
        """Raise WorkerError, and end the ranks, where Ray itself is gone; wait `within` seconds for the news."""
        lost = None if self._watch is None else self._watch.find_lost_process(within)
        if lost is None:
            return
        failure = WorkerError(
            f"Ray's {lost} ended during {verb}, and {ranks_in_words(range(len(self._places)))} with it",
            rank=None,
            remedy="Look for lack of memory or a signal there"
            + ("" if self._connection == "started" else " and start Ray again")
            + ", then resume from the latest checkpoint",
        )
        self._end(describe_ending(failure))
        raise failure

    def _find_lost_node(self, dead: int, verb: str) -> WorkerError | None:
        """Return an error that names the node of a dead rank, if the node is lost too."""
        if self._log is None or self._log.node_answers(self._places[dead].machine):
            return None
        place = self._places[dead]
        lost = [rank for rank, rank_place in enumerate(self._places) if rank_place.machine == place.machine]
        return WorkerError(
            f"the node {place.name} ({place.host}) was lost during {verb}, and {ranks_in_words(lost)} with it",
            rank=dead,
            remedy="See whether that machine and its Ray still run, then resume from the latest checkpoint",
        )

    def _end(self, event: str) -> None:
        """Kill the ranks, which may be in a collective that will never end."""
        self.ended = event
        if self._watch is not None and self._watch.find_lost_process() is not None:
            self._end_processes()
        for actor in self._actors:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        self._actors = []

    def _end_processes(self) -> None:
        """End the ranks without Ray, where it was started for this run; elsewhere they end with their raylets."""
        self._actors = []
        if self._connection == "started":
            end_own_processes(self._ray, [place.pid for place in self._places])

    def close(self) -> None:
        lost = self._watch is not None and self._watch.find_lost_process() is not None
        with finally_close(lambda: self._leave_ray(lost=lost)):
            self._end(CLOSED)
            if self._log is not None:
                self._log.close(answering=not lost)
                self._log = None
            if self._group is not None and not lost:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)
                self._group = None

    def _leave_ray(self, *, lost: bool) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._connected:
            self._connected = False
            disconnect(self._ray, lost=lost)


def on_start(spec: WorkerSpec, resources: Mapping[str, float]) -> dict[str, Any]:
    """Return options of Ray that start a rank's process with the variables of its backend; none on the CPU, which starts from Ray's pool."""
    variables = spec.variables() if "GPU" in resources else {}
    return {"runtime_env": {"env_vars": variables}} if variables else {}


def _role(topology: Topology, rank: int) -> str:
    """Return a rank's part in the work, such as `data-parallel 1 of 2, pipeline-parallel 0 of 2`."""
    place = topology.coords(rank)
    parts = {"data": (place.dp, topology.dp), "tensor": (place.tp, topology.tp), "context": (place.cp, topology.cp)}
    parts["pipeline"] = (place.pp, topology.pp)
    return ", ".join(f"{name}-parallel {at} of {size}" for name, (at, size) in parts.items() if size > 1 or name == "data")


def _explain(verb: str, deaths: dict[int, str], failures: dict[int, Failure], places: Sequence[Place]) -> EngineError:
    """Return the failure that explains the others: a plugin's, else a rank's death, else a typed error, else any.

    A plugin's error was there before a peer died, which may have taken the failed rank's next collective for the one that it waited in.
    """
    plugin_errors = {rank: failure.error for rank, failure in failures.items() if isinstance(failure.error, PluginError)}
    if plugin_errors:
        return plugin_errors[min(plugin_errors)]
    if deaths:
        rank = min(deaths)
        where = f" (it was on {places[rank]})" if places else ""
        return WorkerError(
            f"rank {rank} died during {verb}: {deaths[rank]}{where}",
            rank=rank,
            remedy="Look for lack of memory or a signal on that machine, then resume from the latest checkpoint",
        )
    typed = {rank: failure for rank, failure in failures.items() if failure.error is not None}
    rank = min(typed or failures)
    failure = failures[rank]
    if failure.error is not None:
        return failure.error
    return WorkerError(
        f"rank {rank} failed in {verb}: {failure.cause}",
        rank=rank,
        remedy="The log holds the rank's traceback; mend the cause and resume from the latest checkpoint",
    )
