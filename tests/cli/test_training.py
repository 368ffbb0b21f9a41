"""Surroundings of a run on the command line."""

import gc

from skyrl_engine.cli.training import SeldomCollected


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
