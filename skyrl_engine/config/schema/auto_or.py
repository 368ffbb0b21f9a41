"""A validator for keys that may say "auto"."""

from collections.abc import Callable
from typing import Any

from attrs import frozen

from skyrl_engine.registry.kinds import AUTO


@frozen
class AutoOr:
    """Allows "auto", and what `validator` allows."""

    validator: Callable[[Any, Any, Any], None]

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        if value != AUTO:
            self.validator(instance, attribute, value)
