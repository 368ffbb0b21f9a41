"""A configuration as flat names and values, without secrets."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "(hidden)"

_SECRET_KEY = re.compile(r"(^|[._-])(token|secret|password|passwd|api_?key|credentials?|authorization)$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)$")
_USER = re.compile(r"(\w+://)[^/@\s]+@")
_QUERY = re.compile(r"([?&][^=&\s]*(?:token|secret|password|key|signature|sig)[^=&\s]*=)[^&\s#]+", re.IGNORECASE)
_SHORTEST = 8
"""Characters of a value of the environment that is looked for in texts; shorter ones occur by chance."""

Flat = dict[str, str | int | float | bool]


def flatten_config(config: Mapping[str, Any]) -> Flat:
    """Return the values of a configuration by their dotted keys: `loss.use`, `environments.0.use`. What is none is left out.

    Lists of plain values are JSON. A text under a key that is called like a secret is `HIDDEN`, and so is what `hide_secrets` finds.
    """
    return dict(_flatten(config, ""))


def _flatten(value: Any, key: str) -> Iterator[tuple[str, str | int | float | bool]]:
    inner = f"{key}." if key else ""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flatten(item, f"{inner}{name}")
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{inner}{number}")
    elif isinstance(value, (list, tuple)):
        if value:
            yield key, HIDDEN if _SECRET_KEY.search(key) else hide_secrets(json.dumps(value, default=str))
    elif isinstance(value, str):
        yield key, HIDDEN if value and _SECRET_KEY.search(key) else hide_secrets(value)
    elif value is not None:
        yield key, value


def hide_secrets(text: str) -> str:
    """Return a text without users and keys in its URLs, and without values of environment variables that are called like secrets."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET_VARIABLE.search(name):
            text = text.replace(value, HIDDEN)
    return _QUERY.sub(rf"\g<1>{HIDDEN}", _USER.sub(rf"\g<1>{HIDDEN}@", text))
