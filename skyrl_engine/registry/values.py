"""Check the values that products declare in addition to their methods: one function per kind, which returns sentences about mistakes."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from skyrl_engine.contracts.kinds.advantage import AdvantageClaims
from skyrl_engine.contracts.kinds.backend import BackendDescription, Capability
from skyrl_engine.contracts.kinds.environment import EnvironmentClaims
from skyrl_engine.contracts.kinds.generator import GeneratorCapability, GeneratorDescription, WeightForm
from skyrl_engine.contracts.kinds.reducer import EmptySequence
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.contracts.values.returned import describe_returned
from skyrl_engine.contracts.values.topology import Topology


def of_advantage(product: Any) -> Iterator[str]:
    yield from of_correction(product)
    if hasattr(product, "claims") and not isinstance(product.claims, AdvantageClaims):
        yield f"claims must be AdvantageClaims, is {product.claims!r}"


def of_collator(product: Any) -> Iterator[str]:
    if hasattr(product, "rows") and product.rows not in get_args(RowKind):
        yield f"rows must be {', '.join(map(repr, get_args(RowKind)))}, is {product.rows!r}"
    carried = getattr(product, "carries", ())
    if not isinstance(carried, tuple | list | set | frozenset):
        yield f"carries must be a set of names, is {carried!r}"


def of_correction(product: Any) -> Iterator[str]:
    if hasattr(product, "needs") and not _names(product.needs):
        yield f"needs must be a tuple of names, is {product.needs!r}"


def of_environment(product: Any) -> Iterator[str]:
    if hasattr(product, "claims") and not isinstance(product.claims, EnvironmentClaims):
        yield f"claims must be EnvironmentClaims, is {product.claims!r}"


def of_generator_description(described: Any) -> Iterator[str]:
    """Check what describes a generator; the generator itself declares nothing."""
    if not isinstance(described, GeneratorDescription):
        yield f"it returned {describe_returned(described)}"
        return
    for name, allowed in (("capabilities", get_args(GeneratorCapability)), ("accepts", get_args(WeightForm))):
        if not isinstance(getattr(described, name), tuple | list | set | frozenset):
            yield f"{name} must be a set of names, is {getattr(described, name)!r}"
            return
        if strange := sorted({*map(str, getattr(described, name))} - set(allowed)):
            yield f"{name} must be among {', '.join(map(repr, allowed))}, and there is {strange[0]!r}"
    if described.placement not in (places := ("rank", "process", "remote")):
        yield f"placement must be one of {', '.join(map(repr, places))}, is {described.placement!r}"
    if not isinstance(described.concurrency, int) or described.concurrency < 1:
        yield f"concurrency must be a number from 1 on, is {described.concurrency!r}"
    if "module" in described.accepts and described.placement != "rank":
        yield 'the form "module" is memory of a rank, so placement must be "rank"'
    if "recorded" in described.capabilities and described.accepts:
        yield f'what is "recorded" needs no weights, so accepts must be empty, is {described.accepts!r}'


def of_backend_description(described: Any) -> Iterator[str]:
    """Check what describes a backend, before planning reads it."""
    if not isinstance(described, BackendDescription):
        yield f"it returned {describe_returned(described)}"
        return
    # read as what it may be, not as what its class says: nothing checks the types of attributes
    facts: Any = described
    if not isinstance(facts.topology, Topology):
        yield f"topology must be a Topology, is {facts.topology!r}"
    if not isinstance(facts.capabilities, tuple | list | set | frozenset):
        yield f"capabilities must be a set of names, is {facts.capabilities!r}"
    elif strange := sorted({*map(str, facts.capabilities)} - set(get_args(Capability))):
        yield f"capabilities must be among {', '.join(map(repr, get_args(Capability)))}, and there is {strange[0]!r}"
    for name in ("refuse_model", "rehearse", "describe_state"):
        if not callable(getattr(facts, name)):
            yield f"{name} must be a function, is {getattr(facts, name)!r}"
    yield from _flags(facts, "means_over_step")
    if not isinstance(facts.environment, Mapping):
        yield f"environment must be a table of texts, is {facts.environment!r}"
    choices = facts.layout_choices
    if not (isinstance(choices, Mapping) and all(isinstance(each, tuple | list) and each for each in choices.values())):
        yield f"layout_choices must be a table of lists of values, is {choices!r}"


def of_loss(product: Any) -> Iterator[str]:
    yield from of_correction(product)
    for name in ("reducers", "advised_reducers"):
        value = getattr(product, name, None)
        if not (value is None or _names(value)):
            yield f"{name} must be None or a tuple of names, is {value!r}"
    yield from _flags(product, "batch_local", "homogeneous")


def of_reducer(product: Any) -> Iterator[str]:
    allowed = get_args(EmptySequence)
    if hasattr(product, "empty_sequence") and product.empty_sequence not in allowed:
        yield f"empty_sequence must be one of {', '.join(map(repr, allowed))}, is {product.empty_sequence!r}"
    yield from _flags(product, "batch_local", "additive", "selective")
    if not _names(getattr(product, "needs", ())):
        yield f"needs must be a tuple of names, is {product.needs!r}"


def _flags(product: Any, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(product, name, False)
        if not isinstance(value, bool):
            yield f"{name} must be True or False, is {value!r}"


def _names(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(name, str) for name in value)
