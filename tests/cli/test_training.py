"""Surroundings of a run on the command line."""

import gc
import logging

from skyrl_engine.cli.training import SeldomCollected, warnings_to


def test_garbage_is_collected_as_before_once_the_ranks_are_up():
    usual = gc.get_threshold()
    with SeldomCollected() as collector:
        assert gc.get_threshold() > usual
        collector.skyrl_engine_session_started()
        assert gc.get_threshold() == usual
    assert gc.get_threshold() == usual


def test_what_imports_made_is_left_out_while_a_run_lasts():
    with SeldomCollected() as collector:
        collector.leave_imports_out()
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_garbage_is_collected_as_before_after_a_start_that_failed():
    usual = gc.get_threshold()
    try:
        with SeldomCollected():
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert gc.get_threshold() == usual


def test_a_person_sees_warnings_of_the_engine_and_its_plugins_and_once_what_ranks_repeat():
    shown: list[str] = []
    ranks = logging.getLogger("skyrl_engine.ranks")
    with warnings_to(shown.append):
        logging.getLogger("skyrl_engine_collators.kernels").warning("slow")
        logging.getLogger("skyrl_engine.engine").warning("twice")
        logging.getLogger("skyrl_engine.engine").warning("twice")
        logging.getLogger("transformers").warning("theirs")
        for rank in range(2):
            for said in ("slow", "of ranks"):
                ranks.warning("rank %d: %s", rank, said, extra={"said": said})
    logging.getLogger("skyrl_engine_collators.kernels").warning("after the run")
    assert shown == ["slow", "twice", "twice", "rank 0: of ranks"]
