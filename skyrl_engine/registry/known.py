"""First-party plugins, so that one that is not installed can be named with the command that installs it; `first_party.toml` has them."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files


@cache
def read_first_party() -> Mapping[tuple[str, str], str]:
    """Read the distribution that offers a plugin, by kind and name, once a process and when it is first asked for."""
    tables = tomllib.loads(files(__package__).joinpath("first_party.toml").read_text(encoding="utf-8"))
    return {
        (kind, name): distribution
        for kind, distributions in tables.items()
        for distribution, names in distributions.items()
        for name in names
    }


def list_first_party(kind: str) -> list[str]:
    """Return the names of the first-party plugins of a kind, in their order in the file."""
    return [name for of_kind, name in read_first_party() if of_kind == kind]


def install_command(*requirements: str) -> str:
    """Return the pip command, quoted for a shell; `python -m pip` is the pip of the interpreter that runs the engine."""
    quoted = (f'"{requirement}"' if set(requirement) & set("<>=!~[ ;*") else requirement for requirement in requirements)
    return f"python -m pip install {' '.join(quoted)}"
