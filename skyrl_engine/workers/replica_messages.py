"""Messages between the controller and the processes of a generator's replicas. They travel by pickle."""

import traceback
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.generator import Completion, WeightSource
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import EngineError
from skyrl_engine.workers.sampler_facts import SamplerFacts


@frozen
class ReplicaStart:
    """The first message: the generator's lock, and what it starts with."""

    lock: Mapping[str, Any]
    context: FactoryContext
    facts: SamplerFacts
    model: ModelConfig
    device: str
    weights: WeightSource
    version: int


@frozen
class Call:
    """A call of a method of `GeneratorDriver`, which is answered with a `CallEnd`."""

    method: str
    arguments: tuple[Any, ...] = ()


@frozen
class CallEnd:
    """The end of a call, or of the start: how it failed, if it did; `trace` is for errors that have no type of ours."""

    error: EngineError | None = None
    cause: str | None = None
    trace: str = ""

    @classmethod
    def of_failure(cls, error: Exception) -> "CallEnd":
        """Describe what a call met."""
        known = error if isinstance(error, EngineError) else None
        return cls(known, f"{type(error).__name__}: {error}".splitlines()[0], traceback.format_exc())


@frozen(eq=False)
class Sampled:
    """Completions; none are a sign of life."""

    completions: list[Completion]
