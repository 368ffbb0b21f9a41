"""The example on easy-vqa, run as its reader would: a vision-language model learns to answer questions about pictures it has not seen."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "train_easy_vqa.py"


@pytest.mark.example
@pytest.mark.timeout(1200)
def test_the_example_learns_to_answer(tmp_path: Path) -> None:
    """Exact answers to 500 questions held out: hardly any by the random model, at least 45 in 100 after training; and half the loss."""
    command = [sys.executable, str(EXAMPLE), "--output", str(tmp_path / "easy-vqa")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    shares = re.search(r"held-out exact match: ([\d.]+)% before training, ([\d.]+)% after", done.stdout)
    assert shares is not None, done.stdout[-2000:]
    before, after = (float(share) for share in shares.groups())
    assert before < 10
    assert after >= 45
    lines = (tmp_path / "easy-vqa" / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [record["metrics"]["loss"] for record in map(json.loads, lines) if record["kind"] == "evaluation"]
    assert losses[-1] < losses[0] / 2
