"""The configuration object for another engine's function: filled from the plugin's table, read by attribute, item or `get`."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs


class Options:
    """Base of the classes that `options_class` makes. `config.name`, `config["name"]`, `config.get("name", default)` and `**config` work."""

    __slots__ = ()
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            known = ", ".join(self.keys()) or "none"
            raise AttributeError(
                f"the function reads config.{name}, which is no option; name it in config={{...}} (named: {known})"
            )
        raise AttributeError(name)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.defaults

    def __reduce__(self) -> tuple[object, ...]:
        """Tell pickle how to make the class again, because it is not in any module."""
        return _remake, (type(self).__name__, dict(self.defaults), {name: self[name] for name in self.keys()})

    def keys(self) -> tuple[str, ...]:
        return tuple(self.defaults)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) if name in self else default


_ANYTHING = bool | int | float | str | None
"""The type of an option whose default is None."""

_MADE: dict[tuple[str, str], type[Options]] = {}


def options_class(name: str, defaults: Mapping[str, Any]) -> type[Options]:
    """Return an attrs class with one option per entry, typed as its default; a mapping becomes a nested table.

    None tells no type: such an option takes a truth value, a number, a text or "none". The same name and defaults give the same class. Raises
    TypeError for a default that no configuration can hold.
    """
    key = (name, repr(sorted(defaults.items())))
    if key not in _MADE:
        fields = {option: _field(f"{name}_{option}", default) for option, default in defaults.items()}
        _MADE[key] = attrs.make_class(name, fields, bases=(Options,), frozen=True, class_body={"defaults": dict(defaults)})
    return _MADE[key]


def _remake(name: str, defaults: Mapping[str, Any], values: Mapping[str, Any]) -> Options:
    return options_class(name, defaults)(**values)


def _field(name: str, default: Any) -> Any:
    if isinstance(default, Mapping):
        table = options_class(name, default)
        return attrs.field(factory=table, type=table)
    if isinstance(default, Sequence) and not isinstance(default, str):
        kinds = {_scalar(name, item) for item in default}
        if len(kinds) != 1:
            raise TypeError(
                f"the option {name!r} defaults to {default!r}, from which no one type can be told; give an attrs class as config"
            )
        several: Any = tuple[kinds.pop(), ...]  # type: ignore[misc] # a type made at run time
        return attrs.field(default=tuple(default), type=several)
    return attrs.field(default=default, type=_scalar(name, default))


def _scalar(name: str, default: Any) -> Any:
    if default is None:
        return _ANYTHING
    for kind in (bool, int, float, str):
        if type(default) is kind:
            return kind
    raise TypeError(f"the option {name!r} defaults to {default!r}, from which no type can be told; give an attrs class as config")
