"""Texts that models and data made are printed as what they are, and do nothing to the terminal."""

import pytest

from skyrl_engine.cli.render import show_segments, show_table

NASTY = "a\x1b[2Jb\u202ec"


def test_tables_write_control_characters_out(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["text"], [[NASTY]])
    assert capsys.readouterr().out.splitlines()[1].rstrip() == r"a\x1b[2Jb\u202ec"


def test_stretches_write_control_characters_out_and_keep_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show_segments([("sampled", f"{NASTY}\nmore")])
    assert capsys.readouterr().out.splitlines() == ["--- sampled", r"a\x1b[2Jb\u202ec", "more"]
