"""A generator under test in the place where it would live in a run: called here, behind a client here, or in a process of its own.

The last two are the engine's own hosts, which give weights in folders. A process takes seconds to start, so promises share one under
`share_starts`.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic
from typing import Any, Final, Protocol

from attrs import define, evolve, field

from skyrl_engine.cleanup import close_after
from skyrl_engine.config.schema import GeneratorPlacement, GeneratorTable
from skyrl_engine.contracts.kinds.generator import (
    POLICY,
    Completion,
    GenerationRequest,
    GeneratorDescription,
    GeneratorStart,
    WeightForm,
    WeightSource,
    as_completions,
)
from skyrl_engine.engine.generator_placement import Placement, choose_placement
from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.registry.owner import blame
from skyrl_engine.testing.subject import CONTEXT, Subject, part_of
from skyrl_engine.workers.generation import GeneratorDriver
from skyrl_engine.workers.generator_hosts import GeneratorHost, RemoteHost, WeightFolders
from skyrl_engine.workers.replica_launch import LocalLauncher
from skyrl_engine.workers.replicas import ReplicaHost
from skyrl_engine.workers.sampler_facts import SamplerFacts
from skyrl_engine.workers.weight_files import write_weights

FILE_BYTES: Final = 1 << 16
"""Bytes of tensors per file: the kit's model comes in several, so that a generator that reads one of them shows."""

SETTLE_SECONDS: Final = 10.0
"""Time in which a shared generator answers what was aborted when a promise ended; after it, the next promise gets one of its own."""


class PlacedGenerator(Protocol):
    """A generator that was started, wherever it lives. Its failures name it, and what it returns is checked."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None: ...
    def poll(self, timeout: float) -> list[Completion]: ...
    def abort(self, request_ids: Sequence[int] | None) -> None: ...
    def end_sessions(self, sessions: Sequence[int]) -> None: ...
    def update(self, weights: WeightSource, version: int, target: str) -> None: ...
    def release(self, target: str) -> None: ...
    def sleep(self) -> None: ...
    def close(self) -> None: ...


class CalledGenerator(GeneratorDriver):
    """A generator in this process, as on a rank, of which one call of `poll` is one call."""

    def poll(self, timeout: float, *, eager: bool = True, agree: object = None) -> list[Completion]:  # noqa: ARG002 - the driver's signature
        """Return what the generator returns, which the driver of a rank would wait for."""
        with blame(self.part.owner, "poll"):
            returned = self.part.product.poll(timeout)
        return as_completions(self.part.label, returned)


@define(eq=False)
class HostedGenerator:
    """A generator behind a host of the engine."""

    _weights: WeightSource
    """The weights that the next folder is written of."""
    version: int
    """The policy's."""
    host: GeneratorHost = field(init=False)
    _open: set[int] = field(factory=set, init=False)
    _submitted: set[int] = field(factory=set, init=False)
    """Those of the open requests that were submitted last, which a host may refuse later on."""
    _others: set[str] = field(factory=set, init=False)

    def write_present(self, folder: Path, _form: WeightForm) -> None:
        """Write the weights that are handed over, as the ranks of a run do."""
        write_weights(folder, iter(self._weights.tensors()), shard_bytes=FILE_BYTES)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.host.submit(requests)
        self._submitted = {request.request_id for request in requests}
        self._open |= self._submitted

    def poll(self, timeout: float) -> list[Completion]:
        try:
            completions = self.host.poll(timeout)
        except EngineError:
            self._open -= self._submitted
            raise
        self._open -= {completion.request_id for completion in completions}
        return completions

    def abort(self, request_ids: Sequence[int] | None) -> None:
        self.host.abort(request_ids)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        self.host.end_sessions(sessions)

    def update(self, weights: WeightSource, version: int, target: str) -> None:
        self._weights = weights
        self.host.write(version, target)
        self.host.update(version, target)
        if target == POLICY:
            self.version = version
        else:
            self._others.add(target)

    def release(self, target: str) -> None:
        self.host.release(target)
        self._others.discard(target)

    def sleep(self) -> None:
        self.host.sleep()

    def close(self) -> None:
        self.host.close()

    def settles(self) -> bool:
        """End what is under way, and drop other weights than the policy's. Return False where it fails or something does not come back."""
        until = monotonic() + SETTLE_SECONDS
        try:
            self.abort(None)
            while self._open and monotonic() < until:
                self.poll(0.1)
            for target in tuple(self._others):
                self.release(target)
        except EngineError:
            return False
        return not self._open


def placement_of(subject: Subject[Any]) -> Placement:
    """Return the place in which the generator is held to its promises."""
    chosen: Placement | None = subject.hooks["placement"]() if "placement" in subject.hooks else None
    return chosen or description_of(subject).placement


def description_of(subject: Subject[Any]) -> GeneratorDescription:
    """Return what the generator declares: its plugin's description, or that which a suite gives."""
    if subject.plugin is not None:
        return subject.plugin.loaded.describe_generator(subject.plugin.options)
    description: GeneratorDescription = subject.hooks["description"]()
    return description


def place_subject(subject: Subject[Any], placement: GeneratorPlacement) -> Subject[Any]:
    """Return the subject as it is held to its promises in this place; "auto": where its description says.

    Raises UnsupportedError for a place where it cannot be, as planning a run does.
    """
    if placement != "auto":
        choose_placement(subject.label, description_of(subject), GeneratorTable(subject.label, placement=placement))
        subject = evolve(subject, hooks={**subject.hooks, "placement": lambda: placement})
    if placement_of(subject) == "process" and subject.plugin is None:
        raise UnsupportedError(
            f"{subject.label} is a generator without its plugin, which a process of its own could not make",
            remedy="Name the plugin that makes it in `plugin`",
        )
    return subject


@contextmanager
def start_placed(subject: Subject[Any], start: GeneratorStart, *, is_alone: bool) -> Iterator[tuple[PlacedGenerator, int]]:
    """Start the generator where its subject says, and close it in the end. Yields it with the version of its weights.

    One in a process of its own may have been started for another promise, and then has a later version than that of `start`; never where it
    `is_alone`.
    """
    placement = placement_of(subject)
    if placement == "rank":
        called = CalledGenerator(part_of(subject.make(), subject.label, "generator"))
        called.start(start)
        try:
            yield called, start.version
        finally:
            called.close()
    elif placement == "process" and not is_alone and _shared is not None:
        with _borrow(subject, start) as shared:
            yield shared, shared.version
    else:
        hosted = _start_hosted(subject, start)
        try:
            yield hosted, start.version
        finally:
            hosted.close()


def _start_hosted(subject: Subject[Any], start: GeneratorStart) -> HostedGenerator:
    hosted = HostedGenerator(start.weights, start.version)
    folders = WeightFolders.open(hosted.write_present, start.model, description_of(subject), subject.label, None)
    facts = SamplerFacts(start.eos_token_ids)
    try:
        folders.write(start.version)
        if placement_of(subject) == "remote":
            driver = GeneratorDriver(part_of(subject.make(), subject.label, "generator"))
            hosted.host = RemoteHost.start(driver, folders, facts, start.version)
        else:
            assert subject.plugin is not None, "placed without a plugin"
            facts = evolve(facts, folder=Path(mkdtemp(prefix="replicas-", dir=start.model.path)))
            hosted.host = ReplicaHost.start(
                subject.plugin.to_lock_entry(),
                CONTEXT,
                facts,
                folders,
                label=subject.label,
                version=start.version,
                replicas=1,
                launcher=LocalLauncher((start.device,)),
            )
    except BaseException as error:
        close_after(error, folders.close)
        raise
    return hosted


_shared: dict[tuple[str, tuple[int, ...]], HostedGenerator] | None = None
"""By plugin with its options and end tokens, those that promises share; None outside of `share_starts`."""


@contextmanager
def share_starts() -> Iterator[None]:
    """Let promises share generators in processes of their own; what a promise ends with is given the next one's weights."""
    global _shared
    before, _shared = _shared, {}
    try:
        yield
    finally:
        ended, _shared = _shared, before
        for hosted in ended.values():
            hosted.close()


@contextmanager
def _borrow(subject: Subject[Any], start: GeneratorStart) -> Iterator[HostedGenerator]:
    """Lend a shared generator, with the weights of `start`; one whose promise fails in it is closed."""
    assert _shared is not None
    assert subject.plugin is not None
    key = json.dumps(subject.plugin.to_lock_entry(), sort_keys=True), start.eos_token_ids
    hosted = _shared.pop(key, None)
    if hosted is not None and not hosted.settles():
        hosted.close()
        hosted = None
    if hosted is None:
        hosted = _start_hosted(subject, start)
    else:
        hosted.update(start.weights, hosted.version + 1, POLICY)
    try:
        yield hosted
    except BaseException as error:
        close_after(error, hosted.close)
        raise
    _shared[key] = hosted
