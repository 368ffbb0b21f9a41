"""A rank's generator: made from its lock, given the backend's weights, driven by the controller."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, evolve, field, frozen

from skyrl_engine.cleanup import finally_close
from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.backend import Backend, SharesStorage
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.generator import (
    POLICY,
    Completion,
    GenerationRequest,
    Generator,
    GeneratorDescription,
    GeneratorStart,
    KeepsSessions,
    Sleeps,
    Streams,
    TensorParallelGroup,
    WeightForm,
    WeightSource,
    as_completions,
)
from skyrl_engine.contracts.values.model import ComputeDtype, ModelConfig
from skyrl_engine.contracts.values.returned import describe_returned, require_vector
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.errors import ContractError, UnsupportedError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import blame
from skyrl_engine.workers.process_group import agree_with_first, join_tensor_parallel
from skyrl_engine.workers.wire_weights import iterate_wire_weights

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

EARLY_ANSWERS = 1000
"""Empty answers before their time, one after the other, that show that a generator has lost a request."""


@define(eq=False)
class OfferedWeights:
    """The `WeightSource` of one update, in one form, so that every rank knows whether weights are gathered; None: in no form at all."""

    form: WeightForm | None
    _backend: Backend
    _label: str = "the backend"
    _dtype: ComputeDtype = "float32"
    _stream: "Iterator[tuple[str, torch.Tensor]] | None" = field(default=None, init=False)

    @property
    def forms(self) -> frozenset[WeightForm]:
        return frozenset() if self.form is None else frozenset({self.form})

    def storage(self) -> "Mapping[str, torch.Tensor]":
        """The backend's own memory."""
        shown = find_storage(self._backend, self._label) if self.form == "module" else None
        assert shown is not None, "the memory of a backend was asked for that shows none"
        return shown

    def tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Full weights, which all ranks gather together: they come once."""
        assert self._stream is None, "weights are gathered once per update"
        self._stream = iterate_wire_weights(self._label, self._backend, self._dtype)
        return self._stream

    def directory(self) -> Path:
        raise AssertionError("a folder of weights was asked for in a rank")

    def adapter(self) -> Path:
        raise AssertionError("a folder of adapters was asked for in a rank")

    def finish(self) -> None:
        """Gather what nobody took: other ranks wait in the same collectives, whatever happened here."""
        if self.form == "tensors":
            for _ in self._stream or self.tensors():
                pass


@frozen
class StoredWeights:
    """The `WeightSource` of weights in files; every rank that samples reads them by itself."""

    model: ModelConfig

    @property
    def forms(self) -> frozenset[WeightForm]:
        return frozenset({"tensors"})

    def storage(self) -> "Mapping[str, torch.Tensor]":
        raise AssertionError("the memory of weights was asked for that lie in files")

    def tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        from skyrl_engine.modeling.sampler_model import iterate_stored_weights

        return iterate_stored_weights(self.model)

    def directory(self) -> Path:
        return Path(self.model.path)

    def adapter(self) -> Path:
        raise AssertionError("adapters alone were asked for of a whole model")


@define(eq=False)
class LoadedWeights:
    """The `WeightSource` of a model in memory, whose parameters and buffers `storage` names: nothing is trained, and nothing is copied."""

    _storage: "Mapping[str, torch.Tensor]"

    @classmethod
    def read(cls, model: ModelConfig, device: str) -> "LoadedWeights":
        """Read a model onto a device, with an existing adapter merged. Raises ModelError."""
        from skyrl_engine.modeling.sampler_model import fill, iterate_stored_weights, list_tensors, load_sampler_model

        loaded = load_sampler_model(model, device)
        if model.lora is not None:
            fill(loaded, iterate_stored_weights(model), model.path)
        return cls(dict(list_tensors(loaded)))

    @property
    def forms(self) -> frozenset[WeightForm]:
        return frozenset({"module"})

    def storage(self) -> "Mapping[str, torch.Tensor]":
        return self._storage

    def tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        raise AssertionError("a stream was asked for of weights that are shown")

    def directory(self) -> Path:
        raise AssertionError("a folder of weights was asked for that lie in memory")

    def adapter(self) -> Path:
        raise AssertionError("adapters alone were asked for of a whole model")


def find_storage(backend: Backend, label: str = "the backend") -> "Mapping[str, torch.Tensor] | None":
    """Return the memory of a backend's weights; None where it shows none. Raises ContractError, naming the backend, for anything else."""
    shown = backend.storage() if isinstance(backend, SharesStorage) else None
    if shown is not None and not isinstance(shown, Mapping):
        raise ContractError(
            f"{label} returned {describe_returned(shown)} from storage",
            remedy="Return a dict from names to tensors, or None, from storage",
        )
    return shown


def form_for(described: GeneratorDescription, backend: Backend, generator: str, target: str = POLICY) -> WeightForm | None:
    """Return the first form that a generator accepts and a backend gives; None for one that gives what was recorded. Raises UnsupportedError.

    Weights other than the policy's must not change by its steps, so they never are the backend's memory.
    """
    if "recorded" in described.capabilities:
        return None
    available = {"tensors"} if target != POLICY or find_storage(backend) is None else {"module", "tensors"}
    for form in described.accepts:
        if form in available:
            return form
    raise UnsupportedError(
        f"{generator} takes weights as {' or '.join(described.accepts) or 'nothing'}, and the backend gives {' or '.join(sorted(available))}",
        remedy="Choose another generator",
    )


@define(eq=False)
class GeneratorDriver:
    """A generator at work, wherever it lives: its failures name it, and what it returns is checked."""

    part: BoundPlugin[Generator]
    _open: int = field(default=0, init=False)

    def start(self, start: GeneratorStart) -> None:
        """Load the model, with the weights of the start."""
        with blame(self.part.owner, "start"):
            self.part.product.start(start)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with blame(self.part.owner, "submit"):
            self.part.product.submit(requests)
        self._open += len(requests)

    @property
    def is_sampling(self) -> bool:
        """True where requests are under way."""
        return self._open > 0

    def poll(self, timeout: float, *, eager: bool, agree: Callable[[bool], bool] | None = None) -> list[Completion]:
        """Sample for `timeout` seconds or until nothing is left; if `eager`, until something is finished.

        Ranks that sample together go step by step, and `agree` returns for all of them whether the first one stops.
        """
        until, completions, early = monotonic() + timeout, list[Completion](), 0
        while self._open:
            with blame(self.part.owner, "poll"):
                returned = self.part.product.poll(0.0 if agree else max(0.0, until - monotonic()))
            answer = as_completions(self.part.label, returned)
            self._open -= len(answer)
            completions += answer
            stops = bool(completions and eager) or monotonic() >= until
            if stops if agree is None else agree(stops):
                break
            early = 0 if answer or agree else early + 1
            if early == EARLY_ANSWERS:
                raise ContractError(
                    f"{self.part.label} answers nothing, without taking its time, while {self._open} requests are under way",
                    remedy="Return every request once, and nothing only when the timeout has passed",
                )
        return completions

    def read_sampled(self, request_id: int) -> "npt.NDArray[np.int32]":
        """int32[n]: the tokens sampled so far of a request under way. Raises ContractError for a generator that shows none."""
        product = self.part.product
        if not isinstance(product, Streams):
            raise ContractError(
                f"{self.part.label} declares the capability 'streaming' and has no method `read_sampled`",
                remedy="Implement contracts.Streams, or do not declare it",
            )
        with blame(self.part.owner, "read_sampled"):
            tokens = product.read_sampled(request_id)
        require_vector(self.part.label, "read_sampled", "the tokens", tokens, np.int32)
        return tokens

    def abort(self, request_ids: Sequence[int] | None) -> None:
        with blame(self.part.owner, "abort"):
            self.part.product.abort(request_ids)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Let the generator free what it keeps of sessions, if it keeps anything."""
        if isinstance(self.part.product, KeepsSessions):
            with blame(self.part.owner, "end_sessions"):
                self.part.product.end_sessions(sessions)

    def update(self, weights: WeightSource, version: int, target: str) -> None:
        """Give weights to `target`."""
        with blame(self.part.owner, "update"):
            self.part.product.update(weights, version, target)

    def release(self, target: str) -> None:
        with blame(self.part.owner, "release"):
            self.part.product.release(target)

    def sleep(self) -> None:
        """Let the generator free its devices."""
        product = self.part.product
        if not isinstance(product, Sleeps):
            raise ContractError(
                f"{self.part.label} declares the capability 'sleep' and has no method of that name",
                remedy="Implement contracts.Sleeps, or do not declare it",
            )
        with blame(self.part.owner, "sleep"):
            product.sleep()

    def close(self) -> None:
        with blame(self.part.owner, "close"):
            self.part.product.close()


@define(eq=False)
class RankGenerator:
    """The generator of a rank, if it has one, and the forms in which weights reach it; without one, weights are gathered for others."""

    _backend: Backend
    _description: GeneratorDescription
    _label: str
    _driver: GeneratorDriver | None
    _backend_label: str = field(default="the backend", kw_only=True)
    _dtype: ComputeDtype = field(default="float32", kw_only=True)
    _together: TensorParallelGroup | None = field(default=None, kw_only=True)
    """The ranks that this one samples with; None: it samples alone, or nothing."""

    @classmethod
    def start(
        cls,
        lock: Mapping[str, Any],
        context: FactoryContext,
        backend: Backend,
        *,
        start: Callable[[WeightSource], GeneratorStart],
        topology: Topology,
        backend_label: str = "the backend",
        dtype: ComputeDtype = "float32",
    ) -> "RankGenerator":
        """Make the generator of a lock, and start it with what `start` says of the weights as they are. `dtype` is the run's precision.

        Tensor-parallel ranks sample together where the generator claims to; else the first of them samples alone, and other ranks of a
        data-parallel one gather weights for it.
        """
        selected = SelectedPlugin.from_lock(lock)
        described = selected.loaded.describe_generator(selected.options)
        place = backend.coords
        share = topology.tp > 1 and "tensor_parallel" in described.capabilities
        samples = place.cp == place.pp == 0 and (share or place.tp == 0)
        together = join_tensor_parallel(topology, place) if share and samples else None
        driver = GeneratorDriver(selected.bind("generator", context)) if samples else None
        generation = cls(
            backend, described, str(selected.loaded.record), driver, backend_label=backend_label, dtype=dtype, together=together
        )
        weights = OfferedWeights(form_for(described, backend, generation._label), backend, backend_label, dtype)
        with finally_close(weights.finish):
            if driver is not None:
                driver.start(evolve(start(weights), together=together))
        return generation

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Take requests, which all ranks of a data-parallel one are given; those that sample nothing leave them to others."""
        if self._driver is not None:
            self._driver.submit(requests)

    def poll(self, timeout: float, *, eager: bool) -> list[Completion]:
        """Sample as `GeneratorDriver.poll` says. Of ranks that sample together, the first one answers."""
        if self._driver is None:
            return []
        if self._together is None:
            return self._driver.poll(timeout, eager=eager)
        completions = self._driver.poll(timeout, eager=eager, agree=partial(agree_with_first, self._together))
        return [] if self._together.rank else completions

    def abort(self, request_ids: Sequence[int] | None) -> None:
        if self._driver is not None:
            self._driver.abort(request_ids)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        """Let the generator free what it keeps of sessions, if it keeps anything."""
        if self._driver is not None:
            self._driver.end_sessions(sessions)

    def update(self, version: int, target: str) -> None:
        """Give the present weights to `target`. Every rank takes part."""
        weights = OfferedWeights(
            form_for(self._description, self._backend, self._label, target), self._backend, self._backend_label, self._dtype
        )
        with finally_close(weights.finish):
            if self._driver is not None:
                self._driver.update(weights, version, target)

    def load(self, model: ModelConfig, version: int, target: str) -> None:
        """Give weights in files to `target`. Raises UnsupportedError for a generator that takes none, ModelError for the files."""
        form_for(self._description, self._backend, self._label, target)
        if self._driver is not None:
            self._driver.update(StoredWeights(model), version, target)

    def release(self, target: str) -> None:
        if self._driver is not None:
            self._driver.release(target)

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
