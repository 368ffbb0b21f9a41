"""The base of trackers, with one that keeps what it is sent in a list: once, whole, no secret."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import CHECKPOINT, CONFIG, KILLED, TOTAL, list_events

from skyrl_engine.run.metrics import MetricsJsonl
from skyrl_engine.run.observer_calls import ObserverBus
from skyrl_engine.testing.observers.sessions import Event, method_of
from skyrl_engine.tracking import TrackedRun, TrackedTable, Tracker, TrackerOptions
from skyrl_engine.tracking.flat_config import flatten_config, hide_secrets

Sent = list[tuple[int, str]]
EVERY: Sent = [
    (0, "report"),
    *(
        (step, part)
        for step in range(1, TOTAL + 1)
        for part in ("loss", "evaluation/loss", "checkpoint")
        if part == "loss" or step % 2 == 0
    ),
]


class Listed(Tracker):
    """Keeps what it is sent in `store`, which is the tracker's and outlives a session; `dies_after` is what a kill follows at once."""

    name = "listed"

    def __init__(self, store: Sent, dies_after: tuple[int, str] | None = None) -> None:
        super().__init__(TrackerOptions(table_every=0))
        self.store, self.dies_after, self.runs = store, dies_after, []

    def open(self, run: TrackedRun) -> str:
        self.runs.append(run)
        return "its id"

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._keep(step, next(name for name in ("loss", "evaluation/loss") if name in metrics))

    def log_table(self, step: int, name: str, table: TrackedTable) -> None:
        self._keep(step, name)

    def log_path(self, step: int, name: str, path: Path) -> None:
        self._keep(step, name)

    def close(self, error: str | None) -> None:
        pass

    def holds(self, step: int, metrics: Mapping[str, float]) -> bool:
        return any(held == step and part in metrics for held, part in self.store)

    def _keep(self, *sent: Any) -> None:
        self.store.append(sent)
        if sent == self.dies_after:
            raise KeyboardInterrupt


def tell(observers: list[object], events: list[Event]) -> None:
    bus = ObserverBus(observers, on_error="stop")
    for event in events:
        method_of(bus, event)(event)


@pytest.mark.parametrize("killed", [(3, "loss"), (4, "loss"), (4, "evaluation/loss"), (5, "loss")])
def test_once_whatever_was_killed_when(tmp_path: Path, killed: tuple[int, str]) -> None:
    """Also where the process dies after it sent something and before it wrote that down."""
    store: Sent = []
    with pytest.raises(KeyboardInterrupt):
        tell([Listed(store, dies_after=killed)], list(list_events(tmp_path, 0, KILLED)))
    tell([Listed(store)], list(list_events(tmp_path, 2, TOTAL)))
    assert store == EVERY


def test_whole_after_a_session_that_was_behind(tmp_path: Path) -> None:
    """Its thread had sent only two steps when it was killed; the file of metrics has what comes before the checkpoint."""
    store: Sent = []
    behind, file = Listed(store), MetricsJsonl()
    events = list(list_events(tmp_path, 0, KILLED))
    tell([behind], [event for event in events if getattr(event, "step", 0) <= 2])
    tell([file], events)
    tell([Listed(store), MetricsJsonl()], list(list_events(tmp_path, CHECKPOINT, TOTAL)))
    assert store == EVERY


def test_whole_where_the_package_lost_what_it_was_given(tmp_path: Path) -> None:
    store: Sent = []
    tell([Listed(store), MetricsJsonl()], list(list_events(tmp_path, 0, KILLED)))
    del store[store.index((3, "loss")) :]
    resumed = Listed(store)
    resumed.last_step = lambda: 2
    tell([resumed, MetricsJsonl()], list(list_events(tmp_path, CHECKPOINT, TOTAL)))
    store.remove((2, "checkpoint"))  # a path that is sent again takes the place of the first
    assert store == EVERY


def test_a_tracker_that_fails_right_after_it_was_opened_is_closed(tmp_path: Path) -> None:
    """A session warns and tells it nothing more: what the tracker's package started would stay, and end as if all were well."""
    closed: list[str | None] = []
    flaky = Listed([])
    flaky.close = closed.append

    def refuse(*_: Any) -> None:
        raise ConnectionError("the server went away")

    flaky.log_metrics = flaky.log_path = refuse
    bus = ObserverBus([flaky], on_error="warn")
    for event in list_events(tmp_path, 0, 1):
        method_of(bus, event)(event)
    assert closed == ["the server went away"]


def test_a_run_is_opened_again_by_its_id(tmp_path: Path) -> None:
    first, second = Listed([]), Listed([])
    tell([first], list(list_events(tmp_path, 0, CHECKPOINT)))
    tell([second], list(list_events(tmp_path, CHECKPOINT, TOTAL)))
    assert [(run.run_id, run.sent_step) for run in (*first.runs, *second.runs)] == [(None, -1), ("its id", CHECKPOINT)]


def test_what_the_file_has_as_null_is_not_a_number(tmp_path: Path) -> None:
    numbers: dict[str, float] = {}
    tell([MetricsJsonl()], list(list_events(tmp_path, 0, 1)))
    late = Listed([])
    late.log_metrics = lambda _step, metrics: numbers.update(metrics)
    tell([late], list(list_events(tmp_path, 1, 1)))
    assert numbers["loss"] == 1.5
    assert math.isnan(numbers["reward/mean"])


def test_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "in-the-environment")
    assert flatten_config(CONFIG) == {
        "trainer": "rl",
        "run.report": True,
        "run.seed": 3,
        "optimizer.learning_rate": 0.25,
        "environments.0.use": "prompts",
        "environments.0.url": "https://(hidden)@host/v1?token=(hidden)",
        "generator.use": "openai",
        "generator.api_key": "(hidden)",
        "generator.api_key_env": "MY_TOKEN",
        "generator.model": "of (hidden)",
    }
    assert flatten_config({"training": {"micro_batch_tokens": 64, "observers": ["a", "b"], "none": None}, "api_key": ["x"]}) == {
        "training.micro_batch_tokens": 64,
        "training.observers": '["a", "b"]',
        "api_key": "(hidden)",
    }
    keys = ("aws_secret_access_key", "X-Api-Key", "openaiApiKey", "hf_token", "private_key", "auth")
    nested = {
        "headers": {"Authorization": "a"},
        "credentials": {"user": "b", "pin": 12345},
        "password": 6789,
        "rows": [[{"token": "c"}]],
    }
    hidden = flatten_config({**dict.fromkeys(keys, "d"), **nested})
    assert len(hidden) == len(keys) + 5
    assert set(hidden.values()) == {"(hidden)"}
    monkeypatch.setenv("OTHER_TOKEN", "in-the-environment-and-longer")
    monkeypatch.setenv("QUOTED_SECRET", 'with "quotes" and ü')
    assert flatten_config({"texts": ['with "quotes" and ü', 1, None]}) == {"texts": '["(hidden)", 1, null]'}
    assert hide_secrets("in-the-environment-and-longer") == "(hidden)"
    assert hide_secrets("https://me:p@ss@host/x?sv=1") == "https://(hidden)@host/x?sv=1"
    assert hide_secrets("GET https://host/v1?x=1&api_key=abc failed") == "GET https://host/v1?x=1&api_key=(hidden) failed"


def test_a_table_is_markdown() -> None:
    table = TrackedTable(("reward", "text"), ((0.5, "a|b\n<i>"),))
    assert table.to_markdown() == "| reward | text |\n| --- | --- |\n| 0.5 | a&#124;b<br>&lt;i> |"


def test_a_step_that_fails_is_missing_and_the_next_one_is_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store: Sent = []
    tracker = Listed(store)

    def fail_in_the_middle(step: int, metrics: Mapping[str, float]) -> None:
        if step in (3, 4) and "loss" in metrics:
            raise ConnectionError("no route to host")
        Listed.log_metrics(tracker, step, metrics)

    tracker.log_metrics = fail_in_the_middle
    bus = ObserverBus([tracker])
    for event in list_events(tmp_path, 0, TOTAL):
        method_of(bus, event)(event)
    assert store == [each for each in EVERY if each not in ((3, "loss"), (4, "loss"))]
    first, last = [record.getMessage() for record in caplog.records]
    assert first.endswith("failed in skyrl_engine_step_finished: ConnectionError: no route to host; the run goes on")
    assert "lacks step_finished of steps 3-4. First cause: " in last
