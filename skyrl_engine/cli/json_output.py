"""Print measured numbers for `--json`: JSON has no NaN and no infinity."""

import json
import math
from collections.abc import Mapping
from typing import Any

from skyrl_engine.visible import in_quotes


def to_finite_json(value: Any) -> str:
    """Return `value` as indented JSON; a number that is not finite becomes null."""
    return in_quotes(json.dumps(_replace_infinite(value), indent=2, allow_nan=False))


def _replace_infinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_infinite(member) for key, member in value.items()}
    return [_replace_infinite(member) for member in value] if isinstance(value, list | tuple) else value
