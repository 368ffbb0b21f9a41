"""run.log takes the engine's and its plugins' records from INFO on, and others' warnings."""

import logging
from pathlib import Path

import pytest

from skyrl_engine.run.log import logging_to


@pytest.mark.parametrize("propagates", [True, False])
def test_what_reaches_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, propagates: bool) -> None:
    path = tmp_path / "run.log"
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", propagates)
    with logging_to(path):
        logging.getLogger("skyrl_engine.training").info("engine info")
        logging.getLogger("skyrl_engine_fsdp.backend").warning("plugin warning")
        logging.getLogger("transformers").warning("their warning")
        logging.getLogger("transformers").info("their chatter")
        try:
            raise ValueError("the reason")
        except ValueError:
            logging.getLogger("skyrl_engine.run").exception("it failed")
    logging.getLogger("skyrl_engine").warning("after the run")
    text = path.read_text()
    for expected in ("engine info", "plugin warning", "their warning", "it failed", "Traceback", "ValueError: the reason"):
        assert expected in text
    assert "chatter" not in text
    assert text.count("their warning") == 1
    assert "after the run" not in text


def test_a_full_disk_fills_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(Path("/dev/full")):
        logging.getLogger("skyrl_engine").warning("lost")
    assert capsys.readouterr().err == ""
