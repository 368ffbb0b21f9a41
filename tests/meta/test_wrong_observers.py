"""Every promise to observers is broken by something."""

import breaking
import pytest
import wrong_observers as wrong

from skyrl_engine.testing.observers import sessions
from skyrl_engine.testing.observers.promises import OBSERVER_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/run/observer_calls.py",
    "tests/meta/breaking.py",
    "tests/meta/wrong_observers.py",
)

FAULTS = [
    (wrong.MisspellsAHook, {"takes_events"}, "implements the unknown hook skyrl_engine_step_done"),
    (wrong.TakesTheStep, {"takes_events"}, "has a hook that does not fit"),
    (wrong.NothingToHear, {"takes_events"}, "implements no observer hook"),
    (wrong.ReadsMetricsOfAnotherTrainer, {"takes_events"}, "KeyError: 'reward/mean'"),
    (wrong.RefusesWhatIsNotFinite, {"takes_events"}, "ValueError"),
    (wrong.CountsFromTheFirstStep, {"takes_events"}, "ZeroDivisionError"),
    (wrong.TakesMetricsOut, {"events_unchanged"}, "changes event.metrics of StepFinished"),
    (wrong.RoundsRewards, {"events_unchanged"}, "changes event.groups of RolloutsFinished"),
    (wrong.SignsTheManifest, {"events_unchanged"}, "changes event.manifest of SessionStarted"),
    (wrong.WritesNaN, {"strict_json"}, "it holds NaN, which JSON has no word for"),
    (wrong.AddsAPath, {"manifest_values"}, "cannot be written as JSON"),
    (wrong.AddsANumberOfNumPy, {"manifest_values"}, "cannot be written as JSON"),
    (wrong.AddsTuples, {"manifest_values"}, "when it is read back"),
    (wrong.AddsTheTime, {"manifest_values"}, "and then"),
    (wrong.AddsAList, {"manifest_values"}, "returned list"),
    (wrong.UploadsAtOnce, {"in_time"}, "s for EvaluationFinished, for which the run waits"),
    (wrong.WaitsForEver, {"in_time"}, "does not return from CheckpointSaved within 2 s"),
    (wrong.ReadsTheRecords, {"beside_others"}, "where another observer, metrics.jsonl's, is told the same events"),
    (wrong.TellsStepsTwice, {"resume"}, "its steps are told twice"),
    (wrong.BeginsAnew, {"resume"}, "steps.csv lacks the line"),
    (wrong.LeavesAThread, {"process_settings"}, "leaves 1 threads running, such as 'uploader'"),
]


@pytest.mark.parametrize(("fault", "promises", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_observer_breaks_its_promise(fault, promises, words, monkeypatch):
    monkeypatch.setattr("skyrl_engine.testing.observers.promises.PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(sessions, "PATIENCE_SECONDS", 2.0)
    held = [promise for promise in OBSERVER_PROMISES if promise.name in promises]
    breaking.require_broken(breaking.broken_by(held, fault, promises, examples=40), promises, words)


@pytest.mark.parametrize("right", [wrong.Plain, wrong.TellsTheTime, wrong.OfTwoHooks])
def test_what_is_right_breaks_nothing(right):
    assert breaking.broken_by(OBSERVER_PROMISES, right, examples=20) == {}


def test_a_file_that_differs_each_time_is_not_compared():
    held = [promise for promise in OBSERVER_PROMISES if promise.name in ("beside_others", "resume")]
    assert {promise.hold(breaking.Subject("time", wrong.TellsTheTime)).status for promise in held} == {"not claimed"}


def test_every_promise_to_observers_is_broken_by_something():
    elsewhere = {"config_round_trip", "light_import"}
    assert {promise.name for promise in OBSERVER_PROMISES} == {name for _, names, _ in FAULTS for name in names} | elsewhere
