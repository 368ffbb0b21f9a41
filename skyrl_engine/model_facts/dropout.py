"""Shares of dropout that a model's configuration states, and a configuration without them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_KEY = re.compile(r"^(?!classifier|summary).*(dropout|pdrop|dropout_prob|dropout_rate|layerdrop)$")
"""Keys of dropout, but for those of heads that a language model does not have."""

Parts = tuple[str, ...]
"""Keys from the whole configuration to a part of it, such as `("text_config",)`; empty for the whole."""


def find_shares(stated: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares above 0 of one part of a configuration, by their keys."""
    return {key: float(value) for key, value in stated.items() if _is_share(key, value) and value > 0}


def collect_shares(stated: Mapping[str, Any]) -> dict[Parts, dict[str, float]]:
    """Return the shares above 0 of a configuration and of all its parts."""
    return {parts: shares for parts, values in _iterate_parts(stated, ()) if (shares := find_shares(values))}


def switch_off_config(config: Any) -> None:
    """Set every share of dropout in a `transformers.PretrainedConfig`, and in the configurations within it, to 0."""
    import transformers

    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            switch_off_config(value)
        elif _is_share(key, value):
            setattr(config, key, type(value)(0))


def restore_shares(written: dict[str, Any], shares: Mapping[Parts, Mapping[str, float]]) -> None:
    """Set the shares that `collect_shares` found in what was written of a configuration, as far as its parts were written."""
    for parts, values in shares.items():
        part: Any = written
        for key in parts:
            part = part.get(key) if isinstance(part, dict) else None
        if isinstance(part, dict):
            part.update(values)


def _iterate_parts(stated: Mapping[str, Any], parts: Parts) -> Iterator[tuple[Parts, Mapping[str, Any]]]:
    yield parts, stated
    for key, value in stated.items():
        if isinstance(value, Mapping):
            yield from _iterate_parts(value, (*parts, key))


def _is_share(key: object, value: object) -> bool:
    return isinstance(key, str) and bool(_KEY.search(key)) and isinstance(value, (int, float)) and not isinstance(value, bool)
