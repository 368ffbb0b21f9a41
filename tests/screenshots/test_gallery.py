"""The gallery: its reports are those of its page, small, whole beside one library, and say nothing of who made them."""

import re

import numpy as np
import pytest
from gallery import LARGEST, PAGE, REPORTED, REPORTS, WORLD, library_name, list_commands
from loss_pictures import PICTURES, make_pictures

from skyrl_engine.cli.app import main


@pytest.mark.parametrize("name", list(REPORTED))
def test_a_report_is_small_and_says_nothing_of_the_machine(name):
    text = (REPORTS / f"{name}.html").read_text(encoding="utf-8")
    assert len(text.encode()) <= LARGEST
    assert f'<script src="{library_name()}">' in text, "written with another Bokeh: run nox -s gallery"
    assert not re.findall(r"/(?:home|root|tmp|work|Users|mnt|var)/[^<\"' ]*", text)
    assert f"(gallery/{name}.html)" in PAGE.read_text(encoding="utf-8")


def test_the_page_makes_every_run_that_it_shows():
    outputs = {words[words.index("--output") + 1] for words in list_commands()}
    assert {run for run in REPORTED.values() if not run.startswith("first/r")} <= outputs
    assert "first" in outputs  # the demo, which makes first/run and first/rl


def test_pictures_are_those_of_the_losses():
    """To a tenth of a pixel, the last digit written: processors round differently."""
    number = re.compile(r"-?\d+\.\d")
    for name, text in make_pictures().items():
        kept, message = (PICTURES / name).read_text(encoding="utf-8"), f"{name} is old: python tests/screenshots/loss_pictures.py"
        assert number.sub("", kept) == number.sub("", text), message
        assert np.allclose(*(np.array(number.findall(one), dtype=float) for one in (kept, text)), rtol=0, atol=0.11), message


def test_only_the_number_in_the_right_box_is_paid(capsys):
    call = '<tool_call>{"name": "look", "arguments": {"box": "%s"}}</tool_call>'
    for box, number, reward in (("white", "282", 1), ("red", "082", 0)):  # task 0 asks for the white one
        main(["env", "try", f"{WORLD}:boxes", "--answer", call % box, "--answer", number])
        told = capsys.readouterr().out
        assert "Which number is in the white box?" in told
        assert f"tool: {number}" in told
        assert f"Attempt\nreward   {reward}\n" in told
