"""The promises that plugins of a kind are held to, and the verdict about one plugin."""

import logging
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.config.schema import GeneratorPlacement
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.registry.kinds import KINDS, import_object

if TYPE_CHECKING:
    from skyrl_engine.testing.promise import Promise, Verdict


def promises_of(kind: str) -> "tuple[Promise[Any, Any], ...]":
    """Return the promises of a kind. Raises UnsupportedError where Hypothesis or torch is missing."""
    for module, extra in (("hypothesis", "testing"), ("torch", "train")):
        if find_spec(module) is None:
            raise UnsupportedError(
                f"verifying plugins needs {module}, which is not installed",
                remedy=f'Install it: python -m pip install "skyrl-engine[{extra}]"',
            )
    promises: tuple[Promise[Any, Any], ...] = import_object(KINDS[kind].suite)
    return promises


def verify(
    plugin: SelectedPlugin,
    *,
    examples: int | None = None,
    layouts: Sequence[str] = (),
    placement: GeneratorPlacement = "auto",
    given: Collection[str] | None = None,
) -> "Verdict":
    """Hold an installed plugin, or one of a local file, to every promise of its kind; `examples` cases each (None: the kit's own number).

    Of options that are not `given` (None: all are), other values that their validators allow are tried too, on fewer cases; not of backends
    and generators, whose options cost a model each.
    A backend is checked on `layouts` such as "tp2xpp2" (none: one rank, and two data-parallel ranks) and takes no `examples`. A generator is
    checked in its `placement`, as `generator.placement` of a run names it ("auto": where its description says); UnsupportedError is raised for
    one where it cannot be.

    What the plugin changed of the process's settings is put back in the end.
    """
    kind = plugin.loaded.record.kind
    promises = promises_of(kind)
    from skyrl_engine.testing.process_settings import restore_settings

    with restore_settings():
        if kind == "generator":
            return _judge_generator(plugin, promises, examples, placement)
        return _verdict(plugin, promises, examples, layouts, given)


def _judge_generator(
    plugin: SelectedPlugin, promises: "tuple[Promise[Any, Any], ...]", examples: int | None, placement: GeneratorPlacement
) -> "Verdict":
    from skyrl_engine.testing.generators.places import place_subject, share_starts
    from skyrl_engine.testing.promise import EXAMPLES, Verdict
    from skyrl_engine.testing.subject import Subject

    with _show_each_warning_once(), share_starts():
        subject = place_subject(Subject.of_plugin(plugin), placement)
        return Verdict.of(promises, subject, examples=EXAMPLES if examples is None else examples)


def _verdict(
    plugin: SelectedPlugin,
    promises: "tuple[Promise[Any, Any], ...]",
    examples: int | None,
    layouts: Sequence[str],
    given: Collection[str] | None,
) -> "Verdict":
    from skyrl_engine.testing.promise import EXAMPLES, Verdict

    kind = plugin.loaded.record.kind
    if kind == "backend":
        from skyrl_engine.testing.backends.bench import Bench
        from skyrl_engine.testing.backends.subject import LAYOUTS, BackendSubject

        with Bench() as bench:
            return Verdict.of(promises, BackendSubject(plugin, bench, tuple(layouts) or LAYOUTS))
    from skyrl_engine.testing.another_process import start
    from skyrl_engine.testing.subject import Subject

    start()
    with _show_each_warning_once():
        count = EXAMPLES if examples is None else examples
        verdict = Verdict.of(promises, Subject.of_plugin(plugin), examples=count)
        if given is None:
            return verdict
        from skyrl_engine.testing.option_variants import with_variants

        return with_variants(verdict, promises, plugin, frozenset(given), count)


@contextmanager
def _show_each_warning_once() -> Iterator[None]:
    """Show each warning once per place, such as a division by 0 in hundreds of cases; Python would show it in every case.

    So it is with what is logged where nobody has set logging up.
    """
    shown_places: set[tuple[object, ...]] = set()
    last_resort = logging.lastResort or logging.NullHandler()

    def is_first(place: tuple[object, ...]) -> bool:
        known = place in shown_places
        shown_places.add(place)
        return not known

    def log_once(record: logging.LogRecord) -> bool:
        return is_first((record.pathname, record.lineno))

    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_once(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if is_first((str(message), category, filename, lineno)):
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = show_once
        last_resort.addFilter(log_once)
        try:
            yield
        finally:
            last_resort.removeFilter(log_once)
