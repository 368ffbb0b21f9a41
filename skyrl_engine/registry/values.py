"""Check the values that products declare beside their methods: one function per kind, which returns sentences about mistakes."""

from collections.abc import Iterator
from typing import Any, get_args

from skyrl_engine.contracts.kinds.advantage import AdvantageClaims
from skyrl_engine.contracts.kinds.environment import EnvironmentClaims
from skyrl_engine.contracts.kinds.generator import GeneratorCapability, GeneratorDescription, WeightForm
from skyrl_engine.contracts.kinds.reducer import EmptySequence


def of_advantage(product: Any) -> Iterator[str]:
    yield from of_correction(product)
    if hasattr(product, "claims") and not isinstance(product.claims, AdvantageClaims):
        yield f"claims must be AdvantageClaims, is {product.claims!r}"


def of_collator(product: Any) -> Iterator[str]:
    if hasattr(product, "rows") and product.rows not in ("padded", "packed"):
        yield f"rows must be 'padded' or 'packed', is {product.rows!r}"


def of_correction(product: Any) -> Iterator[str]:
    if hasattr(product, "needs") and not _names(product.needs):
        yield f"needs must be a tuple of names, is {product.needs!r}"


def of_environment(product: Any) -> Iterator[str]:
    if hasattr(product, "claims") and not isinstance(product.claims, EnvironmentClaims):
        yield f"claims must be EnvironmentClaims, is {product.claims!r}"


def of_generator_description(described: Any) -> Iterator[str]:
    """Check what describes a generator; the generator itself declares nothing."""
    if not isinstance(described, GeneratorDescription):
        yield f"it returned {type(described).__name__}"
        return
    for name, allowed in (("capabilities", get_args(GeneratorCapability)), ("accepts", get_args(WeightForm))):
        if strange := sorted(set(getattr(described, name)) - set(allowed)):
            yield f"{name} must be among {', '.join(map(repr, allowed))}, and there is {strange[0]!r}"
    if described.placement not in (places := ("rank", "process", "remote")):
        yield f"placement must be one of {', '.join(map(repr, places))}, is {described.placement!r}"
    if not isinstance(described.concurrency, int) or described.concurrency < 1:
        yield f"concurrency must be a number from 1 on, is {described.concurrency!r}"
    if "module" in described.accepts and described.placement != "rank":
        yield 'the form "module" is memory of a rank, so placement must be "rank"'
    if "recorded" in described.capabilities and described.accepts:
        yield f'what is "recorded" needs no weights, so accepts must be empty, is {described.accepts!r}'


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
    yield from _flags(product, "batch_local")


def _flags(product: Any, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(product, name, False)
        if not isinstance(value, bool):
            yield f"{name} must be True or False, is {value!r}"


def _names(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(name, str) for name in value)
