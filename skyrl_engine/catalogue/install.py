"""Choose a wheel of an index, compare it with what was verified, and install it with pip."""

from importlib import invalidate_caches, metadata
from pathlib import Path

from attrs import frozen
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from skyrl_engine import __version__
from skyrl_engine.catalogue.download import IndexPlace
from skyrl_engine.catalogue.pip import pip_install, require_pip
from skyrl_engine.catalogue.plugin_index import IndexedDistribution, IndexedWheel, PluginIndex, read_index
from skyrl_engine.catalogue.wheel_facts import find_misfit, rank_tags, read_wheel
from skyrl_engine.errors import PluginIncompatibleError, PluginIndexError, PluginNotFoundError
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.registry.discovery import ENGINE
from skyrl_engine.scratch import scratch_folder


@frozen
class ChosenWheel:
    """A wheel of an index that may be installed here."""

    name: str
    wheel: IndexedWheel

    def __str__(self) -> str:
        return f"{self.name} {self.wheel.version}"


def open_index(text: str) -> tuple[IndexPlace, PluginIndex]:
    """Read the index that a caller named. Raises PluginIndexError."""
    place = IndexPlace.of(text)
    return place, read_index(place.read_index(), text)


def choose_wheel(index: PluginIndex, requested: str, *, unverified: bool = False) -> ChosenWheel:
    """Return the newest wheel of NAME, or that of NAME==VERSION, that is for this engine, this Python and this machine.

    Raises PluginNotFoundError for a name that is not in the index, PluginIncompatibleError where no wheel is for what is here, and
    PluginIndexError for a wheel that is not verified, unless `unverified`.
    """
    name, _, version = requested.partition("==")
    distribution = index.find(canonicalize_name(name))
    if distribution is None:
        raise _missing_distribution(index, name)
    wheels = [wheel for wheel in distribution.wheels if not version or _is_version(wheel, version)]
    if not wheels:
        offered = dict.fromkeys(wheel.version for wheel in distribution.wheels)
        raise PluginNotFoundError(
            f"{distribution.name} {version} is not in the index", remedy=f"Choose one of the versions {', '.join(offered)}"
        )
    if distribution.name == ENGINE:
        raise PluginIndexError(f"{ENGINE} is the engine that runs this command", remedy="Install another version of it with pip")
    fitting = [wheel for wheel in wheels if find_misfit(wheel, __version__) is None]
    if not fitting:
        raise PluginIncompatibleError(
            f"{distribution.name} {wheels[0].version} {find_misfit(wheels[0], __version__)}",
            remedy="Install an engine and a Python that it is for" if version else "Ask its author for a version that fits",
            details=[f"{wheel.file} {find_misfit(wheel, __version__)}" for wheel in wheels[1:10]],
        )
    best = max(fitting, key=lambda wheel: (Version(wheel.version), -(_rank(wheel) or 0)))
    if best.standing != "verified" and not unverified:
        older = next((wheel.version for wheel in fitting if wheel.standing == "verified"), None)
        remedy = "Add --unverified if you trust it all the same"
        raise PluginIndexError(
            f"{distribution.name} {best.version} is {best.standing}",
            remedy=remedy if older is None else f"Install {distribution.name}=={older}, which is verified. {remedy}",
            details=list(best.list_reasons()),
        )
    return ChosenWheel(distribution.name, best)


def install_wheel(place: IndexPlace, chosen: ChosenWheel) -> None:
    """Copy the wheel, compare it with the index, and install it with what it requires.

    Raises PluginIndexError for a file that is not the one that was verified, or that says otherwise than the index, before anything is
    installed, and where pip fails.
    """
    require_pip()
    name, wheel = chosen.name, chosen.wheel
    with scratch_folder("wheel") as folder:
        file = folder / wheel.file
        place.copy_wheel(wheel.file, wheel.size, file)
        _compare(file, chosen)
        same_version = _find_installed(name) == wheel.version
        # the engine stays what it is: a requirement that excludes it fails instead of replacing it
        said = pip_install(file, f"{ENGINE}=={__version__}")
        if not said and same_version:
            # pip leaves a wheel of the version that is here alone, whatever it holds
            said = pip_install("--force-reinstall", "--no-deps", file)
    if said:
        raise PluginIndexError(
            f"pip cannot install {chosen}: {said[-1]}",
            remedy="Install what it requires first, or ask its author",
            details=said[:-1],
        )
    invalidate_caches()
    if _find_installed(name) != wheel.version:
        raise PluginIndexError(
            f"pip has installed {chosen} where this engine does not find it",
            remedy="Look at pip's configuration: python -m pip config list",
        )


def _compare(file: Path, chosen: ChosenWheel) -> None:
    """Raise PluginIndexError where a wheel is not what the index says."""
    wheel = chosen.wheel
    facts = read_wheel(file)
    if facts.sha256 != wheel.sha256:
        raise PluginIndexError(
            f"{wheel.file} is not the file that was verified: its SHA-256 is {facts.sha256}, and {wheel.sha256} was verified",
            remedy="Ask whoever made the index, and install nothing from it until then",
        )
    plugins = tuple(sorted((plugin.kind, plugin.name) for plugin in wheel.plugins))
    said = {
        "name": (facts.name, chosen.name),
        "version": (facts.version, str(Version(wheel.version))),
        "range of engines": (SpecifierSet(facts.requires_engine), SpecifierSet(wheel.requires_engine)),
        "range of Pythons": (SpecifierSet(facts.requires_python), SpecifierSet(wheel.requires_python)),
        "plugins": (facts.plugins, plugins),
    }
    for what, (of_wheel, of_index) in said.items():
        if of_wheel != of_index:
            raise PluginIndexError(
                f"the {what} of {wheel.file} differ from the index: {of_wheel or 'none'}, and {of_index or 'none'} there",
                remedy="Ask whoever made the index to make it again",
            )


def _rank(wheel: IndexedWheel) -> int | None:
    return rank_tags(parse_wheel_filename(wheel.file)[3])


def _missing_distribution(index: PluginIndex, name: str) -> PluginNotFoundError:
    offering = [each.name for each in index.distributions if any(plugin.name == name for plugin in each.newest.plugins)]
    names = [distribution.name for distribution in index.distributions]
    if offering:
        remedy = f"A plugin of that name is offered by {' and '.join(offering[:5])}: install that"
    else:
        remedy = did_you_mean(name, names) or "Search it with `skyrl-engine plugins search WORD`"
    return PluginNotFoundError(f"the index has no distribution {name!r}", remedy=remedy)


def _is_version(wheel: IndexedWheel, text: str) -> bool:
    try:
        return Version(wheel.version) == Version(text)
    except InvalidVersion:
        return False


def _find_installed(name: str) -> str | None:
    try:
        return str(Version(metadata.version(name)))
    except (metadata.PackageNotFoundError, InvalidVersion, TypeError):
        return None


def matches(distribution: IndexedDistribution, word: str) -> bool:
    """Say whether a word is part of a distribution's name or summary, or of a plugin's kind or name."""
    newest = distribution.newest
    texts = [distribution.name, newest.summary, *(plugin.reference for plugin in newest.plugins)]
    return any(word.lower() in text.lower() for text in texts)
