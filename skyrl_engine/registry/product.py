"""Check what a factory returned against its kind's contract, before a run relies on it."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, get_args

from skyrl_engine.contracts.kinds.reducer import EmptySequence
from skyrl_engine.errors import ContractError
from skyrl_engine.registry.host import Owner
from skyrl_engine.registry.kinds import KINDS, Kind


def check_product(kind: Kind, product: object, owner: Owner, hook: str) -> None:
    """Raise ContractError when the product lacks a member of the contract, a method that takes its arguments, or an allowed value."""
    if product is None:
        raise ContractError(f"{hook} of {owner.label} returned None", remedy=f"Return {kind.with_article}")
    problems = [*_missing_members(kind, product), *_VALUES.get(kind.name, _nothing)(product)]
    if problems:
        raise ContractError(
            f"{hook} of {owner.label} returned {type(product).__name__}, which is not {kind.with_article}: {problems[0]}",
            remedy=f"Correct it; docs/{kind.page.partition('#')[0]} names the contract",
            details=problems[1:],
        )


def contract_of(kind: Kind) -> type | None:
    """The Protocol of a kind's product."""
    if kind.contract is None:
        return None
    module, _, name = kind.contract.partition(":")
    contract: type = getattr(import_module(module), name)
    return contract


def _missing_members(kind: Kind, product: object) -> Iterator[str]:
    contract = contract_of(kind)
    if contract is None:
        return
    for name in contract.__annotations__:
        if name not in kind.late and not hasattr(product, name):
            yield f"it has no attribute {name!r}"
    for name, promised in vars(contract).items():
        if inspect.isfunction(promised) and (not name.startswith("_") or name == "__call__"):
            method = getattr(product, name, None)
            if not callable(method):
                yield "it cannot be called" if name == "__call__" else f"it has no method {name!r}"
            elif problem := _refuses(method, promised):
                yield f"{name}{inspect.signature(promised)} is called, and {problem}"


def _refuses(method: Callable[..., Any], promised: Callable[..., Any]) -> str | None:
    """Why `method` cannot take the promised arguments, None if it can: positional ones by place, keyword-only ones by name."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return None  # compiled code does not say what it takes
    _, *parameters = inspect.signature(promised).parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    keywords = {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        return f"it takes {signature}: {error}"
    return None


def _loss(product: Any) -> Iterator[str]:
    yield from _needs(product)
    for name in ("reducers", "advised_reducers"):
        value = getattr(product, name, None)
        if not (value is None or _names(value)):
            yield f"{name} must be None or a tuple of names, is {value!r}"
    yield from _flags(product, "batch_local", "homogeneous")


def _flags(product: Any, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(product, name, False)
        if not isinstance(value, bool):
            yield f"{name} must be True or False, is {value!r}"


def _needs(product: Any) -> Iterator[str]:
    if hasattr(product, "needs") and not _names(product.needs):
        yield f"needs must be a tuple of names, is {product.needs!r}"


def _collator(product: Any) -> Iterator[str]:
    if hasattr(product, "rows") and product.rows not in ("padded", "packed"):
        yield f"rows must be 'padded' or 'packed', is {product.rows!r}"


def _reducer(product: Any) -> Iterator[str]:
    allowed = get_args(EmptySequence)
    if hasattr(product, "empty_sequence") and product.empty_sequence not in allowed:
        yield f"empty_sequence must be one of {', '.join(map(repr, allowed))}, is {product.empty_sequence!r}"
    yield from _flags(product, "batch_local")


def _nothing(product: object) -> Iterator[str]:  # noqa: ARG001 - the signature of its siblings
    yield from ()


def _names(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(name, str) for name in value)


_VALUES: dict[str, Callable[[Any], Iterator[str]]] = {
    "collator": _collator,
    "correction": _needs,
    "loss": _loss,
    "reducer": _reducer,
}
assert set(KINDS) >= set(_VALUES), "values are checked for a kind that does not exist"
