"""A promise that a plugin must keep, and the finding of a check of it.

A promise is one plain function `check(subject, case)`, which raises `Broken`. Explicit cases come first, those that hardly any draw would
hold; then Hypothesis draws others and shrinks one that breaks the promise to the smallest. The pytest suites and
`skyrl-engine plugins verify` both call `Promise.hold`.
"""

import inspect
import os
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import hypothesis
from attrs import evolve, frozen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky, HypothesisException, Unsatisfiable

from skyrl_engine.errors import EngineError

Subject = TypeVar("Subject")
Case = TypeVar("Case")
Status = Literal["kept", "broken", "not claimed", "undecided"]

EXAMPLES = 40
"""Cases drawn per promise, unless asked otherwise."""
MOST_LINES = 12
"""Lines of a counterexample: explicit cases, which nothing makes smaller, may have a hundred."""
NARROW = frozenset({"inputs_unchanged", "events_unchanged", "task_unchanged", "own_memory", "packing"})
"""Promises that one fault breaks, which may break others too: what is changed in place looks like something kept."""
BROAD = frozenset(
    {"repeatable", "no_memory", "rank_split", "another_rank", "another_process", "oracle", "reference", "beside_others"}
)
"""Promises that many faults break, so that another broken one says more of the cause."""
UNDECIDED = 0.5
"""The share of a promise's cases that may stay undecided: a plugin that refuses more of what is valid keeps nothing by that."""


class Broken(AssertionError):  # noqa: N818 - a finding, reported as a failed assertion
    """The promise does not hold. `cause` is a sentence without final stop, `remedy` one action, `factor` that by which numbers change.

    `case` is the counterexample where the check draws its own; otherwise it is the case that the check was given.
    """

    def __init__(self, cause: str, remedy: str, *, factor: float | None = None, case: object = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy
        self.factor = factor
        self.case = case


class Undecidable(Exception):  # noqa: N818 - no error: the case says nothing about this promise
    """The case cannot decide the promise, for instance because the plugin fails in it, which another promise covers.

    Where more than the share `UNDECIDED` of the cases does so, the promise is not kept.
    """


class Inapplicable(Undecidable):
    """The promise is not about this case, or the contract lets a plugin refuse it: it counts neither as decided nor as undecided."""


@frozen
class Finding:
    """The finding about one promise of a plugin. All but name, sentence and status are None where the promise is kept.

    `cause` also says why a promise is not claimed or could not be decided. `counterexample` is the smallest case that was found, in
    lines; `factor` is the one factor by which all numbers change, if there is one.
    """

    promise: str
    sentence: str
    status: Status
    cause: str | None = None
    remedy: str | None = None
    factor: float | None = None
    counterexample: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """Return the finding as lines for people: cause, remedy, and the smallest case."""
        lines = [f"{text}." for text in (self.cause, self.remedy) if text is not None]
        if self.counterexample:
            lines += ["smallest counterexample:", *(f"  {line}" for line in self.counterexample)]
        return lines


def no_explicit_cases(_subject: object) -> "Iterable[Any]":
    """Return no case: all of them are drawn."""
    return ()


@frozen(eq=False)
class Promise(Generic[Subject, Case]):
    """A promise, stated by `sentence`. `cases` returns the strategy of a subject's cases; `exempt` the reason why it does not claim it.

    `effort` multiplies the number of cases: below 1 where a case is expensive, above 1 where cases that break the promise are rare.
    `first` returns explicit cases of a subject, which are judged before any that is drawn. Without `shrinks` the first case that breaks the
    promise is reported: where every call breaks it, and takes long, such as for threads that may end. With `exempt_runs` the exemption runs
    the product to find its reason: the pytest suite asks for it in the promise's test, not while pytest collects.
    """

    name: str
    sentence: str
    check: Callable[[Subject, Case], None]
    cases: Callable[[Subject], "st.SearchStrategy[Case]"]
    exempt: Callable[[Subject], str | None]
    effort: float = 1.0
    first: "Callable[[Subject], Iterable[Case]]" = no_explicit_cases
    shrinks: bool = True
    exempt_runs: bool = False

    def hold(self, subject: Subject, *, examples: int = EXAMPLES, derandomize: bool = True, shrink: bool = True) -> Finding:
        """Check the promise on the subject: with `derandomize` on the same cases every time, with `shrink` down to the smallest case.

        Where an explicit case breaks the promise and a drawn one does too, the drawn one is reported, since it is the smallest. A product that
        lacks what its contract names breaks it, too.
        """
        try:
            return self._hold(subject, examples, derandomize=derandomize, shrink=shrink and self.shrinks)
        except (EngineError, HypothesisException):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the kit stumbles over is a finding about the product
            return self._report_broken(_report_unreadable(error, subject), _CaseResults())

    def _hold(self, subject: Subject, examples: int, *, derandomize: bool, shrink: bool) -> Finding:
        exemption = self.exempt(subject)
        if exemption is not None:
            return self._finding("not claimed", exemption)
        results = _CaseResults()
        for case in self.first(subject):
            with suppress(Broken):
                results.judge(self.check, subject, case)
            if results.broken is not None:
                break

        try:
            self._draw(subject, results, examples=examples, derandomize=derandomize, shrink=shrink)
            if examples < EXAMPLES and not results.decided and not results.undecided:
                # few cases, none of which the promise is about, say nothing about the plugin
                self._draw(subject, results, examples=EXAMPLES, derandomize=derandomize, shrink=shrink)
        except Broken as broken:
            return self._report_broken(broken, results)
        except Flaky:  # the plugin answers the same case differently; what it answered before is still a counterexample
            assert results.broken is not None, "flaky without a failure"
            return self._report_broken(results.broken, results)
        if results.broken is not None:
            return self._report_broken(results.broken, results)
        if not results.decided:
            return self._finding("undecided", results.undecidable or "no case of this promise could be drawn")
        if results.undecided > UNDECIDED * (results.decided + results.undecided):
            several = f"{results.undecided} of {results.decided + results.undecided} cases could not be decided"
            return self._finding("undecided", f"{several}: {results.undecidable}")
        return self._finding("kept")

    def _draw(self, subject: Subject, results: "_CaseResults", *, examples: int, derandomize: bool, shrink: bool) -> None:
        """Judge so many drawn cases. Raises Broken for the smallest that breaks the promise."""

        @settings(
            max_examples=max(1, round(examples * self.effort)),
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            derandomize=derandomize,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(self.cases(subject))
        def run(case: Case) -> None:
            results.judge(self.check, subject, case)

        with suppress(Unsatisfiable):  # explicit cases may have decided
            run()

    def _finding(self, status: Status, cause: str | None = None) -> Finding:
        return Finding(self.name, self.sentence, status, cause)

    def _report_broken(self, broken: Broken, results: "_CaseResults") -> Finding:
        lines = [] if results.case is None else str(results.case).splitlines()
        if len(lines) > MOST_LINES:
            lines = [*lines[: MOST_LINES - 1], f"... and {len(lines) - MOST_LINES + 1} lines more"]
        return Finding(self.name, self.sentence, "broken", broken.cause, broken.remedy, broken.factor, tuple(lines))


class _CaseResults:
    """The results of a promise's cases. The last broken one is the smallest: Hypothesis runs it once more at the end."""

    def __init__(self) -> None:
        self.broken: Broken | None = None
        self.case: Any = None
        self.undecidable: str | None = None
        self.decided = self.undecided = 0

    def judge(self, check: Callable[[Any, Any], None], subject: Any, case: Any) -> None:
        try:
            check(subject, case)
        except (
            Undecidable
        ) as undecidable:  # no rejection: where nothing can be decided, Hypothesis would look for cases ten times as long
            self.undecidable = str(undecidable)
            self.undecided += not isinstance(undecidable, Inapplicable)
            return
        except Broken as broken:
            self.broken, self.case = broken, case if broken.case is None else broken.case
            raise
        except (EngineError, HypothesisException):
            raise
        except Exception as error:
            self.broken, self.case = _report_unreadable(error, subject), case
            raise self.broken from error
        self.decided += 1


def _report_unreadable(error: Exception, subject: Any) -> Broken:
    """Return the finding for an error of the kit's own, which stumbles over what the plugin returned: it names the plugin's code."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OF_THE_KIT)]
    place = f", raised at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return Broken(
        f"what it returned cannot be read: {message}{place or _place_of_product(subject)}",
        "Return what the contract of its kind says; where it does, that is a fault of the kit",
    )


def _place_of_product(subject: Any) -> str:
    """Return where the code of the product begins; nothing where that is not known."""
    try:
        product = subject.make()
        code = inspect.unwrap(getattr(product, "function", None) or type(product))
        return f"; its code begins at {Path(inspect.getfile(code)).name}:{inspect.getsourcelines(code)[1]}"
    except Exception:  # noqa: BLE001 - a place is a help, no finding
        return ""


_OF_THE_KIT = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(hypothesis.__file__).parent}{os.sep}")
"""Beginnings of the names of files in which the line that raised says nothing about the plugin."""


def no_cases(_subject: object) -> "st.SearchStrategy[None]":
    """Return a strategy of one case, for promises about the plugin itself, which need no input and are checked once."""
    return st.none()


def exempt_nobody(_subject: object) -> None:
    """Exempt nobody: every subject claims the promise."""
    return


def promise(
    sentence: str,
    *,
    cases: Callable[[Any], "st.SearchStrategy[Any]"] = no_cases,
    exempt: Callable[[Any], str | None] = exempt_nobody,
    effort: float = 1.0,
    first: Callable[[Any], Iterable[Any]] = no_explicit_cases,
    shrinks: bool = True,
    exempt_runs: bool = False,
) -> Callable[[Callable[[Any, Any], None]], Promise[Any, Any]]:
    """Make a promise from its check; it takes the function's name."""

    def decorate(check: Callable[[Any, Any], None]) -> Promise[Any, Any]:
        return Promise(check.__name__, sentence, check, cases, exempt, effort, first, shrinks, exempt_runs)

    return decorate


def any_of(*exemptions: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """Return an exemption that gives the first reason of any of these."""

    def exempt(subject: Any) -> str | None:
        return next((reason for exemption in exemptions if (reason := exemption(subject)) is not None), None)

    return exempt


def drop_repeated_causes(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings about one plugin, each fault reported once.

    Undecided ones are broken where nothing else is: then no other promise says what is wrong. Of broken ones with the same cause, such as one
    failure, the first stays, and the others are undecided.
    """
    findings = _undecide_repeated_causes(findings)
    if any(finding.status == "broken" for finding in findings):
        return findings
    remedy = "Answer every valid input, and refuse only what the contract says may be refused"
    return tuple(
        evolve(finding, status="broken", remedy=remedy) if finding.status == "undecided" else finding for finding in findings
    )


def _undecide_repeated_causes(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    known_causes: set[str | None] = set()
    findings_once = []
    for finding in findings:
        if finding.status == "broken" and finding.cause in known_causes:
            findings_once.append(Finding(finding.promise, finding.sentence, "undecided", finding.cause))
            continue
        if finding.status == "broken":
            known_causes.add(finding.cause)
        findings_once.append(finding)
    return tuple(findings_once)


@frozen
class Verdict:
    """All findings about one plugin."""

    findings: tuple[Finding, ...]

    @classmethod
    def of(
        cls, promises: Iterable[Promise[Any, Any]], subject: object, *, examples: int = EXAMPLES, derandomize: bool = True
    ) -> "Verdict":
        """Check every promise on the subject."""
        return cls(
            drop_repeated_causes([promise.hold(subject, examples=examples, derandomize=derandomize) for promise in promises])
        )

    def of_status(self, status: Status) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status == status)

    @property
    def broken(self) -> tuple[Finding, ...]:
        """Return the broken promises, those first that say most of the cause."""
        return tuple(sorted(self.of_status("broken"), key=lambda finding: (finding.promise in BROAD) - (finding.promise in NARROW)))

    @property
    def kept(self) -> bool:
        """Return True where every claimed promise is kept."""
        return not self.of_status("broken") and not self.of_status("undecided")
