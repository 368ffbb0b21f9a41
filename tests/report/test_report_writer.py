"""Reports beside a run: at its end, as often as their share of its time allows, and never to its harm."""

import json
import logging
import sys
import time

import pytest
from pair_runs import Ending, runs_over, write_pairs

from skyrl_engine.errors import PluginBrokenError
from skyrl_engine.run.report_writer import SHARE, VARIABLE, ReportWriter
from skyrl_engine.training.sft.trainer import run_sft


@pytest.fixture(autouse=True)
def _reports(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def configure(pairs, folder, name, **changes):
    return runs_over(pairs, "sft", folder)(name, data={"map": {"completion": "chosen"}}, **changes)


def test_a_run_leaves_a_report_of_its_end_and_a_failed_one_too(pairs, tmp_path):
    done = run_sft(configure(pairs, tmp_path, "whole"))
    assert "ended at step 6 of 6" in (done.directory / "report.html").read_text()

    with pytest.raises(PluginBrokenError):
        run_sft(configure(pairs, tmp_path, "failed"), observers=[Ending()])
    report = tmp_path / "failed" / "report.html"
    deadline = time.monotonic() + 60  # nobody waits for the report of a failure
    while not report.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    text = report.read_text()
    assert "failed at step 3 of 6" in text
    assert "EndedError" in text


def test_a_run_that_wants_none_has_none(pairs, tmp_path, monkeypatch):
    done = run_sft(configure(pairs, tmp_path, "without", run={"report": False}))
    assert not (done.directory / "report.html").exists()
    monkeypatch.setenv(VARIABLE, "0")
    done = run_sft(configure(pairs, tmp_path, "nor_here"))
    assert not (done.directory / "report.html").exists()


def test_modules_of_the_folder_that_a_run_was_started_in_are_none_of_ours(pairs, tmp_path, monkeypatch):
    done = run_sft(configure(pairs, tmp_path, "run", run={"report": False}))
    (tmp_path / "click.py").write_text("raise SystemExit('not the one')")
    monkeypatch.chdir(tmp_path)
    ReportWriter.of(done.directory, wanted=True).write_last(wait=True)
    assert (done.directory / "report.html").exists()


class Clock:
    """A clock that a test moves, and processes that take as long as it says."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.starts, self.seconds, self.running = 0.0, [], seconds, None
        monkeypatch.setattr("skyrl_engine.run.report_writer.time.monotonic", lambda: self.now)
        monkeypatch.setattr("skyrl_engine.run.report_writer.subprocess.Popen", self.start)

    def start(self, *_command, **_options):
        self.starts.append(self.now)
        self.running = self
        return self

    returncode = 0

    def poll(self):
        return 0 if self.now >= self.starts[-1] + self.seconds else None


@pytest.mark.parametrize("seconds", [0.5, 4.0, 30.0])
def test_reports_take_no_more_than_their_share_while_a_run_trains(tmp_path, monkeypatch, seconds):
    """The clock and the processes are made up: a run of ten days is what is looked at."""
    clock = Clock(monkeypatch, seconds)
    writer = ReportWriter.of(tmp_path, wanted=True)
    while clock.now < 864_000:
        clock.now += 7.0
        writer.write_if_due()
    assert len(clock.starts) > 10
    for count, start in enumerate(clock.starts[1:], start=1):
        assert count * seconds <= SHARE * start


def test_a_report_that_fails_is_warned_of_and_stops_nothing(tmp_path, caplog):
    """The folder holds no run, which is what the command then says."""
    with caplog.at_level(logging.WARNING):
        ReportWriter.of(tmp_path, wanted=True).write_last(wait=True)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the report could not be written")
    assert "holds no run that started" in said


def test_an_interpreter_that_cannot_be_started_is_warned_of(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with caplog.at_level(logging.WARNING):
        ReportWriter.of(tmp_path, wanted=True).write_last(wait=True)
    assert any("no report is written" in record.getMessage() for record in caplog.records)


def test_samples_are_those_of_the_first_mini_batch_and_stay_after_a_resume(pairs, tmp_path):
    tables = {"checkpoint": {"every": 2}}
    with pytest.raises(PluginBrokenError):
        run_sft(configure(pairs, tmp_path, "run", **tables), observers=[Ending()])
    kept = (tmp_path / "run" / "samples.json").read_bytes()
    assert len(json.loads(kept)["samples"]) == 4
    run_sft(configure(pairs, tmp_path, "run", **tables), resume=True)
    assert (tmp_path / "run" / "samples.json").read_bytes() == kept
