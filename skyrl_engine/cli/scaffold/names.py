"""Derive the names of a new plugin's distribution, package and class from the name that a person typed."""

import builtins
import keyword
import re
import sys

from attrs import frozen

from skyrl_engine import UnsupportedError
from skyrl_engine.errors import Problem
from skyrl_engine.registry.discovery import normalise
from skyrl_engine.registry.kinds import KINDS

_USED = frozenset(("attrs", "define", "field", "np", "skyrl_engine", "hookimpl", "tokens", "config", "structure", *KINDS))
"""Names that the templates use for something else."""


@frozen
class Names:
    """`plugin` is what a configuration says, `distribution` what pip installs, `package` what Python imports, `title` begins classes."""

    kind: str
    plugin: str
    distribution: str

    @property
    def package(self) -> str:
        return self.distribution.replace("-", "_")

    @property
    def title(self) -> str:
        return "".join(part.capitalize() for part in self.plugin.split("_"))


def names_for(kind: str, name: str, distribution: str | None = None) -> Names:
    """Derive the names from `name`; the distribution is NAME-KIND, or NAME where it ends in the kind, unless it is given.

    Raises UnsupportedError for names that cannot be used.
    """
    plugin = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", plugin):
        raise UnsupportedError(
            f"{name!r} is no name for a plugin", remedy="Use lower-case letters, digits and single hyphens or underscores"
        )
    if keyword.iskeyword(plugin) or keyword.issoftkeyword(plugin) or hasattr(builtins, plugin) or plugin in _USED:
        raise UnsupportedError(
            f"{name!r} already means something in Python or in a plugin", remedy=f"Choose another name, such as my-{name}"
        )
    plural = f"{kind}es" if kind.endswith("s") else f"{kind}s"
    suffix = "" if plugin.endswith((f"_{kind}", f"_{plural}")) else f"-{kind.replace('_', '-')}"
    chosen = normalise(plugin) + suffix if distribution is None else distribution
    if chosen != normalise(chosen) or not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", chosen):
        raise UnsupportedError(
            f"{chosen!r} is no name for a distribution and its package",
            remedy="Use lower-case letters, digits and single hyphens, beginning with a letter",
        )
    return Names(kind, plugin, chosen)


def refuse_taken(names: Names) -> None:
    """Raise UnsupportedError where the plugin, the distribution or the package is there already, in this environment or as our own."""
    for problem in _find_name_conflicts(names):
        raise UnsupportedError(problem.cause, remedy=problem.remedy)


def _find_name_conflicts(names: Names) -> "list[Problem]":
    from importlib import metadata
    from importlib.util import find_spec

    from skyrl_engine.registry.known import read_first_party
    from skyrl_engine.registry.resolve import Registry

    problems = []
    claims = [record.distribution for record in Registry.discover().records(names.kind) if record.name == names.plugin]
    owner = claims[0] if claims else read_first_party().get((names.kind, names.plugin))
    if owner is not None:
        cause = f"{owner} already offers {KINDS[names.kind].with_article} called {names.plugin!r}"
        problems.append(Problem(names.plugin, cause, "Choose another name; users would have to write both in full"))
    if any(normalise(distribution.metadata["Name"] or "") == names.distribution for distribution in metadata.distributions()):
        cause = f"a distribution called {names.distribution!r} is installed"
        problems.append(Problem(names.distribution, cause, "Choose another with --distribution"))
    elif names.package in sys.stdlib_module_names or find_spec(names.package) is not None:
        cause = f"there is a Python package called {names.package!r}"
        problems.append(
            Problem(names.package, cause, "Choose another distribution with --distribution; its package is called after it")
        )
    return problems
