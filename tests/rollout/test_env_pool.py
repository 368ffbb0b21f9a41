"""Episodes in processes: whatever an environment does, its episode fails with the cause, and the others go on."""

import logging
import os
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from skyrl_engine.contracts import Action, FactoryContext, StepResult, Task
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.env_pool import EpisodePool
from skyrl_engine.rollout.process_handle import EpisodeProcess
from skyrl_engine.testing import select_plugin

FILE = Path(__file__).with_name("naughty_environment.py")
TIMEOUT_S = 0.3
"""For what hangs; what answers is given PATIENCE_S."""
ASLEEP_S = 0.05
"""Seconds after which a process that sleeps in a call makes room for another."""
PATIENCE_S = 60.0
"""A test that waits for so long has failed; machines are busy."""


def open_pool(name="naughty", **options):
    lock = select_plugin("environment", f"{FILE}:{name}", {}).to_lock_entry()
    return EpisodePool([lock], [name], FactoryContext(), **{"workers": 1, "timeout_s": PATIENCE_S, "retries": 0, **options})


@contextmanager
def pool(name="naughty", **options):
    episodes = open_pool(name, **options)
    try:
        yield episodes
    finally:
        episodes.shutdown()


@pytest.fixture(scope="module")
def shared_pool():
    """A pool whose process survives, for tests that need no options; tests that lose it get the next one."""
    with pool() as episodes:
        yield episodes


def task(**data):
    return Task("one", prompt_ids=(1,), data=data)


def action(turn=0, text="hello"):
    return Action(text, (1, 2, 3), turn, "stop")


def receive_reply(episodes, episode):
    """The next reply, which is for this episode."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        replies = episodes.poll(0.2)
        if replies:
            assert [reply.episode for reply in replies] == [episode]
            return replies[0]
    raise AssertionError("no reply came")


def receive_replies(pool, episodes, *, came=()):
    """The next reply of each of these episodes; `came` are those that did already."""
    until, seen = time.monotonic() + PATIENCE_S, {reply.episode: reply for reply in came}
    while len(seen) < len(episodes) and time.monotonic() < until:
        for reply in pool.poll(0.2):
            assert reply.episode not in seen
            seen[reply.episode] = reply
    assert set(seen) == set(episodes)
    return seen


_numbers = iter(range(1, 10**6))


def open_episode(episodes, **data):
    number = next(_numbers)
    episodes.open(number, 0, task(**data), seed=number)
    return number, receive_reply(episodes, number)


def step_episode(episodes, **data):
    """The reply to the first turn of an episode."""
    number, begun = open_episode(episodes, **data)
    assert begun.messages is not None, begun.failure
    episodes.step(number, action())
    reply = receive_reply(episodes, number)
    episodes.close(number)
    return reply


def test_an_episode_is_opened_answered_and_closed(shared_pool):
    number, begun = open_episode(shared_pool, turns=2)
    assert begun.messages == ({"role": "user", "content": f"seed {number}"},)
    shared_pool.step(number, action())
    first = receive_reply(shared_pool, number)
    assert first.result == StepResult(1.0, done=False, messages=({"role": "user", "content": "go on"},))
    assert 0 < first.seconds < PATIENCE_S
    shared_pool.step(number, action(1))
    assert receive_reply(shared_pool, number).result == StepResult(2.0)
    shared_pool.close(number)
    assert shared_pool.pending == 0


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("fail", "ValueError: no such word: hello"),
        ("text", "reward is 'much', where a finite number up to 3.4e+38 is due"),
        ("nan", "reward is nan, where a finite number up to 3.4e+38 is due"),
        ("more_than_float32", "reward is 1e+39, where a finite number up to 3.4e+38 is due"),
        ("fail_with_half_a_character", "ValueError: cut here: \\ud83d"),
        ("number", "step returned float where a StepResult is due"),
        ("none", "step returned None where a StepResult is due"),
        ("assistant", "which is not of the roles user, tool, system"),
        ("no_json", "the answer is not of JSON values"),
        ("answer_much", "the answer has 33,554,"),
        ("ask_for_much", "sampling has max_tokens = 'many'"),
        ("fail_without_words", "WordlessError: its text cannot be made: RuntimeError"),
    ],
)
def test_a_wrong_answer_fails_its_episode_alone(shared_pool, caplog, does, words):
    held, _ = open_episode(shared_pool, turns=2)
    reply = step_episode(shared_pool, **{"step 1": does})
    assert reply.result is None
    assert reply.failure.startswith("environment naughty, task 'one', step 1: ")
    assert reply.failure.count("environment naughty") == 1
    assert words in reply.failure
    caplog.text.encode()  # what is logged can be written to a file
    shared_pool.step(held, action())
    assert receive_reply(shared_pool, held).result.reward == 1.0
    shared_pool.close(held)


def test_a_failure_in_the_beginning_is_one_of_the_episode(shared_pool):
    failure, place = open_episode(shared_pool, begin="fail")[1].failure.split(" (")
    assert failure == "environment naughty, task 'one', begin: ValueError: no such word: None"
    assert place.endswith("naughty_environment.py, line 69, in fail)")


def test_numbers_of_numpy_and_rewards_by_the_token_pass(shared_pool):
    assert step_episode(shared_pool, **{"step 1": "numpy"}).result == StepResult(0.5, parts={"a": 0.5}, metrics={"b": 3.0})
    result = step_episode(shared_pool, **{"step 1": "numpy_everywhere"}).result
    assert result == StepResult(1.5, success=False, info={"count": 3, "all": [0, 1]}, token_rewards=(0.5, 0.5, 0.5))
    assert step_episode(shared_pool, **{"step 1": "count_tokens"}).result == StepResult(5.0, token_rewards=(0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("hang", "timed out after 0.3 s in step 1"),
        ("spin", "timed out after 0.3 s in step 1"),
        ("hang_in_a_coroutine", "timed out after 0.3 s in step 1"),
        ("exit", "its process ended with exit code 7 in step 1"),
        ("leave", "its process ended with exit code 7 in step 1"),
        ("die", "its process was killed by SIGKILL in step 1"),
    ],
)
def test_a_lost_process_fails_its_episode_and_the_others_are_rebuilt(does, words):
    """The other one that it held goes on where it was, in another process."""
    with pool(timeout_s=TIMEOUT_S if "timed out" in words else PATIENCE_S) as episodes:
        held, begun = open_episode(episodes, turns=3)
        episodes.step(held, action())
        assert receive_reply(episodes, held).result.reward == 1.0
        before = time.monotonic()
        reply = step_episode(episodes, **{"step 1": does})
        assert reply.failure == f"environment naughty, task 'one': {words}"
        assert time.monotonic() - before < PATIENCE_S
        episodes.step(held, action(1))
        assert receive_reply(episodes, held).result.reward == 2.0
        assert begun.messages == ({"role": "user", "content": f"seed {held}"},)


def test_a_hanging_beginning_times_out():
    with pool(timeout_s=TIMEOUT_S) as episodes:
        assert open_episode(episodes, begin="hang")[1].failure.endswith("timed out after 0.3 s in begin")


def test_what_an_environment_prints_keeps_nobody_waiting(shared_pool, caplog):
    """50 MB, of which the log has the beginning."""
    with caplog.at_level(logging.INFO, logger="skyrl_engine.rollout"):
        assert step_episode(shared_pool, **{"step 1": "chat"}).result.reward == 1.0
        until = time.monotonic() + PATIENCE_S
        while "the rest is left out" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
    assert "prints more than 65536 bytes; the rest is left out" in caplog.text
    assert len(caplog.text) < 10 * 2**16


def test_a_forked_child_neither_answers_nor_takes_requests():
    with pool(timeout_s=5.0) as episodes:
        number, _ = open_episode(episodes, turns=3, **{"step 1": "fork"})
        for turn in range(3):
            episodes.step(number, action(turn))
            assert receive_reply(episodes, number).result.reward == turn + 1.0


def test_what_an_episode_started_ends_with_its_process(tmp_path):
    with pool(timeout_s=TIMEOUT_S) as episodes:
        reply = step_episode(episodes, **{"step 1": "start_others", "pid": str(tmp_path / "pid")})
        assert "timed out" in reply.failure
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + PATIENCE_S
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid):
    """A process that has ended may wait for its parent to notice."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("does", ["hang", "exit", "fail"])
def test_a_failed_episode_is_tried_again_with_the_same_seed_and_turns(tmp_path, does):
    with pool(retries=1, timeout_s=TIMEOUT_S if does == "hang" else PATIENCE_S) as episodes:
        number, begun = open_episode(episodes, turns=3, **{"step 2": does, "once": str(tmp_path / "once")})
        assert begun.messages == ({"role": "user", "content": f"seed {number}"},)
        for turn in range(3):
            episodes.step(number, action(turn))
            assert receive_reply(episodes, number).result.reward == turn + 1.0
        assert (tmp_path / "once").exists()


def test_an_episode_that_fails_again_has_failed():
    with pool(retries=2) as episodes:
        assert step_episode(episodes, **{"step 1": "fail"}).failure.startswith(
            "environment naughty, task 'one', step 1: ValueError: no such word: hello ("
        )


def test_an_episode_that_answers_otherwise_when_it_is_rebuilt_has_failed():
    with pool(retries=1) as episodes:
        number, _ = open_episode(episodes, turns=3, **{"step 1": "another_each_time", "step 2": "exit"})
        episodes.step(number, action())
        assert receive_reply(episodes, number).result is not None
        episodes.step(number, action(1))
        assert receive_reply(episodes, number).failure.endswith(
            "answers otherwise when it is played again with the same seed and turns"
        )


def test_a_closed_episode_is_closed_in_its_process(tmp_path):
    """At once, not with the next call; a failure to close is nobody else's."""
    closed = tmp_path / "closed"
    with pool() as episodes:
        number, _ = open_episode(episodes, closed=str(closed), close="fail")
        episodes.close(number)
        until = time.monotonic() + PATIENCE_S
        while not closed.exists() and time.monotonic() < until:
            episodes.poll(0.02)
        assert closed.read_text() == "closed\n"
        assert step_episode(episodes).result.reward == 1.0
    assert closed.read_text() == "closed\n"


@pytest.mark.parametrize(("does", "words"), [("hang", "timed out after 0.3 s"), ("exit", "its process ended with exit code 3")])
def test_an_episode_that_loses_its_process_by_the_end_of_another_is_rebuilt(caplog, does, words):
    """It is not the one that failed, so that it needs no further try; the log names who did."""
    with pool(timeout_s=TIMEOUT_S if "timed out" in words else PATIENCE_S) as episodes:
        held, _ = open_episode(episodes, turns=3)
        episodes.step(held, action())
        assert receive_reply(episodes, held).result.reward == 1.0
        number, _ = open_episode(episodes, close=does)
        with caplog.at_level(logging.WARNING, logger="skyrl_engine.rollout"):
            episodes.close(number)
            episodes.step(held, action(1))
            assert receive_reply(episodes, held).result.reward == 2.0
    assert f"environment naughty, task 'one', close: {words}" in caplog.text


def test_a_slow_end_does_not_count_as_time_of_the_next_call():
    with pool(timeout_s=1.0) as episodes:
        number, _ = open_episode(episodes, close="take_a_while")
        episodes.close(number)
        held, begun = open_episode(episodes, begin="take_a_while")
        assert begun.failure is None
        episodes.close(held)


def test_an_end_that_hangs_keeps_nobody_waiting():
    """Others begin in another process, long before it is given up."""
    with pool() as episodes:
        number, _ = open_episode(episodes, close="hang")
        episodes.close(number)
        until = time.monotonic() + 3 * ASLEEP_S
        while time.monotonic() < until:
            episodes.poll(ASLEEP_S)
        assert step_episode(episodes).result.reward == 1.0


def test_an_end_that_hangs_is_given_up(caplog):
    with pool(timeout_s=TIMEOUT_S) as episodes, caplog.at_level(logging.WARNING, logger="skyrl_engine.rollout"):
        number, _ = open_episode(episodes, close="hang")
        episodes.close(number)
        until = time.monotonic() + PATIENCE_S
        while "close: timed out" not in caplog.text and time.monotonic() < until:
            episodes.poll(0.05)
        assert "environment naughty, task 'one', close: timed out after 0.3 s" in caplog.text
        assert episodes._processes == []


def test_what_fails_in_the_end_is_logged(caplog):
    with pool() as episodes, caplog.at_level(logging.INFO, logger="skyrl_engine.rollout"):
        number, _ = open_episode(episodes, close="fail")
        episodes.close(number)
        until = time.monotonic() + PATIENCE_S
        while "will not close" not in caplog.text and time.monotonic() < until:
            episodes.poll(0.02)
    assert "environment naughty, task 'one', close: RuntimeError: will not close" in caplog.text


@pytest.mark.parametrize("held", [{1, 2}, float("nan"), object()])
def test_a_task_that_is_no_json_is_named(held):
    with (
        pool() as episodes,
        pytest.raises(RolloutError, match=r"environment naughty, task 'one': what it holds cannot be sent") as caught,
    ):
        open_episode(episodes, held=held)
    assert "plain JSON values" in caught.value.remedy


def test_a_long_cause_is_cut():
    with pool() as episodes:
        failure = step_episode(episodes, **{"step 1": "fail_at_length"}).failure
    assert failure.startswith("environment naughty, task 'one', step 1: ValueError: xxx")
    assert len(failure) < 2000


def test_lines_that_are_no_answers_fail_the_episode_alone():
    """An environment that writes to descriptors which are not its own, which other episodes survive."""
    with pool() as episodes:
        held, _ = open_episode(episodes, turns=2)
        assert "its process wrote what is no answer in step 1" in step_episode(episodes, **{"step 1": "write_everywhere"}).failure
        episodes.step(held, action())
        assert receive_reply(episodes, held).result.reward == 1.0


def test_a_failure_while_an_episode_is_rebuilt_is_told_where_it_is(tmp_path):
    """The second turn ends the process; played again, the first one fails."""
    with pool(retries=1) as episodes:
        number, _ = open_episode(episodes, turns=3, **{"step 1": "fail_later", "step 2": "exit", "seen": str(tmp_path / "seen")})
        episodes.step(number, action())
        assert receive_reply(episodes, number).result.reward == 1.0
        episodes.step(number, action(1))
        assert receive_reply(episodes, number).failure.startswith(
            "environment naughty, task 'one', step 1: ValueError: not again ("
        )


def test_open_episodes_are_closed_in_the_end(tmp_path):
    episodes = open_pool()
    try:
        for name in ("a", "b"):
            open_episode(episodes, closed=str(tmp_path / name), close="fail")
    finally:
        episodes.shutdown()
    assert [(tmp_path / name).read_text() for name in ("a", "b")] == ["closed\n", "closed\n"]


def test_a_failed_episode_is_closed_too(tmp_path):
    episodes = open_pool()
    try:
        assert step_episode(episodes, closed=str(tmp_path / "a"), **{"step 1": "fail"}).failure
    finally:
        episodes.shutdown()
    assert (tmp_path / "a").read_text() == "closed\n"


def test_an_episode_that_is_closed_while_it_hangs_says_nothing_more():
    with pool(timeout_s=TIMEOUT_S) as episodes:
        number, _ = open_episode(episodes, turns=2, **{"step 1": "hang"})
        episodes.step(number, action())
        assert episodes.poll(0.0) == []
        episodes.close(number)
        other, begun = open_episode(episodes)
        assert begun.messages is not None
        episodes.close(other)
        assert episodes.poll(2 * TIMEOUT_S) == []


def test_a_process_that_answered_is_not_stuck_because_nobody_asked_for_its_answer():
    """As between two steps, when the controller trains."""
    with pool(workers=1) as episodes:
        number, _ = open_episode(episodes)
        episodes.close(number)
        episodes.poll(0.0)
        time.sleep(0.2)
        episodes.open(8, 0, task(), seed=1)
        # hands the call on; on a busy machine the answer is there before this process goes on
        early = episodes.poll(0.0)
        time.sleep(0.2)
        episodes.open(9, 0, task(), seed=1)
        receive_replies(episodes, (8, 9), came=early)
        assert len(episodes._processes) == 1


def test_a_large_turn_does_not_block_who_sends_it():
    """10 MB to a process that is still starting, which reads nothing yet."""
    with pool(timeout_s=30.0) as episodes:
        before = time.monotonic()
        episodes.open(1, 0, task(words="x" * 10**7), seed=1)
        episodes.poll(0.0)
        blocked = time.monotonic() - before
        assert receive_reply(episodes, 1).messages is not None
        assert blocked < time.monotonic() - before
        episodes.step(1, action(text="y" * 10**7))
        assert receive_reply(episodes, 1).result.reward == 1.0


@pytest.mark.parametrize("count", [6, pytest.param(64, marks=pytest.mark.nightly)])
def test_hanging_episodes_do_not_keep_others_waiting(count):
    """They hold a process each; the others are answered long before those time out."""
    with pool() as episodes:
        for number in range(count):
            episodes.open(number, 0, task(begin="hang"), seed=number)
        others = range(1000, 1020)
        for number in others:
            episodes.open(number, 0, task(), seed=number)
        assert {reply.messages is not None for reply in receive_replies(episodes, others).values()} == {True}
        for number in others:
            episodes.step(number, action())
        assert {reply.result.reward for reply in receive_replies(episodes, others).values()} == {1.0}
        assert episodes.pending == count


def test_an_environment_that_cannot_be_made_ends_the_run_with_the_cause():
    with pool("impossible") as episodes:
        episodes.open(1, 0, task(), seed=1)
        with pytest.raises(RolloutError, match=r"cannot be made in a process of its own: .*no licence"):
            receive_reply(episodes, 1)


def test_a_process_that_ends_before_it_began_is_told():
    with pool("vanishing") as episodes:
        episodes.open(1, 0, task(), seed=1)
        assert receive_reply(episodes, 1).failure.endswith("its process ended with exit code 3 before its environments were made")


@pytest.mark.parametrize("killed", [1, 2], ids=["once", "again"])
def test_a_process_that_is_gone_before_it_is_told_anything_fails_its_episode(monkeypatch, killed):
    start, started = EpisodeProcess.start, []

    def start_and_kill(*arguments):
        process = start(*arguments)
        started.append(process)
        if len(started) <= killed:
            process.child.kill()
            process.child.wait()
        return process

    monkeypatch.setattr(EpisodeProcess, "start", start_and_kill)
    with pool(retries=1) as episodes:
        reply = open_episode(episodes)[1]
    assert len(started) == 2
    if killed == 1:
        assert reply.messages
    else:
        assert reply.failure.endswith("its process was killed by SIGKILL before its environments were made")


def test_a_pool_leaves_neither_processes_nor_descriptors():
    def descriptors():
        return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- of numbers

    with pool() as episodes:
        step_episode(episodes)
    before = descriptors()
    with pool(workers=2) as episodes:
        for number in range(4):
            episodes.open(number, 0, task(**({"begin": "hang"} if number == 0 else {})), seed=number)
        receive_replies(episodes, [1, 2, 3])
        pids = [process.child.pid for process in episodes._processes]
    assert len(descriptors()) <= len(before)
    assert not any(map(_runs, pids))
