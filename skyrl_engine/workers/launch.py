"""Start the ranks of a run and talk to them: `inline` in this process, `ray` in one actor per rank. The same code above both."""

import logging
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar

from skyrl_engine.cleanup import close_after
from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.errors import EngineClosedError, EngineError, UnsupportedError
from skyrl_engine.workers.dispatch import PlacedShard, Shard
from skyrl_engine.workers.ending import CLOSED
from skyrl_engine.workers.future import Calls, Future
from skyrl_engine.workers.listing import FileFacts, find_files, share_files
from skyrl_engine.workers.messages import (
    AddAdapterSet,
    AddFrozenModel,
    CollectSave,
    DropAdapterSet,
    ForAdapterSet,
    Message,
    PollCompletions,
    RunPass,
    SubmitRequests,
    SumFiles,
)
from skyrl_engine.workers.polls import AnswersApart, RankPolls
from skyrl_engine.workers.spec import WorkerSpec
from skyrl_engine.workers.staged_save import WrittenFiles
from skyrl_engine.workers.worker import Pass, RankReply, Worker

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")


class Transport(Protocol):
    """A way for messages to reach the ranks. `concurrent` says that ranks compute while the controller goes on after `send`."""

    @property
    def concurrent(self) -> bool: ...

    @property
    def ended(self) -> str | None:
        """The event that ended the ranks, as a clause such as "it was closed"; None while they take calls."""

    @property
    def ray_resources(self) -> Mapping[str, float] | None:
        """Resources that each rank holds on a Ray cluster; None of ranks elsewhere."""

    def put(self, shard: Shard) -> Any:
        """Make a shard available to ranks; the result stands for it in `RunPass.shard`."""

    def send(self, messages: Sequence[Message[Reply] | None]) -> Callable[[], list[Reply | None]]:
        """Send every rank its message at once, all of one class; returns what waits for the replies, by rank.

        None is sent to no rank, and stands for its reply; some message is one.
        Waiting raises WorkerError, or the typed error that a rank met. Ranks answer messages in the order in which they were sent.
        Where a rank fails or dies and others do not answer, because they wait for it in a collective, all ranks are ended.
        """

    def close(self) -> None:
        """End the ranks, whatever state they are in."""


class WorkerGroup:
    """All ranks of a run, and the names of the frozen models on them. A context manager; leaving it ends them."""

    def __init__(self, transport: Transport, topology: Topology) -> None:
        self._transport = transport
        self._calls = Calls()
        self._adapter_sets = 0
        self.topology = topology
        self.frozen: set[str] = set()
        self._polls = RankPolls(transport, topology) if topology.dp > 1 and isinstance(transport, AnswersApart) else None
        self.before_send: Callable[[Message[Any]], None] | None = None
        """Called before a message goes to the ranks; None: nobody listens."""

    @property
    def ended(self) -> str | None:
        """The event that ended the ranks, as a clause; None while they take calls."""
        return self._transport.ended

    @property
    def ray_resources(self) -> Mapping[str, float] | None:
        """Resources that each rank holds on a Ray cluster; None of ranks elsewhere."""
        return self._transport.ray_resources

    @property
    def concurrent(self) -> bool:
        """Say whether the ranks compute while the controller goes on: in processes of their own, and not in this one."""
        return self._transport.concurrent

    def refuse_ended(self) -> None:
        """Raise EngineClosedError where the ranks take no calls any more."""
        if self.ended is not None:
            raise EngineClosedError(self.ended)

    def put(self, shards: Iterable[Shard]) -> list[PlacedShard]:
        """References to shards, one per data-parallel rank. Pixels are in none that goes to a pipeline stage after the first."""
        placed = list(map(self._ship, shards))  # unlike a loop's variable, it holds no shard while the next is made
        assert len(placed) == self.topology.dp, "one shard per data-parallel rank"
        return placed

    def _ship(self, shard: Shard) -> PlacedShard:
        later = shard.without_pixels() if self.topology.pp > 1 else shard
        first = self._transport.put(shard)
        return PlacedShard(first, first if later is shard else self._transport.put(later))

    def run(self, work: Pass, shards: Sequence[PlacedShard]) -> Future[list[RankReply]]:
        """One pass over a mini-batch; `shards[dp]` are references from `put`. Replies by rank."""
        places = (self.topology.coords(rank) for rank in range(self.topology.world_size))
        return self._send_each([RunPass(work, shards[place.dp].at(place.pp)) for place in places])

    def send(self, message: Message[Reply]) -> Future[list[Reply]]:
        """Send one message to every rank. Returns a future of the replies by rank. Raises EngineClosedError where the ranks ended."""
        return self._send_each([message] * self.topology.world_size)

    def ask(self, message: Message[Reply]) -> list[Reply]:
        """Send one message to every rank and wait for the replies, by rank. Raises what a rank raises."""
        return self.send(message).result()

    def list_files(self, root: Path) -> dict[str, FileFacts]:
        """Return size and sum of every file under `root`, which all ranks see, by its relative path; each rank reads its share of them."""
        shares = share_files(find_files(root), self.topology.world_size)
        replies = self._send_each([SumFiles(root, tuple(names)) for names in shares]).result()
        return {name: facts for reply in replies for name, facts in reply.items()}

    def collect_written(self, written: Sequence[WrittenFiles | None], message: CollectSave) -> list[WrittenFiles | None]:
        """Ask the ranks for what they have `written` of a staged save that had not when they were asked before, by rank."""
        replies = self._send_each([message if files is None else None for files in written]).result()
        return [reply if files is None else files for files, reply in zip(written, replies, strict=True)]

    def add_frozen(self, name: str, model: ModelConfig | None) -> None:
        """Load a further model that scores and never learns; None: the trained one without its adapters. Raises ModelError."""
        self.ask(AddFrozenModel(name, model))
        self.frozen.add(name)

    def add_adapter_set(self, spec: WorkerSpec) -> "WorkerGroup":
        """Train a further set of adapters on the same ranks, over the same frozen weights; leaving the group that this returns frees it.

        Calls of both groups reach a rank in the order in which they are made. Raises UnsupportedError or ModelError.
        """
        number = self._adapter_sets
        self.ask(AddAdapterSet(number, spec))
        self._adapter_sets += 1
        return WorkerGroup(AdapterSetTransport(self._transport, number, self.topology.world_size), self.topology)

    def settle(self) -> None:
        """Wait for all calls under way. Raises the first failure that nobody has seen."""
        self._calls.settle()

    def submit(self, shares: Sequence[Sequence[GenerationRequest]]) -> None:
        """Hand requests to the data-parallel ranks, by rank."""
        self._send_to(lambda dp: SubmitRequests(shares[dp]) if shares[dp] else None)

    def poll(self, timeout: float, busy: Collection[int]) -> list[Completion]:
        """Let the data-parallel ranks sample that are `busy`, and return what is finished first: none after `timeout` seconds. The others are
        not called.

        Each of several ranks answers by itself, and those that have not answered sample on after this has returned. With `timeout` 0 each does
        no more than it does anyway before it looks at the time, and all are waited for.
        """
        if self._polls is not None and timeout > 0:
            self._calls.settle()
            return self._polls.wait(timeout, busy)
        message = PollCompletions(timeout, eager=True)
        replies = self._send_to(lambda dp: message if dp in busy else None)
        kept = [] if self._polls is None else self._polls.take_answers()
        return [*kept, *(completion for reply in replies for completion in reply or ())]

    def go_on_sampling(self, busy: Collection[int]) -> None:
        """Let those of several data-parallel ranks that are `busy` and have answered sample on, before somebody polls again."""
        if self._polls is not None:
            self._polls.begin(busy)

    def _send_to(self, make: Callable[[int], Message[Reply] | None]) -> list[Reply | None]:
        """Send what `make` returns for a data-parallel rank to those of its ranks that may sample, and wait for the replies, by rank.

        None is sent to nobody. Where nothing is sent, nothing is waited for.
        """
        made = [make(dp) for dp in range(self.topology.dp)]
        places = map(self.topology.coords, range(self.topology.world_size))
        messages = [made[place.dp] if place.cp == place.pp == 0 else None for place in places]
        return self._send_each(messages).result() if any(messages) else []

    def close(self) -> None:
        """End the ranks, with all sets of adapters; of a group of a set, this set alone. What is closed already stays so."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close_after(error, self.close)

    def _send_each(self, messages: Sequence[Message[Reply] | None]) -> Future[list[Any]]:
        """Send each rank a message of its own; None is sent to no rank, and stands for its reply."""
        self.refuse_ended()
        if self.before_send is not None:
            self.before_send(next(message for message in messages if message is not None))
        return self._calls.make_future(self._transport.send(messages))


class InlineTransport:
    """One rank in this process: no Ray, no copies, exceptions as they are. A call computes at once."""

    concurrent = False
    ray_resources: Mapping[str, float] | None = None

    def __init__(self, spec: WorkerSpec) -> None:
        if spec.device != "cpu":
            os.environ.update(spec.variables())  # before the worker first asks for CUDA
        self._worker = Worker(spec, 0)
        self.ended: str | None = None
        logger.info("rank 0: in the controller's process, on %s, pid %d", socket.gethostname(), os.getpid())

    def put(self, shard: Shard) -> Shard:
        return shard

    def send(self, messages: Sequence[Message[Reply] | None]) -> Callable[[], list[Reply | None]]:
        try:
            (answer,) = (message.answer(self._worker) for message in messages if message is not None)
        except Exception as error:  # noqa: BLE001 - it is raised where the answer is taken, as with ranks elsewhere
            failure = error

            def raise_failure() -> list[Reply | None]:
                raise failure

            return raise_failure
        return lambda: [answer]

    def close(self) -> None:
        if self.ended is None:
            self.ended = CLOSED
            self._worker.close()


class AdapterSetTransport:
    """The way to a further set of adapters on the ranks of another transport."""

    def __init__(self, ranks: Transport, number: int, world_size: int) -> None:
        self._ranks, self._number, self._world_size = ranks, number, world_size
        self._closed = False

    def put(self, shard: Shard) -> Any:
        return self._ranks.put(shard)

    @property
    def concurrent(self) -> bool:
        return self._ranks.concurrent

    @property
    def ray_resources(self) -> Mapping[str, float] | None:
        return self._ranks.ray_resources

    @property
    def ended(self) -> str | None:
        """The end of this set, or of what it was made from."""
        return CLOSED if self._closed else self._ranks.ended

    def send(self, messages: Sequence[Message[Reply] | None]) -> Callable[[], list[Reply | None]]:
        return self._ranks.send([None if message is None else ForAdapterSet(self._number, message) for message in messages])

    def close(self) -> None:
        """Free the set; ranks that cannot are dead or fail in the next call."""
        if self.ended is not None:
            return
        self._closed = True
        try:
            self._ranks.send([DropAdapterSet(self._number)] * self._world_size)()
        except EngineError as error:
            logger.warning("a set of adapters was not freed: %s", error.cause)


def launch_workers(
    spec: WorkerSpec, *, launch: Literal["inline", "ray"], ray_address: str | None = None, spare_cpus: float = 0.0
) -> WorkerGroup:
    """Start every rank of `spec.topology` and load the model there. A Ray that is started for them has `spare_cpus` beside theirs.

    Raises WorkerError, or the typed error a rank's start met.
    """
    if launch == "ray":
        from skyrl_engine.workers.ray_transport import RayTransport

        return WorkerGroup(RayTransport(spec, ray_address, spare_cpus), spec.topology)
    if spec.topology.world_size != 1:
        raise UnsupportedError(
            f'launch = "inline" runs one rank, the run asks for {spec.topology.world_size}', remedy='Set run.launch to "ray"'
        )
    return WorkerGroup(InlineTransport(spec), spec.topology)
