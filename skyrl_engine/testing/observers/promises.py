"""Promises of every observer."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import numpy as np
from attrs import evolve
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.observer import RolloutsFinished, SessionFinished
from skyrl_engine.errors import EngineError
from skyrl_engine.run.metrics import FILE_NAME, MetricsJsonl
from skyrl_engine.run.observer_calls import ObserverBus
from skyrl_engine.testing.observers.sessions import (
    EVERY,
    PATIENCE_SECONDS,
    Event,
    ToldSession,
    collect_files,
    draw_sessions,
    list_sessions,
    measure_seconds,
    method_of,
    tell,
)
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.process_promises import SETTINGS_SENTENCE
from skyrl_engine.testing.process_settings import require_settings_left_alone
from skyrl_engine.testing.promise import Broken, Inapplicable, Promise, Undecidable, promise
from skyrl_engine.testing.subject import Subject

FEW = 0.3
"""Effort of promises that tell sessions: every case makes a new observer, which may write files."""

TRAINERS = ("sft", "rl")

SLOW_SECONDS = 1.0
"""A run waits for its observers: an event that one takes so long for costs a step as much."""


def _draw(_subject: Subject[Any]) -> "st.SearchStrategy[ToldSession]":
    return draw_sessions()


def _list_explicit(_subject: Subject[Any]) -> list[ToldSession]:
    return list_sessions()


def _list_sessions_with_nan(_subject: Subject[Any]) -> list[ToldSession]:
    whole = list_sessions()[0]
    return [*list_sessions(), evolve(whole, numbers=tuple((name, float("nan")) for name, _ in whole.numbers))]


def _tell(subject: Subject[Any], session: ToldSession, directory: Path) -> None:
    """Tell a new observer a session. Raises Undecidable where it fails, which another promise covers."""
    try:
        tell([subject.make()], [session], directory)
    except EngineError as error:
        raise Undecidable(error.cause) from error


@promise(
    "It implements hooks of observers, by their names and with their arguments, and no event of a run makes it fail",
    cases=_draw,
    first=_list_explicit,
    effort=FEW,
)
def takes_events(subject: Subject[Any], case: ToldSession) -> None:
    with TemporaryDirectory(prefix="skyrl-engine-observer-") as name:
        try:
            tell([subject.make()], [case], Path(name))
        except EngineError as error:
            raise Broken(error.cause, error.remedy) from error


@promise("It leaves events as they are, which other observers are told too", cases=_draw, first=_list_explicit, effort=FEW)
def events_unchanged(subject: Subject[Any], case: ToldSession) -> None:
    with TemporaryDirectory(prefix="skyrl-engine-observer-") as name:
        directory = Path(name)
        bus = ObserverBus([subject.make()], on_error="stop")
        for event, untouched in zip(case.events(directory), case.events(directory), strict=True):
            try:
                method_of(bus, event)(event)
            except EngineError as error:
                raise Undecidable(error.cause) from error
            changed = _find_changed_attribute(event, untouched)
            if changed is not None:
                raise Broken(
                    f"changes event.{changed} of {type(event).__name__}, which the next observer, and the run, read afterwards",
                    "Work on a copy: {**event.metrics, ...}",
                )


def _find_changed_attribute(event: Event, untouched: Event) -> str | None:
    """Return the name of an attribute that is another one than before; None: all are the same."""
    if isinstance(event, RolloutsFinished) and isinstance(untouched, RolloutsFinished):
        for name in ("groups", "dropped"):
            for group, other in zip(getattr(event, name), getattr(untouched, name), strict=True):
                for attempt, before in zip(group.trajectories, other.trajectories, strict=True):
                    if attempt.token_ids.tobytes() != before.token_ids.tobytes() or not np.array_equal(
                        attempt.rewards, before.rewards
                    ):
                        return name
                    if dict(attempt.info) != dict(before.info) or dict(attempt.metrics) != dict(before.metrics):
                        return name
        return None
    names = [attribute.name for attribute in attrs.fields(type(event))]
    # written down, NaN is the same as NaN
    return next((name for name in names if repr(getattr(event, name)) != repr(getattr(untouched, name))), None)


@promise("What it adds to the manifest is a table of JSON values, the same in every call")
def manifest_values(subject: Subject[Any], _case: None) -> None:
    observer = subject.make()
    try:
        facts, again = (ObserverBus([observer]).manifest_extra() for _ in range(2))
    except EngineError as error:
        raise Broken(error.cause, error.remedy) from error
    try:
        plain = json.loads(json.dumps(facts, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise Broken(
            f"adds {facts!r:.120} to the manifest, which cannot be written as JSON: {' '.join(str(error).split())}",
            "Add texts, finite numbers, lists and tables of them: str(path), float(number)",
        ) from error
    if plain != facts:
        raise Broken(
            f"adds {facts!r:.120} to the manifest, which is {plain!r:.120} when it is read back",
            "Take texts for keys, and lists for tuples",
        )
    if facts != again:
        raise Broken(f"adds {facts!r:.120} to the manifest, and then {again!r:.120}", "Let it be of the options alone")


@promise(
    "What it leaves in files of JSON is JSON, also of numbers that are not finite",
    cases=_draw,
    first=_list_sessions_with_nan,
    effort=FEW,
)
def strict_json(subject: Subject[Any], case: ToldSession) -> None:
    for path, content in collect_files(lambda: [subject.make()], [case]).items():
        if not path.endswith((".json", ".jsonl")):
            continue
        documents = content.splitlines() if path.endswith(".jsonl") else [content]
        for number, document in enumerate(documents, 1):
            place = f"line {number} of {path}" if path.endswith(".jsonl") else path
            try:
                json.loads(document, parse_constant=_refuse_constant)
            except ValueError as error:  # texts that are no UTF-8 among them
                raise Broken(
                    f"leaves {place} as no JSON: {' '.join(str(error).split())}",
                    "Write numbers that are not finite as texts, and call json.dumps(..., allow_nan=False)",
                ) from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it holds {name}, which JSON has no word for")


@promise(f"It takes every event within {SLOW_SECONDS:g} s: a run waits for it", first=lambda _subject: list_sessions()[:2])
def in_time(subject: Subject[Any], case: ToldSession | None) -> None:
    if case is None:
        raise Inapplicable("there is no session to tell")
    with TemporaryDirectory(prefix="skyrl-engine-observer-") as name:
        observer = subject.make()
        bus = ObserverBus([observer])
        for event in case.events(Path(name)):
            allowed = SLOW_SECONDS + (_patience(observer) if isinstance(event, SessionFinished) else 0.0)
            method = method_of(bus, event)
            failed: list[EngineError] = []

            def call(event: Event = event, method: Any = method, failed: list[EngineError] = failed) -> None:
                try:
                    method(event)
                except EngineError as error:
                    failed.append(error)

            seconds = measure_seconds(call)
            if failed:
                raise Undecidable(failed[0].cause)
            what = type(event).__name__
            if seconds is None:
                raise Broken(
                    f"does not return from {what} within {PATIENCE_SECONDS:g} s",
                    "Wait for nobody: give a thread of yours what it is told",
                )
            if seconds > allowed and not _is_first_import(subject, case, event):
                raise Broken(
                    f"takes {seconds:.1f} s for {what}, for which the run waits",
                    "Give a thread of yours what it is told, or write less often",
                )


def _patience(observer: object) -> float:
    """Return the seconds that an observer with a thread of its own asks the end of a run to wait."""
    return getattr(observer, "finish_seconds", 0.0) if getattr(observer, "on_error", "stop") == "warn" else 0.0


def _is_first_import(subject: Subject[Any], case: ToldSession, event: Event) -> bool:
    """Return True where an event that took long the first time, as imports do, takes no time when it is told again."""
    with TemporaryDirectory(prefix="skyrl-engine-observer-") as name:
        bus = ObserverBus([subject.make()])
        for again in case.events(Path(name)):
            seconds = measure_seconds(lambda again=again: method_of(bus, again)(again))
            if type(again) is type(event) and getattr(again, "step", 0) == getattr(event, "step", 0):
                return seconds is not None and seconds <= SLOW_SECONDS
    return False


def _differs_each_time(subject: Subject[Any]) -> str | None:
    session = list_sessions()[0]
    try:
        _require_repeatable(subject, [session])
    except Inapplicable as reason:
        return str(reason)
    except Undecidable:
        return None
    return None


@promise(
    "It does the same whichever other observers there are, before it or after it",
    cases=_draw,
    exempt=_differs_each_time,
    exempt_runs=True,
    first=_list_explicit,
    effort=FEW,
)
def beside_others(subject: Subject[Any], case: ToldSession) -> None:
    case = evolve(case, killed=False)
    alone = _require_repeatable(subject, [case])
    alone.pop(FILE_NAME, None)
    for beside in (lambda: [subject.make(), MetricsJsonl()], lambda: [MetricsJsonl(), subject.make()]):
        files = {path: content for path, content in collect_files(beside, [case]).items() if path != FILE_NAME}
        if files != alone:
            raise Broken(
                f"leaves {_name_difference(alone, files)} otherwise where another observer, {FILE_NAME}'s, is told the same events",
                "Take what it needs from the events that it is told: others may be told before it, after it, or not be there",
            )


@promise(
    "Where a run is killed and resumed, its files tell no step twice and leave out none",
    cases=lambda _subject: st.sampled_from(TRAINERS),
    exempt=_differs_each_time,
    exempt_runs=True,
    first=lambda _subject: TRAINERS,
    effort=0.05,
)
def resume(subject: Subject[Any], case: str) -> None:
    whole = evolve(list_sessions()[0], rollouts=case == "rl")
    killed = evolve(whole, end=2 * EVERY + 1, killed=True)
    resumed = evolve(whole, start=2 * EVERY)
    due = _require_repeatable(subject, [whole])
    nothing = collect_files(lambda: [subject.make()], [evolve(whole, end=0)])
    got = collect_files(lambda: [subject.make()], [killed, resumed])
    for path, content in due.items():
        if path not in got:
            raise Broken(f"{path} is gone after a resume", "Go on in the file of the session before: open it with 'a'")
        of_steps = Counter(content.splitlines()) - Counter(nothing.get(path, b"").splitlines())
        lines = Counter(got[path].splitlines())
        for line, count in of_steps.items():
            text = line.decode(errors="replace")
            if lines[line] > count and content != nothing.get(path):
                raise Broken(
                    f"{path} has the line {text!r:.100} {lines[line]} times after a run that was killed behind step {killed.end} went on "
                    f"from the checkpoint of step {resumed.start}: its steps are told twice",
                    "When a session starts, take out what it has of steps after event.start_step",
                )
            if lines[line] < count and content.count(b"\n") == len(content.splitlines()):
                raise Broken(
                    f"{path} lacks the line {text!r:.100} after a resume",
                    "Go on in the file of the session before: open it with 'a', and take out steps after event.start_step alone",
                )


def _require_repeatable(subject: Subject[Any], sessions: Iterable[ToldSession]) -> dict[str, bytes]:
    """Return the files of an observer that is told sessions. Raises Inapplicable where they are others each time, of the time of day say."""
    told = list(sessions)
    one, other = (collect_files(lambda: [subject.make()], told) for _ in range(2))
    if one != other:
        raise Inapplicable("its files are other ones each time, of the time of day say, so that none can be compared")
    return one


def _name_difference(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> str:
    return next(path for path in (*one, *other) if one.get(path) != other.get(path))


@promise(SETTINGS_SENTENCE, first=lambda _subject: list_sessions()[:1])
def process_settings(subject: Subject[Any], case: ToldSession | None) -> None:
    """Judge a whole session: what an observer starts in its beginning, it ends in its end."""
    session = list_sessions()[0] if case is None else case

    def call() -> None:
        with TemporaryDirectory(prefix="skyrl-engine-observer-") as name:
            _tell(subject, session, Path(name))

    require_settings_left_alone(call)


OBSERVER_PROMISES: tuple[Promise[Any, Any], ...] = (
    process_settings,  # first: once set they are set
    takes_events,
    events_unchanged,
    manifest_values,
    strict_json,
    in_time,
    beside_others,
    resume,
    *(each for each in PLUGIN_PROMISES if each.name != "pickling"),  # it stays in the controller's process
)
