"""The observer bus: every observer is called, latecomers too, and the one that fails is named."""

import time
from pathlib import Path
from threading import Event

import pytest
from attrs import define, field

from skyrl_engine import hookimpl
from skyrl_engine.contracts.kinds.observer import CheckpointSaved, EvaluationFinished, SessionFinished, SessionStarted, StepFinished
from skyrl_engine.errors import CheckpointError, ContractError, PluginBrokenError
from skyrl_engine.run import lenient_observers
from skyrl_engine.run.observer_calls import ObserverBus

STARTED = SessionStarted(Path("run"), {}, 3)
STEP = StepFinished(1, 3, {"loss": 1.0}, 0.1)


@define
class Recorder:
    """Compared by value and not hashable, as attrs makes classes."""

    events: list[object] = field(factory=list)

    @hookimpl
    def skyrl_engine_session_started(self, event):
        self.events.append(event)

    @hookimpl
    def skyrl_engine_step_finished(self, event):
        self.events.append(event)

    @hookimpl
    def skyrl_engine_evaluation_finished(self, event):
        self.events.append(event)

    @hookimpl
    def skyrl_engine_checkpoint_saved(self, event):
        self.events.append(event)

    @hookimpl
    def skyrl_engine_session_finished(self, event):
        self.events.append(event)

    @property
    def expensive(self) -> None:
        raise AssertionError("registering an observer runs none of its code")


class StepsOnly:
    def __init__(self) -> None:
        self.steps = 0

    @hookimpl
    def skyrl_engine_step_finished(self):
        self.steps += 1


class Facts:
    def __init__(self, facts: object) -> None:
        self.facts = facts

    @hookimpl
    def skyrl_engine_manifest_extra(self):
        return self.facts


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    @hookimpl
    def skyrl_engine_session_started(self):
        raise self.error

    @hookimpl
    def skyrl_engine_step_finished(self):
        raise self.error


def test_every_event_reaches_every_observer() -> None:
    one, other, steps = Recorder(), Recorder(), StepsOnly()
    bus = ObserverBus([one, other, steps])
    evaluated = EvaluationFinished(1, {}, 0.1)
    saved, finished = CheckpointSaved(1, Path("c")), SessionFinished(3)
    bus.session_started(STARTED)
    bus.step_finished(STEP)
    bus.evaluation_finished(evaluated)
    bus.checkpoint_saved(saved)
    bus.session_finished(finished)
    assert one.events == other.events == [STARTED, STEP, evaluated, saved, finished]
    assert steps.steps == 1


def test_a_bus_without_observers_is_silent() -> None:
    bus = ObserverBus()
    bus.session_started(STARTED)
    bus.step_finished(STEP)
    assert bus.manifest_extra() == {}


def test_a_late_observer_hears_of_the_start_and_of_nothing_else_past() -> None:
    bus = ObserverBus()
    bus.session_started(STARTED)
    bus.step_finished(STEP)
    late = Recorder()
    bus.register(late)
    assert late.events == [STARTED]


@pytest.mark.parametrize("event", ["session_started", "step_finished"])
def test_an_observer_that_fails_stops_the_run_and_is_named(event: str) -> None:
    bus = ObserverBus([Recorder()])
    bus.register(Failing(ValueError("disk on fire")), name="observer 'tracker' of acme-trackers 1.2.0")
    with pytest.raises(PluginBrokenError) as caught:
        getattr(bus, event)(STARTED if event == "session_started" else STEP)
    assert caught.value.cause == (
        f"observer 'tracker' of acme-trackers 1.2.0 failed in skyrl_engine_{event}: ValueError: disk on fire"
    )
    assert caught.value.remedy == "Correct it, or take it out of run.observers"
    assert "test_observer_calls.py" in caught.value.details[0]


def test_a_late_observer_that_fails_on_the_start_is_named() -> None:
    bus = ObserverBus()
    bus.session_started(STARTED)
    with pytest.raises(PluginBrokenError, match="Failing failed in skyrl_engine_session_started"):
        bus.register(Failing(ValueError("late")))
    bus.step_finished(STEP)


def test_an_observer_without_a_name_is_known_by_its_class() -> None:
    with pytest.raises(PluginBrokenError, match=r"observer \S*Failing failed in skyrl_engine_step_finished"):
        ObserverBus([Failing(ValueError("x"))]).step_finished(STEP)


def test_what_an_observer_raises_of_the_engines_errors_is_meant() -> None:
    with pytest.raises(CheckpointError, match="full"):
        ObserverBus([Failing(CheckpointError("full", remedy="Free space"))]).step_finished(STEP)


def test_a_failure_is_blamed_on_the_observer_and_not_on_one_that_wraps_it() -> None:
    class Wrapper:
        @hookimpl(wrapper=True)
        def skyrl_engine_step_finished(self):
            return (yield)

    bus = ObserverBus([Wrapper(), Failing(ValueError("x"))])
    with pytest.raises(PluginBrokenError, match="Failing failed"):
        bus.step_finished(STEP)


def test_a_wrapper_that_fails_itself_is_named() -> None:
    class Wrapper:
        @hookimpl(wrapper=True)
        def skyrl_engine_step_finished(self):
            yield
            raise ValueError("after the others")

    with pytest.raises(PluginBrokenError, match="Wrapper failed in skyrl_engine_step_finished: ValueError: after the others"):
        ObserverBus([Wrapper(), StepsOnly()]).step_finished(STEP)


def test_facts_for_the_manifest_are_gathered() -> None:
    assert ObserverBus([Facts({"a": 1}), Facts(None), StepsOnly(), Facts({"b": [2], "a": 1})]).manifest_extra() == {
        "a": 1,
        "b": [2],
    }


def test_two_different_facts_under_one_key_are_refused() -> None:
    bus = ObserverBus()
    bus.register(Facts({"a": 1}), name="one")
    bus.register(Facts({"a": 2}), name="other")
    with pytest.raises(ContractError, match="one and other both add 'a'"):
        bus.manifest_extra()


def test_facts_that_are_no_dict_are_refused() -> None:
    with pytest.raises(ContractError, match="returned list"):
        ObserverBus([Facts([1])]).manifest_extra()


class Deaf:
    pass


class OnlyFactory:
    @hookimpl
    def skyrl_engine_make_loss(self):
        pass


@pytest.mark.parametrize("observer", [Deaf(), OnlyFactory(), 7])
def test_an_observer_must_observe(observer: object) -> None:
    with pytest.raises(ContractError, match="implements no observer hook"):
        ObserverBus([observer])


def test_a_misspelt_hook_is_refused() -> None:
    class Misspelt:
        @hookimpl
        def skyrl_engine_step_finnished(self, event):
            pass

    with pytest.raises(PluginBrokenError, match="Did you mean skyrl_engine_step_finished"):
        ObserverBus([Misspelt()])


def test_optional_hooks_of_a_newer_engine_are_ignored() -> None:
    class Modern(StepsOnly):
        @hookimpl(optionalhook=True)
        def skyrl_engine_rollout_finished(self, event):
            pass

    modern = Modern()
    ObserverBus([modern]).step_finished(STEP)
    assert modern.steps == 1


class Broken(Recorder):
    """Warns of its own accord; `failing` are the events that it does not take."""

    on_error = "warn"

    def __init__(self, *failing: object) -> None:
        super().__init__()
        self.failing = failing

    @hookimpl
    def skyrl_engine_step_finished(self, event):
        if event.step in self.failing:
            raise OSError("no space left")
        self.events.append(event)

    @hookimpl
    def skyrl_engine_session_started(self, event):
        if event in self.failing:
            raise OSError("not logged in")


def steps(*numbers: int) -> list[StepFinished]:
    return [StepFinished(number, 9, {}, 0.1) for number in numbers]


def tell_steps(bus: ObserverBus, *numbers: int) -> None:
    bus.session_started(STARTED)
    for step in steps(*numbers):
        bus.step_finished(step)
    bus.session_finished(SessionFinished(numbers[-1]))


def test_an_observer_that_warns_fails_in_the_middle_and_the_run_says_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    broken, other = Broken(2, 3, 4, 7), Recorder()
    bus = ObserverBus([other])
    bus.register(broken, name="observer tracker of acme 1.0")
    tell_steps(bus, *range(1, 10))
    assert [event.step for event in broken.events if isinstance(event, StepFinished)] == [1, 5, 6, 8, 9]
    assert len(other.events) == 11
    cause = "observer tracker of acme 1.0 failed in skyrl_engine_step_finished: OSError: no space left"
    assert [record.getMessage() for record in caplog.records] == [
        f"{cause}; the run goes on",
        f"observer tracker of acme 1.0 lacks step_finished of steps 2-4, 7. First cause: {cause}",
    ]


def test_an_observer_that_cannot_start_is_told_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken(STARTED)
    tell_steps(ObserverBus([broken]), 1, 2)
    assert broken.events == []
    last = caplog.records[-1].getMessage()
    assert "lacks session_started of step 0, step_finished of steps 1-2, session_finished of step 2. First cause: " in last


def test_the_configuration_overrules_what_the_observer_says() -> None:
    bus = ObserverBus()
    bus.register(Broken(1), on_error="stop")
    with pytest.raises(PluginBrokenError, match="no space left"):
        tell_steps(bus, 1)
    odd = StepsOnly()
    odd.on_error = "ignore"
    with pytest.raises(ContractError, match="has on_error = 'ignore'"):
        ObserverBus([odd])


class Blocked(Broken):
    """Waits for a network that does not answer."""

    finish_seconds = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = Event(), Event()

    @hookimpl
    def skyrl_engine_step_finished(self, event):
        self.asked.set()
        assert self.answers.wait(20)
        self.events.append(event)


def test_an_observer_that_is_blocked_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    blocked = Blocked()
    started = time.monotonic()
    tell_steps(ObserverBus([blocked]), 1, 2, 3)
    assert time.monotonic() - started < 10
    assert "lacks step_finished of steps 1-3, session_finished of step 3. First cause: " in caplog.records[-1].getMessage()
    assert "was not done 0.2 s (finish_seconds) after the session's end" in caplog.records[-1].getMessage()
    blocked.answers.set()


def test_events_beyond_a_full_queue_are_missing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lenient_observers, "LONGEST_QUEUE", 2)
    blocked = Blocked()
    blocked.finish_seconds = 20.0
    bus = ObserverBus([blocked])
    bus.session_started(STARTED)
    first, *further = steps(*range(1, 8))
    bus.step_finished(first)
    assert blocked.asked.wait(20)
    for step in further:
        bus.step_finished(step)
    blocked.answers.set()
    started = time.monotonic()
    bus.session_finished(SessionFinished(7))
    assert time.monotonic() - started < 10, "the end waits for room, and then for the thread alone"
    assert [event.step for event in blocked.events] == [1, 2, 3, 7], "the end comes last, and is never missing"
    assert [type(event) for event in blocked.events][-1] is SessionFinished
    assert "lacks step_finished of steps 4-7. First cause" in caplog.records[-1].getMessage()
