"""`skyrl-engine doctor`: findings of this machine, the file for a bug report, and what it must not hold."""

import os
import resource
import tempfile

import pytest

from skyrl_engine.doctor.bug_report import write_bug_report
from skyrl_engine.doctor.caches import measure_folder
from skyrl_engine.doctor.examine import PARTS
from skyrl_engine.doctor.finding import DoctorFinding, MachinePart, list_findings
from skyrl_engine.doctor.machine import examine_left_overs, examine_limits
from skyrl_engine.doctor.self_test import examine_training
from skyrl_engine.scratch import scratch_folder


def test_every_examination_finds_something_and_every_trouble_has_a_remedy():
    for part in PARTS:
        if part.name == "plugins":
            continue  # imports all of them: tests/registry/test_doctor_of_plugins.py
        findings = list_findings(part)
        assert findings, part.name
        for finding in findings:
            assert finding.found, finding
            assert (finding.remedy is None) == (finding.state == "ok"), finding


def test_a_part_that_cannot_be_looked_at_is_a_finding():
    def fail():
        yield DoctorFinding("first", "ok", "there")
        raise OSError("the disk is gone")

    first, second = list_findings(MachinePart("disks", fail))
    assert first.topic == "first"
    assert (second.topic, second.state) == ("disks", "problem")
    assert "the disk is gone" in second.found


def test_limits_that_are_low_are_warned_of(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    files, processes = examine_limits()
    assert (files.state, "256" in files.found, "ulimit -n" in files.remedy) == ("warning", True, True)
    assert processes.state == "warning"


def test_old_left_overs_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "skyrl-engine-generator-new").mkdir()
    (finding,) = examine_left_overs()
    assert finding.state == "ok"
    old = tmp_path / "skyrl-engine-generator-old"
    old.mkdir()
    os.utime(old, (0, 0))
    with scratch_folder("weights") as held:  # a run of days
        os.utime(held.parent, (0, 0))
        (finding,) = examine_left_overs()
        assert finding.found.startswith("1 ")
    (finding,) = examine_left_overs()
    assert finding.state == "warning"
    assert finding.found.startswith("1 ")


def test_a_folder_is_measured_without_following_links(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"x" * 1000)
    (tmp_path / "below" / "up").symlink_to(tmp_path, target_is_directory=True)
    assert measure_folder(tmp_path, 10.0) == (1000, True)
    assert measure_folder(tmp_path, -1.0) == (0, False)


def test_the_bug_report_holds_no_secret_and_no_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setenv("RAY_ADDRESS", "ray://someone:hunter22@head:10001")
    monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
    finding = DoctorFinding("disk", "warning", f"full | at {tmp_path}/somebody/models, token hf_abcdefghijklmnop", "Free some")
    write_bug_report([finding], tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "hf_abcdefghijklmnop" not in text
    assert "hunter22" not in text
    assert "somebody" not in text
    assert "full \\| at ~/models" in text
    assert "\ntorch==" in text
    assert "RAY_ADDRESS=ray://(hidden)@head:10001" in text


@pytest.mark.nightly
def test_the_self_test_trains_on_two_ranks():
    findings = list(examine_training())
    assert [finding.state for finding in findings] == ["ok", "ok"], findings
