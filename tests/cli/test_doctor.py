"""`skyrl-engine doctor` as a command: JSON, the file for a bug report, and what goes together."""

import json
from pathlib import Path


def test_findings_are_printed_and_written(command, tmp_path):
    outcome = command("doctor", "--no-self-test", "--json", "--report")
    printed = json.loads(outcome.out)
    assert printed["problems"] == 0, printed
    assert outcome.code == 0
    assert {"python", "torch", "plugins", "distributions"} <= {finding["topic"] for finding in printed["findings"]}
    assert Path("skyrl-engine-doctor.md").read_text().startswith("# skyrl-engine ")


def test_a_run_is_of_the_report(command, tmp_path):
    assert "add --report" in command("doctor", "--run", tmp_path).last_line
    assert command("doctor", "--report", "r.md", "--run", tmp_path).code != 0
    assert not Path("r.md").exists()
