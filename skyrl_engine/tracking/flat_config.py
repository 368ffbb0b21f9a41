"""A configuration as flat names and values, without secrets."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "(hidden)"

_SECRET_KEY = re.compile(
    r"(^|_)(token|secrets?|password|passwd|passphrase|bearer|cookies?|auth|authorization|credentials?|apikey|(api|access|private|signing)_key)$"
)
_BETWEEN_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_SECRET_VARIABLE = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)$")
_USER = re.compile(r"(\w+://)[^/?#\s]+@")
_QUERY = re.compile(r"([?&][^=&\s]*(?:token|secret|password|key|signature|sig)[^=&\s]*=)[^&\s#]+", re.IGNORECASE)
_SHORTEST = 8
"""Characters of a value of the environment that is looked for in texts; shorter ones occur by chance."""

Flat = dict[str, str | int | float | bool]


def flatten_config(config: Mapping[str, Any]) -> Flat:
    """Return the values of a configuration by their dotted keys: `loss.use`, `environments.0.use`. What is none is left out.

    Lists of plain values are JSON. Texts and numbers under a key that is called like a secret, or below one, are `HIDDEN`, and so is what
    `hide_secrets` finds.
    """
    return dict(_flatten(config, "", is_secret=False))


def _flatten(value: Any, key: str, *, is_secret: bool) -> Iterator[tuple[str, str | int | float | bool]]:
    inner = f"{key}." if key else ""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flatten(item, f"{inner}{name}", is_secret=is_secret or _is_secret(str(name)))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{inner}{number}", is_secret=is_secret)
    elif value is None or (isinstance(value, list | tuple) and not value):
        return
    elif is_secret and value != "" and not isinstance(value, bool):
        yield key, HIDDEN
    elif isinstance(value, list | tuple):
        # JSON writes quotes and letters of other scripts in another way, in which no secret would be found
        yield key, json.dumps([item if isinstance(item, int | float | None) else hide_secrets(str(item)) for item in value])
    else:
        yield key, hide_secrets(value) if isinstance(value, str) else value


def _is_secret(name: str) -> bool:
    return _SECRET_KEY.search(_BETWEEN_WORDS.sub("_", name).lower()) is not None


def hide_secrets(text: str) -> str:
    """Return a text without users and keys in its URLs, and without values of environment variables that are called like secrets."""
    values = [value for name, value in os.environ.items() if len(value) >= _SHORTEST and _SECRET_VARIABLE.search(name)]
    for value in sorted(values, key=len, reverse=True):  # one may begin with another
        text = text.replace(value, HIDDEN)
    return _QUERY.sub(rf"\g<1>{HIDDEN}", _USER.sub(rf"\g<1>{HIDDEN}@", text))
