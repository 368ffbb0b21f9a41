"""First-party plugins, so that one that is not installed can be named with the command that installs it."""

from collections.abc import Mapping
from types import MappingProxyType

from skyrl_engine.registry.kinds import KINDS

FIRST_PARTY: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        (kind.name, name): distribution
        for kind in KINDS.values()
        for distribution, names in kind.first_party.items()
        for name in names
    }
)
"""The distribution that offers a plugin, by kind and name."""


def install_command(*requirements: str) -> str:
    """Return the pip command, quoted for a shell; `python -m pip` is the pip of the interpreter that runs the engine."""
    quoted = (f'"{requirement}"' if set(requirement) & set("<>=!~[ ;*") else requirement for requirement in requirements)
    return f"python -m pip install {' '.join(quoted)}"
