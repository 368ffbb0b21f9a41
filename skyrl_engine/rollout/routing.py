"""One sampler and one pool of environments behind several runners, such as that of training and that of an evaluation beside it.

A runner polls for its own replies. What arrives for another one in the meantime waits for that one's next poll.
"""

from collections.abc import Sequence

from attrs import define, field

from skyrl_engine.contracts.kinds.environment import Action, EndedAttempt, Task
from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest
from skyrl_engine.rollout.env_pool import EpisodeReply
from skyrl_engine.rollout.request_queue import CompletionSource
from skyrl_engine.rollout.runner import Episodes


@define(eq=False)
class SamplerRouter:
    """Hands completions of `sampler` to the clients that asked for them. Request ids of all clients differ."""

    sampler: CompletionSource
    _owners: dict[int, "SamplerClient"] = field(factory=dict, init=False)

    def open_client(self) -> "SamplerClient":
        """Return a further client."""
        return SamplerClient(self)


@define(eq=False)
class SamplerClient:
    """A `CompletionSource` whose polls return its own completions alone."""

    router: SamplerRouter
    _ready: list[Completion] = field(factory=list, init=False)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.router.sampler.submit(requests)
        self.router._owners.update((request.request_id, self) for request in requests)  # noqa: SLF001 - of this file

    def poll(self, timeout: float) -> list[Completion]:
        """Return completions of this client's requests, none after `timeout` seconds; others may end the wait early."""
        owners = self.router._owners  # noqa: SLF001 - of this file
        if not self._ready:
            for completion in self.router.sampler.poll(timeout):
                owners.pop(completion.request_id)._ready.append(completion)  # noqa: SLF001 - its own class
        ready, self._ready = self._ready, []
        return ready

    def abort(self, request_ids: Sequence[int] | None = None) -> None:
        """End requests; None: all of this client."""
        if request_ids is None:
            owners = self.router._owners  # noqa: SLF001 - of this file
            request_ids = [number for number, owner in owners.items() if owner is self]
        self.router.sampler.abort(request_ids)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        self.router.sampler.end_sessions(sessions)


@define(eq=False)
class EpisodeRouter:
    """Hands replies of `episodes` to the clients that asked for them. Numbers of episodes of all clients differ."""

    episodes: Episodes
    _owners: dict[int, "EpisodeClient"] = field(factory=dict, init=False)

    def open_client(self) -> "EpisodeClient":
        """Return a further client."""
        return EpisodeClient(self)


@define(eq=False)
class EpisodeClient:
    """`Episodes` whose polls return its own replies alone."""

    router: EpisodeRouter
    _ready: list[EpisodeReply] = field(factory=list, init=False)
    _owed: set[int] = field(factory=set, init=False)

    @property
    def pending(self) -> int:
        """Count this client's episodes that owe an answer."""
        return len(self._owed)

    def open(self, episode: int, environment: int, task: Task, seed: int) -> None:
        self.router._owners[episode] = self  # noqa: SLF001 - of this file
        self._owed.add(episode)
        self.router.episodes.open(episode, environment, task, seed)

    def compare(self, episode: int, environment: int, task: Task, attempts: Sequence[EndedAttempt]) -> None:
        self.router._owners[episode] = self  # noqa: SLF001 - of this file
        self._owed.add(episode)
        self.router.episodes.compare(episode, environment, task, attempts)

    def step(self, episode: int, action: Action) -> None:
        self._owed.add(episode)
        self.router.episodes.step(episode, action)

    def close(self, episode: int) -> None:
        self.router._owners.pop(episode, None)  # noqa: SLF001 - of this file
        self._owed.discard(episode)
        self.router.episodes.close(episode)

    def poll(self, timeout: float) -> list[EpisodeReply]:
        """Return replies to this client's episodes, none after `timeout` seconds; others may end the wait early."""
        if not self._ready:
            for reply in self.router.episodes.poll(timeout):
                # a reply of an episode that was closed is nobody's
                if (owner := self.router._owners.get(reply.episode)) is not None:  # noqa: SLF001 - of this file
                    owner._ready.append(reply)  # noqa: SLF001 - its own class
        ready, self._ready = self._ready, []
        self._owed.difference_update(reply.episode for reply in ready)
        return ready
