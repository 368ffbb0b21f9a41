"""Plugins of every kind break `process_settings` where they change the process, and `another_rank` where they ask for their rank."""

import sys

import pytest
import wrong_in_their_process as wrong

from skyrl_engine.testing import Subject
from skyrl_engine.testing.advantages.promises import ADVANTAGE_PROMISES
from skyrl_engine.testing.collators.promises import COLLATOR_PROMISES
from skyrl_engine.testing.group_filters.promises import GROUP_FILTER_PROMISES
from skyrl_engine.testing.losses.promises import LOSS_PROMISES
from skyrl_engine.testing.mergers.promises import MERGER_PROMISES
from skyrl_engine.testing.process_settings import settings_of_process
from skyrl_engine.testing.reducers.promises import REDUCER_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "tests/meta/wrong_in_their_process.py",
    "tests/meta/wrong_losses.py",
    "tests/meta/wrong_reducers.py",
    "tests/meta/wrong_advantages.py",
    "tests/meta/wrong_group_filters.py",
    "tests/meta/wrong_mergers.py",
    "tests/meta/collators_made_wrong.py",
)

SETTINGS = [
    (LOSS_PROMISES, wrong.LossOfTensorFloats, "leaves torch.backends.cuda.matmul.fp32_precision at tf32"),
    (REDUCER_PROMISES, wrong.ReducerWithoutCollector, "leaves the garbage collector at False"),
    (REDUCER_PROMISES, wrong.ReducerThatIgnoresInterrupts, "changes the handler of SIGUSR1"),
    (ADVANTAGE_PROMISES, wrong.AdvantageThatRaises, "leaves the errors of NumPy (divide) at raise"),
    (GROUP_FILTER_PROMISES, wrong.FilterThatSilencesLogging, "leaves the level of all logging at 40"),
    (GROUP_FILTER_PROMISES, wrong.FilterThatLeavesThreads, "threads running, such as 'watcher'"),
    (MERGER_PROMISES, wrong.MergerOfFewDigits, "leaves the context of decimals (prec) at 9"),
    (COLLATOR_PROMISES, wrong.CollatorThatSetsPaths, "changes the search path of modules"),
]
RANKS = [
    (REDUCER_PROMISES, wrong.ReducerByHash),
    (ADVANTAGE_PROMISES, wrong.AdvantageOfTheFirstRank),
    (GROUP_FILTER_PROMISES, wrong.FilterOfTheFirstRank),
    (MERGER_PROMISES, wrong.MergerOnTheFirstRank),
    (COLLATOR_PROMISES, wrong.CollatorByHash),
]
RIGHT = [wrong.PutsItBack, wrong.ImportsLate, wrong.KeepsAThread]


def hold_promise(promises, name, make):
    (promised,) = [promise for promise in promises if promise.name == name]
    return promised.hold(Subject("test", make), examples=20, shrink=False)


def name_class(value):
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("promises", "fault", "words"), SETTINGS, ids=name_class)
def test_who_changes_the_process_is_found_and_the_process_is_as_before(promises, fault, words):
    before = {name: value for name, value in settings_of_process().items() if name != "threads"}
    finding = hold_promise(promises, "process_settings", fault)
    assert finding.status == "broken"
    assert words in finding.cause
    assert {name: settings_of_process()[name] for name in before} == before


@pytest.mark.parametrize(("promises", "fault"), RANKS, ids=name_class)
def test_who_asks_for_the_rank_is_found(promises, fault):
    finding = hold_promise(promises, "another_rank", fault)
    assert finding.status == "broken"
    assert "another rank" in finding.cause


@pytest.mark.parametrize("right", RIGHT, ids=name_class)
def test_who_leaves_it_as_it_was_is_right(right, tmp_path, monkeypatch):
    (tmp_path / "sets_when_imported.py").write_text("import logging\nlogging.disable(logging.DEBUG)\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert hold_promise(REDUCER_PROMISES, "process_settings", right).status == "kept"
    finally:
        sys.modules.pop("sets_when_imported", None)
        for event in wrong.KeepsAThread.started:
            event.set()
