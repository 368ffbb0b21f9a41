"""Check the product of a factory against its kind's contract, before a run relies on it."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from skyrl_engine.errors import ContractError
from skyrl_engine.registry.host import PluginHost
from skyrl_engine.registry.kinds import Kind, import_object
from skyrl_engine.registry.owner import Owner


def check_product(kind: Kind, product: object, owner: Owner, hook: str) -> None:
    """Raise ContractError when the product lacks a member of the contract, a method that takes its arguments, or an allowed value."""
    if product is None:
        raise ContractError(f"{hook} of {owner.label} returned None", remedy=f"Return {kind.with_article}")
    problems = [*list_missing_members(kind, product), *(import_object(kind.values)(product) if kind.values else ())]
    if problems:
        raise ContractError(
            f"{hook} of {owner.label} returned {type(product).__name__}, which is not {kind.with_article}: {problems[0]}",
            remedy=f"Correct it; docs/{kind.page.partition('#')[0]} names the contract",
            details=problems[1:],
        )
    if kind.product_hooks:
        check_hooks(kind, product, owner)


def check_hooks(kind: Kind, product: object, owner: Owner) -> None:
    """Raise ContractError when the product implements none of the kind's hooks, PluginBrokenError when one does not fit."""
    hooks = PluginHost().register(product, owner)
    if not hooks & set(kind.product_hooks):
        raise ContractError(
            f"{owner.label}: {type(product).__name__} implements no {kind.name} hook",
            remedy=f"Implement one of {', '.join(kind.product_hooks)}",
        )


def contract_of(kind: Kind) -> type | None:
    """Return the Protocol of a kind's product."""
    return None if kind.contract is None else import_object(kind.contract)


def list_missing_members(kind: Kind, product: object) -> list[str]:
    """Return what a product lacks of its kind's contract, a sentence each: attributes, methods, and arguments that those do not take."""
    return list(_missing_members(kind, product))


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
    """Say why `method` cannot take the promised arguments (positional ones by position, keyword-only ones by name); None if it can."""
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
