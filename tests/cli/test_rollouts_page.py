"""The command lines of docs/how-to/look-at-rollouts.md, in their order, on a shorter run; and the first lines of what the page shows."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing.templates import TEMPLATES

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "look-at-rollouts.md"
SHORTER = (("31", "2"), ("--group-size 8", "--group-size 2"), ("--min-reward 0.9", "--min-reward 0.0"))
REWARD = "def score(text, task):\n    return sum(letter.isdigit() for letter in text) / max(1, len(text))\n"


def blocks() -> Iterator[tuple[str, str]]:
    """The page's blocks by language, with the numbers of a run that takes a second."""
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        shorter = text
        for long, short in SHORTER if language == "sh" else ():
            shorter = shorter.replace(long, short)
        yield language, shorter


@pytest.fixture
def material(tmp_path):
    """Input of the page's first command: `model`, `r.py`, `tasks.jsonl`."""
    tokenizer = TEMPLATES["chatml"].tokenizer()
    write_model(tmp_path / "model", tokenizer=tokenizer, hidden_size=16, intermediate_size=32, head_dim=8)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "r.py").write_text(REWARD)
    rows = (json.dumps({"prompt": f"Say {number:03d}"}) + "\n" for number in range(4))
    (tmp_path / "tasks.jsonl").write_text("".join(rows))


@pytest.mark.usefixtures("material")
def test_the_commands_of_the_page_run_and_tell_what_it_shows(command):
    """A block of text shows what the last command before it writes: the heads of its tables, and the names of its fields, are compared."""
    output, compared = "", 0
    for language, text in blocks():
        if language == "sh":
            for line in text.splitlines():
                outcome = command(*shlex.split(line, comments=True)[1:])
                assert outcome.code == 0, (line, outcome.err)
                output = outcome.out
            continue
        first = text.splitlines()[0].split()
        # numbers are those of the page's run; what is no number is the same in every run
        words = [re.escape(word) if not re.search(r"\d", word) else r"\S+" for word in first]
        assert re.search(rf"^{' +'.join(words)}\s*$", output, re.MULTILINE), (first, output)
        compared += 1
    assert compared == 7
