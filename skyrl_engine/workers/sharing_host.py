"""Generators and ranks that work on the same devices in turns: each leaves the devices while the other works."""

from collections.abc import Sequence
from typing import Any, Literal

from attrs import define, field

from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.workers.generator_hosts import GeneratorHost
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.messages import LeaveDevice, Message, ReturnToDevice


@define(eq=False)
class SharingHost:
    """A `GeneratorHost` whose generators have the ranks' devices. Whoever is asked to work gets them, after the other has left them.

    Every message to the ranks is such a request, so that no caller need know whose turn it is.
    """

    inner: GeneratorHost
    group: WorkerGroup
    turn: Literal["ranks", "generators"] = "generators"
    _under_way: int = field(default=0, init=False)

    concurrent, on_ranks = False, False

    @classmethod
    def open(cls, inner: GeneratorHost, group: WorkerGroup) -> "SharingHost":
        """Take turns from now on; the generators have the devices, and the ranks have left them."""
        host = cls(inner, group)
        group.before_send = host._give_to_ranks
        return host

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._give_to_generators()
        self.inner.submit(requests)
        self._under_way += len(requests)

    def poll(self, timeout: float) -> list[Completion]:
        completions = self.inner.poll(timeout)
        self._under_way -= len(completions)
        return completions

    def abort(self, request_ids: Sequence[int] | None) -> None:
        self.inner.abort(request_ids)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        self.inner.end_sessions(sessions)

    def write(self, version: int, target: str) -> None:
        self.inner.write(version, target)

    def update(self, version: int, target: str) -> None:
        self._give_to_generators(besides=target)
        self.inner.update(version, target)

    def load(self, model: ModelConfig, target: str) -> None:
        self._give_to_generators(besides=target)
        self.inner.load(model, target)

    def release(self, target: str) -> None:
        self.inner.release(target)

    def sleep(self) -> None:
        self.inner.sleep()

    def wake(self, besides: str | None = None) -> None:
        self.inner.wake(besides)

    def close(self) -> None:
        self.group.before_send = None
        self.inner.close()
        if self.turn == "generators" and self.group.ended is None:
            self.group.ask(ReturnToDevice())

    def _give_to_generators(self, besides: str | None = None) -> None:
        """Let the ranks leave the devices, and wake the generators; the weights of the target `besides` come next."""
        if self.turn == "generators":
            return
        self.turn = "generators"
        self.group.ask(LeaveDevice())
        self.inner.wake(besides)

    def _give_to_ranks(self, message: Message[Any]) -> None:
        """Let the generators leave the devices before a message reaches the ranks. Raises UnsupportedError while requests are under way."""
        if self.turn == "ranks" or isinstance(message, (LeaveDevice, ReturnToDevice)):
            return
        if self._under_way:
            raise UnsupportedError(
                f"the ranks were asked for {message.verb} while {self._under_way} requests are under way, and generator.share_devices gives "
                "both the same devices in turns",
                remedy="Take the completions first, or give the generators devices of their own",
            )
        self.turn = "ranks"
        self.inner.sleep()
        self.group.ask(ReturnToDevice())
