"""A remote generator that goes wrong breaks the promise that names how; a right one breaks none, over the engine's own host."""

import breaking
import pytest
import wrong_remote_generators as remote
from by_day import rarely

from skyrl_engine.testing.generators import bench
from skyrl_engine.testing.generators.promises import GENERATOR_PROMISES
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/modeling",
    "tests/meta",
    "skyrl_engine/contracts",
    "skyrl_engine/workers",
    "plugins/generators/src",
)

FAULTS = [
    (remote.AnswersTwice, "exactly_once", "which is answered already"),
    (remote.CountsAnUpdateBeforeItArrived, "updates", "they are those of version 0, and the last update is version 1"),
    (remote.ReadsOneFile, "updates", "of a part of version 1, or of another model"),
    (remote.TakesAnotherModel, "other_shapes", "takes weights of another model, whose shapes are not those of its own"),
    (remote.KeepsRowsOfOldWeights, "no_stale_session", "Drop what is kept of all sessions when their weights change"),
    rarely(remote.TakesWhatComes, "missing_weights", "takes a part of an update, in which a weight of its model is missing"),
    rarely(remote.TellsTheClientsVersion, "updates_on_the_way", "says that tokens of the old weights are of the new version"),
]


def broken_by(make, promises):
    held = [promise for promise in GENERATOR_PROMISES if promise.name in promises]
    return breaking.broken_by(held, make, promises, examples=1, hooks={"description": lambda: make.description})


@pytest.mark.parametrize(("fault", "promise", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_remote_generator_breaks_its_promise(fault, promise, words):
    breaking.require_broken(broken_by(fault, {promise}), {promise}, words)


def test_requests_that_an_update_loses_are_missed(monkeypatch):
    """After seconds without any answer, where the kit waits for a minute."""
    monkeypatch.setattr(bench, "PATIENCE_SECONDS", 5.0)
    broken = broken_by(remote.LosesRequestsAtAnUpdate, {"updates_keep_requests"})
    breaking.require_broken(broken, {"updates_keep_requests"}, "were under way or waited when weights changed")


def test_what_the_faults_are_made_of_is_right():
    """By the promises that take least; by night by all."""
    assert broken_by(remote.Remote, {"updates_keep_requests", "other_shapes"}) == {}


@pytest.mark.nightly
def test_what_the_faults_are_made_of_breaks_no_promise():
    assert broken_by(remote.Remote, {each.name for each in GENERATOR_PROMISES} - {each.name for each in PLUGIN_PROMISES}) == {}
