"""Places where the generators of a run live: on its ranks, in processes of their own, or behind a client in the controller's process."""

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from attrs import define, field

from skyrl_engine.contracts.kinds.generator import (
    POLICY,
    Completion,
    GenerationRequest,
    GeneratorDescription,
    WeightForm,
    WeightSource,
)
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.model_facts.facts import ModelFacts, find_file
from skyrl_engine.scratch import ScratchFolder
from skyrl_engine.workers.generation import GeneratorDriver, StoredWeights
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.messages import (
    AbortRequests,
    CloseGenerator,
    EndSessions,
    LoadTarget,
    PublishWeights,
    ReleaseTarget,
    StartGenerator,
)
from skyrl_engine.workers.sampler_facts import SamplerFacts
from skyrl_engine.workers.session_places import SessionPlaces
from skyrl_engine.workers.weight_files import WrittenWeights

logger = logging.getLogger(__name__)


class GeneratorHost(Protocol):
    """Generators at work, wherever they live. Requests of a session go to the same one, where its cache is, a new session to the one with least
    under way.
    """

    @property
    def concurrent(self) -> bool:
        """Say whether they sample while the ranks do something else."""

    @property
    def on_ranks(self) -> bool:
        """Say whether they live in the ranks' processes, and end with them."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Hand over requests; returns at once."""

    def poll(self, timeout: float) -> list[Completion]:
        """Return completions: at least one, unless `timeout` seconds go by without any."""

    def abort(self, request_ids: Sequence[int] | None) -> None:
        """End requests (None: all); each still comes back once."""

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Free what is kept of these sessions."""

    def write(self, version: int, target: str) -> None:
        """Gather the present weights as those of `version`, for `update`; the ranks may change theirs after it."""

    def update(self, version: int, target: str) -> None:
        """Let the generators sample from the weights that were gathered under this version and target from now on."""

    def load(self, model: ModelConfig, target: str) -> None:
        """Let them sample from weights in files under the name `target`, as version 0."""

    def release(self, target: str) -> None:
        """Drop a weight set other than the policy's."""

    def sleep(self) -> None:
        """Let the generators free their devices; no request is under way."""

    def wake(self, besides: str | None = None) -> None:
        """Give them all weights again that they had; those of the target `besides` come in an `update` next."""

    def close(self) -> None:
        """End the generators, with requests under way too."""


@define(eq=False)
class RankHost:
    """A generator on every data-parallel rank; it samples where a call of the controller waits for it, and not while the ranks train."""

    group: WorkerGroup
    _places: SessionPlaces = field(init=False)
    _refused: list[int] = field(factory=list, init=False)
    """Requests of a call that some rank refused."""

    concurrent, on_ranks = False, True

    def __attrs_post_init__(self) -> None:
        self._places = SessionPlaces(self.group.topology.dp)

    @classmethod
    def start(cls, group: WorkerGroup, lock: "dict[str, object]", facts: SamplerFacts, version: int) -> "RankHost":
        """Start a generator on every rank with the weights as they are. Raises what the start of a generator raises."""
        group.ask(StartGenerator(lock, facts, version))
        return cls(group)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        try:
            self.group.submit(self._places.share(requests))
        except EngineError:
            # some ranks may have taken theirs, and answer them when they are asked next
            self._refused += [request.request_id for request in requests]
            raise

    def poll(self, timeout: float) -> list[Completion]:
        completions = self.group.poll(timeout, self._places.busy)
        self._places.finish([*(completion.request_id for completion in completions), *self._refused])
        self._refused.clear()
        if completions and timeout > 0:
            # the ranks need not wait for whoever looks at what came
            self.group.go_on_sampling(self._places.busy)
        return completions

    def abort(self, request_ids: Sequence[int] | None) -> None:
        self.group.ask(AbortRequests(request_ids))

    def end_sessions(self, sessions: Sequence[int]) -> None:
        self.group.ask(EndSessions(sessions))
        self._places.end(sessions)

    def write(self, version: int, target: str) -> None:
        """Do nothing: the ranks give their present weights in `update`."""

    def update(self, version: int, target: str) -> None:
        self.group.ask(PublishWeights(version, target))
        if target == POLICY:
            self._places.forget_idle()

    def load(self, model: ModelConfig, target: str) -> None:
        self.group.ask(LoadTarget(model, 0, target))

    def release(self, target: str) -> None:
        self.group.ask(ReleaseTarget(target))

    def sleep(self) -> None:
        raise AssertionError("planning refuses generators on ranks that are to leave their devices to ranks")

    def wake(self, besides: str | None = None) -> None:  # noqa: ARG002 - the host's signature
        raise AssertionError("a generator that never sleeps is not woken")

    def close(self) -> None:
        self.group.ask(CloseGenerator())


@define(eq=False)
class WeightFolders:
    """Folders of weights by target and version, which generators outside of the ranks read.

    A folder stays until a later version of its target was taken by all generators, so that one that dies can be given it again.
    """

    write_present: Callable[[Path, WeightForm], object]
    """Writes the present weights into an empty folder, as a PEFT folder for the form "adapter", whole ones for any other."""
    model: ModelConfig
    form: WeightForm | None
    """The form that the generators take; None: they take none."""
    root: Path
    _scratch: ScratchFolder | None = None
    _written: dict[tuple[str, int], WrittenWeights] = field(factory=dict, init=False)

    @classmethod
    def open(
        cls,
        write_present: Callable[[Path, WeightForm], object],
        model: ModelConfig,
        description: GeneratorDescription,
        label: str,
        root: Path | None,
    ) -> "WeightFolders":
        """Begin an empty folder at `root`, or a temporary one. Raises UnsupportedError for a generator that takes no form that files give."""
        available = {"tensors", "directory"}
        if ModelFacts(model).has_servable_adapters:
            available.add("adapter")
        form = next((form for form in description.accepts if form in available), None)
        if form is None and description.accepts:
            raise UnsupportedError(
                f"{label} takes weights as {' or '.join(description.accepts)}, and outside of the ranks they are given as "
                f"{' or '.join(sorted(available))}",
                remedy="Choose another generator, or one that runs on the ranks",
            )
        scratch = None
        if root is None:
            scratch = ScratchFolder("weights")
            root = scratch.path / "weights"
        root = root.absolute()  # processes on other nodes have directories of their own
        shutil.rmtree(root, ignore_errors=True)  # of a run that was killed
        root.mkdir(parents=True)
        return cls(write_present, model, form, root, scratch)

    def write(self, version: int, target: str = POLICY) -> None:
        """Write the present weights. Raises ModelError where there is no room."""
        if self.form is None:
            return
        folder = self.root / f"{target}-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.write_present(folder, self.form)
        if self.form == "adapter":
            self._written[target, version] = WrittenWeights(None, folder)
            return
        if (config := find_file(self.model, "config.json")) is not None:
            shutil.copyfile(config, folder / "config.json")
        self._written[target, version] = WrittenWeights(folder, None)

    def get(self, version: int, target: str = POLICY) -> WeightSource:
        """Return what was written of a version."""
        return WrittenWeights(None, None) if self.form is None else self._written[target, version]

    def remove_before(self, version: int, target: str) -> None:
        """Delete the folders of a target's earlier versions."""
        for key in [key for key in self._written if key[0] == target and key[1] < version]:
            shutil.rmtree(self._written.pop(key).path, ignore_errors=True)

    def release(self, target: str) -> None:
        """Delete all folders of a target."""
        for key in [key for key in self._written if key[0] == target]:
            shutil.rmtree(self._written.pop(key).path, ignore_errors=True)

    def close(self) -> None:
        """Delete everything."""
        self._written.clear()
        shutil.rmtree(self.root, ignore_errors=True)
        if self._scratch is not None:
            self._scratch.close()


@define(eq=False)
class RemoteHost:
    """A generator in this process that drives servers elsewhere; it works in threads of its own."""

    driver: GeneratorDriver
    folders: WeightFolders
    _weights: dict[str, tuple[WeightSource, int]] = field(factory=dict, init=False)
    """By target, what the generator was given last."""

    concurrent, on_ranks = True, False

    @classmethod
    def start(cls, driver: GeneratorDriver, folders: WeightFolders, facts: SamplerFacts, version: int) -> "RemoteHost":
        """Start the generator with the weights that were written under `version`. Raises what its start raises."""
        driver.start(facts.make_start(folders.model, "cpu", folders.get(version), version=version))
        host = cls(driver, folders)
        host._weights[POLICY] = folders.get(version), version
        return host

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.driver.submit(requests)

    def poll(self, timeout: float) -> list[Completion]:
        return self.driver.poll(timeout, eager=True)

    def abort(self, request_ids: Sequence[int] | None) -> None:
        self.driver.abort(request_ids)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        self.driver.end_sessions(sessions)

    def write(self, version: int, target: str) -> None:
        self.folders.write(version, target)

    def update(self, version: int, target: str) -> None:
        self._give(self.folders.get(version, target), version, target)
        self.folders.remove_before(version, target)

    def load(self, model: ModelConfig, target: str) -> None:
        self._give(StoredWeights(model), 0, target)

    def release(self, target: str) -> None:
        self.driver.release(target)
        self._weights.pop(target, None)
        self.folders.release(target)

    def sleep(self) -> None:
        self.driver.sleep()

    def wake(self, besides: str | None = None) -> None:
        for target, (weights, version) in self._weights.items():
            if target != besides:
                self.driver.update(weights, version, target)

    def _give(self, weights: WeightSource, version: int, target: str) -> None:
        self.driver.update(weights, version, target)
        self._weights[target] = weights, version

    def close(self) -> None:
        try:
            self.driver.close()
        finally:
            self.folders.close()
