"""Check a plugin's metadata against the installed distributions before anything of it is imported; pip can be bypassed."""

from importlib import metadata
from typing import TYPE_CHECKING

from skyrl_engine import __version__
from skyrl_engine.errors import PluginBrokenError, PluginIncompatibleError, PluginNotFoundError
from skyrl_engine.registry.discovery import ENGINE, normalise
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.known import install_command
from skyrl_engine.registry.record import PluginRecord

if TYPE_CHECKING:
    from packaging.requirements import Requirement

RUNTIME_EXTRA = "runtime"


def find_distribution(record: PluginRecord) -> metadata.Distribution:
    """Return the installed distribution of a record.

    Raises PluginNotFoundError when it is not, PluginIncompatibleError when it has another version than the record, or another target for
    the plugin's name: a run continues, here or on another machine, with the very plugins it was planned with.
    """
    assert record.distribution is not None, f"{record} is of no distribution"
    try:
        distribution = metadata.distribution(record.distribution)
        version = distribution.version
        targets = [point.value for point in distribution.entry_points.select(group=KINDS[record.kind].group, name=record.name)]
    except metadata.PackageNotFoundError:
        raise PluginNotFoundError(f"{record} is not installed here", remedy=f"Install it: {_exact_command(record)}") from None
    except Exception as error:
        raise PluginBrokenError(
            f"the metadata of {record} cannot be read: {type(error).__name__}: {error}",
            remedy=f"Reinstall it: {_exact_command(record)}",
        ) from error
    if version != record.version:
        raise PluginIncompatibleError(
            f"{record} is asked for, but version {version} is installed here",
            remedy=f"Install that version: {_exact_command(record)}",
        )
    if record.target not in targets:
        state = f"points at {targets[0]}" if targets else "is not offered"
        raise PluginIncompatibleError(
            f"{record} is asked for as {record.target}, but {state} in the installation here",
            remedy=f"Reinstall it: {_exact_command(record)}",
        )
    return distribution


def check_requirements(record: PluginRecord, distribution: metadata.Distribution) -> None:
    """Refuse a plugin whose range of engine versions excludes this engine, or whose runtime requirements are not met.

    Runtime requirements are those of the extra `runtime`. Raises PluginIncompatibleError, or PluginBrokenError for a requirement that
    cannot be read.
    """
    requirements = [_requirement(record, line) for line in distribution.requires or ()]
    for requirement in requirements:
        if normalise(requirement.name) == ENGINE and _applies(requirement):
            _check_engine(record, requirement)
    runtime = [requirement for requirement in requirements if not _applies(requirement) and _applies(requirement, RUNTIME_EXTRA)]
    unmet = [problem for requirement in runtime if (problem := _find_unmet(requirement)) is not None]
    if unmet:
        raise PluginIncompatibleError(
            f"{record} needs {' and '.join(unmet)}",
            remedy=f"Install what it needs: {install_command(f'{record.distribution}[{RUNTIME_EXTRA}]=={record.version}')}",
        )


def list_unmet(distribution: metadata.Distribution, extra: str = "") -> list[str]:
    """Return, as clauses, what a distribution, or one extra of it, requires here and is not installed or in another version."""
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in distribution.requires or ()]
    return [
        unmet for requirement in requirements if _applies(requirement, extra) and (unmet := _find_unmet(requirement)) is not None
    ]


def _check_engine(record: PluginRecord, requirement: "Requirement") -> None:
    if not requirement.specifier.contains(__version__, prereleases=True):
        command = install_command("--upgrade", str(record.distribution), f"{ENGINE}=={__version__}")
        raise PluginIncompatibleError(
            f"{record} is made for {ENGINE} {requirement.specifier}, and this is {__version__}",
            remedy=f"Install a version of it made for this engine: {command}",
        )


def _find_unmet(requirement: "Requirement") -> str | None:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name}{requirement.specifier}, which is not installed"
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name}{requirement.specifier}, and {version} is installed"
    return None


def _applies(requirement: "Requirement", extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _requirement(record: PluginRecord, line: str) -> "Requirement":
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(line)
    except InvalidRequirement as error:
        first = str(error).partition("\n")[0]
        raise PluginBrokenError(
            f"the metadata of {record} holds the requirement {line!r}, which cannot be read: {first}",
            remedy=f"Upgrade it: {install_command('--upgrade', str(record.distribution))}",
        ) from error


def _exact_command(record: PluginRecord) -> str:
    return install_command(f"{record.distribution}=={record.version}")
