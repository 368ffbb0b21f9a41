"""A promise judges explicit cases first, and cases that decide nothing keep nothing."""

from hypothesis import strategies as st

from skyrl_engine.testing import Broken, Promise, Undecidable, Verdict
from skyrl_engine.testing.promise import MOST_LINES, Inapplicable, exempt_nobody

DIGITS = st.integers(0, 9)


def make_promise(check, *, first=(), numbers=DIGITS):
    return Promise("numbers", "Every number will do", check, lambda _: numbers, exempt_nobody, first=lambda _: first)


def below(bound):
    def check(_subject, number):
        if number >= bound:
            raise Broken(f"fails at {number}", "Take any number")

    return check


def test_explicit_cases_are_judged_before_any_that_is_drawn():
    seen = []
    make_promise(lambda _, number: seen.append(number), first=(70, 80)).hold(None, examples=5)
    assert seen[:2] == [70, 80]
    assert len(seen) == 7


def test_an_explicit_case_that_no_draw_holds_breaks_the_promise():
    finding = make_promise(below(50), first=(3, 70, 80)).hold(None)
    assert (finding.status, finding.cause, finding.counterexample) == ("broken", "fails at 70", ("70",))


def test_a_smaller_case_that_is_drawn_is_told_instead():
    finding = make_promise(below(5), first=(70,)).hold(None)
    assert finding.counterexample == ("5",)


def test_an_explicit_case_counts_where_nothing_can_be_drawn():
    finding = make_promise(below(50), first=(70,), numbers=st.integers().filter(lambda _: False)).hold(None)
    assert finding.counterexample == ("70",)


def refusing(share, exception=Undecidable):
    """Refuse this many of ten explicit cases."""

    def check(_subject, number):
        if number < share:
            raise exception("it takes no small numbers")

    return make_promise(check, first=range(10), numbers=st.nothing())


def test_refusing_valid_cases_keeps_nothing():
    finding = refusing(6).hold(None)
    assert finding.status == "undecided"
    assert finding.cause == "6 of 10 cases could not be decided: it takes no small numbers"
    assert refusing(5).hold(None).status == "kept"


def test_cases_that_may_be_refused_do_not_count():
    assert refusing(6, Inapplicable).hold(None).status == "kept"
    assert refusing(10, Inapplicable).hold(None).status == "undecided"


def test_an_undecided_promise_is_broken_where_no_other_is():
    (finding,) = Verdict.of([refusing(6)], None).findings
    assert finding.status == "broken"
    assert finding.remedy == "Answer every valid input, and refuse only what the contract says may be refused"
    assert [outcome.status for outcome in Verdict.of([refusing(6), make_promise(below(5))], None).findings] == [
        "undecided",
        "broken",
    ]


def test_few_cases_that_the_promise_is_not_about_blame_nobody():
    """One case in ten decides, so that the first three hardly ever hold it; asked for few, the promise goes on until its usual number."""
    seen = []

    def check(_subject, number):
        seen.append(number)
        if number % 10 != 7:
            raise Inapplicable("it is not about this number")

    for examples in (1, 2, 3):
        seen.clear()
        assert make_promise(check, numbers=st.integers(0, 999)).hold(None, examples=examples).status == "kept"
        assert len(seen) > examples
    assert make_promise(check, numbers=st.integers(0, 999)).hold(None, examples=80).status == "kept"


def test_a_plugin_that_fails_in_every_case_is_not_asked_for_more():
    seen = []

    def check(_subject, number):
        seen.append(number)
        raise Undecidable("it fails")

    assert make_promise(check).hold(None, examples=2).status == "undecided"
    assert len(seen) == 2


def test_what_the_kit_cannot_read_is_told_with_the_place():
    def check(_subject, number):
        return number.dtype

    finding = make_promise(check).hold(None)
    assert finding.status == "broken"
    assert "cannot be read: AttributeError: 'int' object has no attribute 'dtype', raised at test_promise.py:" in finding.cause
    assert finding.counterexample == ("0",)


def test_one_failure_is_told_once():
    findings = Verdict.of([make_promise(below(5)), make_promise(below(5)), make_promise(below(7))], None).findings
    assert [(finding.status, finding.cause) for finding in findings] == [
        ("broken", "fails at 5"),
        ("undecided", "fails at 5"),
        ("broken", "fails at 7"),
    ]


def test_a_long_counterexample_is_cut():
    def check(_subject, _case):
        raise Broken("fails", "Do not")

    finding = make_promise(check, first=("\n".join("x" * 20),), numbers=st.nothing()).hold(None)
    assert len(finding.counterexample) == MOST_LINES
    assert finding.counterexample[-1] == f"... and {21 - MOST_LINES} lines more"
