"""Make a catalogue of a folder of wheels: try each, and write the index, badges and pages."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import attrs
from attrs import frozen
from packaging.version import Version

from skyrl_engine.catalogue.badge import draw_badge
from skyrl_engine.catalogue.pages import CATALOGUE, write_catalogue_page, write_distribution_page
from skyrl_engine.catalogue.pip import require_pip
from skyrl_engine.catalogue.plugin_index import INDEX_NAME, NOT_TRIED, IndexedDistribution, IndexedWheel, PluginIndex, read_index
from skyrl_engine.catalogue.trial import TrialSettings, describe_untried, engine_version, try_wheel
from skyrl_engine.catalogue.wheel_facts import WheelFacts, rank_tags, read_wheel
from skyrl_engine.errors import PluginIndexError
from skyrl_engine.run.durable import write_durably
from skyrl_engine.scratch import scratch_folder


@frozen
class MadeCatalogue:
    """A catalogue that was written, and the files that are no wheels, each with the reason."""

    index: PluginIndex
    refused: tuple[PluginIndexError, ...]


def make_catalogue(
    settings: TrialSettings,
    output: Path,
    *,
    again: bool = False,
    list_only: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> MadeCatalogue:
    """Try every wheel of the folder that `settings` name, and write `index.json`, `catalogue.md` and `catalogue/` into `output`.

    Wheels are copied there, too, if it is another folder. A wheel whose hash is in the index there, tried with this version of the engine, is
    not tried again unless `again`. With `list_only` none is tried: those that were not tried before are listed as unchecked. The index is
    written after every wheel, so that a call after a kill goes on where that one ended. Raises PluginIndexError while another process makes
    a catalogue there.
    """
    assert not (again and list_only), "wheels are tried again, or not at all"
    require_pip()
    files = sorted(settings.wheels.glob("*.whl"))
    output.mkdir(parents=True, exist_ok=True)
    with _lock(output), scratch_folder("catalogue") as scratch:
        before = _read_before(output / INDEX_NAME, tell)
        readable, refused = _copy_wheels(files, scratch, settings)
        tried_with = attrs.evolve(settings, engine=_choose_engine(readable, scratch), wheels=scratch)
        known = (
            {}
            if again
            else {wheel.sha256: wheel for _, wheel in before if wheel.engine == engine_version(tried_with) and wheel.is_tried}
        )
        # wheels whose turn has not come stay in the index: after a kill, they are known still
        entries = {facts.file: (facts.name, known[facts.sha256]) for facts in readable if facts.sha256 in known}
        for number, facts in enumerate(readable, 1):
            place = f"[{number}/{len(readable)}] {facts.name} {facts.version}"
            if facts.file in entries:
                tell(f"{place}: {entries[facts.file][1].standing}, tried before")
            elif list_only:
                entries[facts.file] = (facts.name, _list_untried(facts, tried_with))
                tell(f"{place}: {NOT_TRIED}")
            else:
                tell(f"{place}: installing")
                wheel = try_wheel(scratch / facts.file, facts, tried_with, partial(_tell_at, tell, place))
                entries[facts.file] = (facts.name, wheel)
            if output.resolve() != settings.wheels.resolve():
                _copy(scratch / facts.file, output / facts.file)
            write_durably(output / INDEX_NAME, _join(entries.values()).to_json())
        index = _join(entries.values())
        write_durably(output / INDEX_NAME, index.to_json())
        _write_pages(index, output, {name for name, _ in before})
    return MadeCatalogue(index, tuple(refused))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in which a catalogue is made."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PluginIndexError(
                f"another process makes a catalogue in {folder}", remedy="Wait for it to end, or name another folder with --output"
            ) from None
        except OSError:  # some network file systems have no locks; that must not keep anyone from making a catalogue
            pass
        yield
    finally:
        os.close(descriptor)


def _list_untried(facts: WheelFacts, settings: TrialSettings) -> IndexedWheel:
    untried = describe_untried(facts, settings)
    return attrs.evolve(untried, plugins=tuple(attrs.evolve(plugin, reason=NOT_TRIED) for plugin in untried.plugins))


def _tell_at(tell: Callable[[str], None], place: str, line: str) -> None:
    tell(f"{place}: {line}")


def _read_before(file: Path, tell: Callable[[str], None]) -> list[tuple[str, IndexedWheel]]:
    """Return the wheels of the index that is there, with the names of their distributions; none where there is none that can be read."""
    if not file.exists():
        return []
    try:
        index = read_index(file.read_bytes(), str(file))
    except (PluginIndexError, OSError) as error:
        tell(f"{file} cannot be read, and is made again: {error}")
        return []
    return [(distribution.name, wheel) for distribution in index.distributions for wheel in distribution.wheels]


def _copy_wheels(files: Iterable[Path], folder: Path, settings: TrialSettings) -> tuple[list[WheelFacts], list[PluginIndexError]]:
    """Copy wheels, so that what is tried is what was hashed; return their facts, and the errors of files that are none."""
    readable, refused = [], []
    for file in files:
        try:
            read_wheel(file)
            shutil.copyfile(file, folder / file.name)
            facts = read_wheel(folder / file.name)
            describe_untried(facts, settings)
            readable.append(facts)
        except (PluginIndexError, ValueError, OSError) as error:
            known = error if isinstance(error, PluginIndexError) else None
            refused.append(known or PluginIndexError(f"{file.name} cannot be listed: {error}", remedy="Build it again"))
            (folder / file.name).unlink(missing_ok=True)
    return readable, refused


def _choose_engine(wheels: Iterable[WheelFacts], folder: Path) -> Path | None:
    """Return the newest wheel of the engine among those that fit here; None where there is none."""
    engines = [facts for facts in wheels if facts.is_engine and rank_tags(facts.tags) is not None]
    return folder / max(engines, key=lambda facts: Version(facts.version)).file if engines else None


def _join(entries: Iterable[tuple[str, IndexedWheel]]) -> PluginIndex:
    by_name: dict[str, list[IndexedWheel]] = {}
    for name, wheel in sorted(entries, key=lambda entry: (Version(entry[1].version), entry[1].file), reverse=True):
        by_name.setdefault(name, []).append(wheel)
    return PluginIndex(tuple(IndexedDistribution(name, tuple(by_name[name])) for name in sorted(by_name)))


def _copy(source: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}.partial")
    shutil.copyfile(source, aside)
    aside.replace(target)


def _write_pages(index: PluginIndex, output: Path, before: Iterable[str]) -> None:
    """Write all pages and badges, and delete those of distributions that are no longer in the index."""
    folder = output / CATALOGUE
    folder.mkdir(exist_ok=True)
    for distribution in index.distributions:
        write_durably(folder / f"{distribution.name}.svg", draw_badge(distribution))
        write_durably(folder / f"{distribution.name}.md", write_distribution_page(distribution))
    for name in set(before) - {distribution.name for distribution in index.distributions}:
        for suffix in (".svg", ".md"):
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
    write_durably(output / f"{CATALOGUE}.md", write_catalogue_page(index))
