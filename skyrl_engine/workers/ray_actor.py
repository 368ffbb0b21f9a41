"""The Ray actor of one rank: thin, around one `Worker`, with failures handed back as values."""

import os
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from skyrl_engine.errors import EngineError
from skyrl_engine.workers.parcel import Parcel
from skyrl_engine.workers.process_group import Rendezvous
from skyrl_engine.workers.rank_output import capture
from skyrl_engine.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from skyrl_engine.workers.messages import Message


@frozen
class Failure:
    """A failure of a rank: typed errors as they are, others as text. `was_begun` is False of a call after one that failed."""

    error: EngineError | None
    cause: str
    trace: str
    was_begun: bool = True


@frozen
class Place:
    """An actor's place.

    `machine` is Ray's id of it, `host` its address, `name` its name; `port` is free there, and `output` is the file of what the actor says.
    """

    machine: str
    host: str
    port: int
    name: str
    pid: int
    gpus: tuple[str, ...]
    output: str

    @property
    def device_index(self) -> int:
        """Torch's number of the GPU, in the actor's process."""
        return device_index(self.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def __str__(self) -> str:
        device = f"GPU {', '.join(self.gpus)}" if self.gpus else "CPU"
        return f"{self.name} ({self.host}), pid {self.pid}, {device}"


class RankActor:
    """One rank. Nothing but calls is written here, and nothing of torch is imported before `start`."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._output = capture()
        self._failures = 0

    def place(self) -> Place:
        return find_place(self._output)

    def start(self, spec: WorkerSpec, rank: int, rendezvous: Rendezvous) -> Any:
        """Make the worker; a Failure when that raises."""

        def make() -> None:
            from skyrl_engine.workers.worker import Worker

            self._worker = Worker(spec, rank, device_index=find_place(self._output).device_index, rendezvous=rendezvous)

        return _run_guarded(make)

    def call(self, message: "Message[Any]", shard: Parcel | None, known: int = 0) -> Any:
        """Answer a message; its `shard`, when it has one, arrives as the parcel itself because it is a top-level argument.

        `known` counts this rank's failures that the controller knew of when it sent the call. After a further one the call is not begun: the
        other ranks may be in a collective of the failed call, and would take this one's for it.
        """
        if self._failures > known:
            return Failure(None, "it was not begun, because a call before it failed", "", was_begun=False)

        def answer() -> Any:
            return (message if shard is None else message.with_shard(shard.unpack())).answer(self._worker)

        answered = _run_guarded(answer)
        self._failures += isinstance(answered, Failure)
        return answered


def find_place(output: str) -> Place:
    """Return the place of the actor that this process is."""
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    context = ray.get_runtime_context()
    return Place(
        machine=context.get_node_id(),
        host=ray.util.get_node_ip_address(),
        port=port,
        name=socket.gethostname(),
        pid=os.getpid(),
        gpus=tuple(context.get_accelerator_ids().get("GPU", [])),
        output=output,
    )


def device_index(assigned: Sequence[str], visible: str | None) -> int:
    """Torch's number of the device that Ray assigned, given CUDA_VISIBLE_DEVICES.

    Ray shows an actor only its own device, which is then number 0, unless the cluster was told not to hide the others
    (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES).
    """
    if not assigned:
        return 0
    shown = None if visible is None else visible.split(",")
    if shown is None:
        return int(assigned[0])
    return shown.index(assigned[0]) if assigned[0] in shown else 0


def _run_guarded(body: Callable[[], Any]) -> Any:
    try:
        return body()
    except EngineError as error:
        return Failure(error, error.summary, traceback.format_exc())
    except Exception as error:  # noqa: BLE001 - every failure of a rank must reach the controller with its cause
        return Failure(None, f"{type(error).__name__}: {error}".splitlines()[0], traceback.format_exc())
