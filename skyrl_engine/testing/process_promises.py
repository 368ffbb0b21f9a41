"""Promises about the process in which a plugin is called: it changes no setting of it, and answers alike on every rank."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

from skyrl_engine.testing.another_process import another_process
from skyrl_engine.testing.another_rank import another_rank as as_another_rank
from skyrl_engine.testing.process_settings import require_settings_left_alone
from skyrl_engine.testing.promise import Broken, Promise, Undecidable, no_explicit_cases, promise
from skyrl_engine.testing.subject import Subject

SETTINGS_SENTENCE = "It leaves the settings of torch, NumPy and the process as they are, and no thread running"
EFFORT = 0.1
"""A share of the cases: who changes a setting, or asks for the rank, mostly does so in every call."""


def process_promises(
    answer: Callable[[Subject[Any], Any], object],
    cases: "Callable[[Subject[Any]], st.SearchStrategy[Any]]",
    first: Callable[[Subject[Any]], Iterable[Any]] = no_explicit_cases,
) -> tuple[Promise[Any, Any], ...]:
    """Return the promises of a kind. `answer`, a function of a module, makes the product and returns what it gives for a case, in values that
    `==` compares. It raises Undecidable where the product fails.
    """

    @promise(SETTINGS_SENTENCE, cases=cases, first=first, effort=EFFORT, shrinks=False)
    def process_settings(subject: Subject[Any], case: Any) -> None:
        def call() -> None:
            # a product that fails may have changed settings all the same
            with suppress(Undecidable):
                answer(subject, case)

        require_settings_left_alone(call)

    @promise(
        "Every rank gets the same answer: it neither asks which rank it is on nor takes hash() of a text",
        cases=cases,
        first=first,
        effort=EFFORT,
    )
    def another_rank(subject: Subject[Any], case: Any) -> None:
        # copies: a product that changes what it is given breaks another promise
        one = answer(subject, deepcopy(case))
        try:
            with as_another_rank():
                other = answer(subject, deepcopy(case))
        except Undecidable as error:
            raise Broken(f"fails on another rank: {error}", "Ask for no environment variable of a rank") from error
        # one that answers differently every time breaks another promise
        if other != one and answer(subject, deepcopy(case)) == one:
            raise Broken(
                "answers otherwise on another rank: it asks which rank it is on, or takes hash() of a text",
                "Make it a function of its arguments; number texts with np.unique(..., return_inverse=True)",
            )

    return process_settings, another_rank, another_process(answer, first)
