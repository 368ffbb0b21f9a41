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
from skyrl_engine.testing import select_plugin

FILE = Path(__file__).with_name("naughty_environment.py")
TIMEOUT_S = 0.3
"""For what hangs; what answers is given PATIENCE_S."""
ASLEEP_S = 0.05
"""Seconds after which a process that sleeps in a call makes room for another."""
PATIENCE_S = 60.0
"""A test that waits for so long has failed; machines are busy."""


def pool_of(name="naughty", **options):
    lock = select_plugin("environment", f"{FILE}:{name}", {}).to_lock_entry()
    return EpisodePool([lock], [name], FactoryContext(), **{"workers": 1, "timeout_s": PATIENCE_S, "retries": 0, **options})


@contextmanager
def pool(name="naughty", **options):
    made = pool_of(name, **options)
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def shared():
    """A pool whose process survives, for tests that need no options; tests that lose it get the next one."""
    with pool() as made:
        yield made


def task(**data):
    return Task("one", prompt_ids=(1,), data=data)


def action(turn=0, text="hello"):
    return Action(text, (1, 2, 3), turn, "stop")


def reply_of(made, episode):
    """The next reply, which is for this episode."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        replies = made.poll(0.2)
        if replies:
            assert [reply.episode for reply in replies] == [episode]
            return replies[0]
    raise AssertionError("no reply came")


def replies_of(made, episodes, *, came=()):
    """The next reply of each of these episodes; `came` are those that did already."""
    until, seen = time.monotonic() + PATIENCE_S, {reply.episode: reply for reply in came}
    while len(seen) < len(episodes) and time.monotonic() < until:
        for reply in made.poll(0.2):
            assert reply.episode not in seen
            seen[reply.episode] = reply
    assert set(seen) == set(episodes)
    return seen


_numbers = iter(range(1, 10**6))


def opened(made, **data):
    number = next(_numbers)
    made.open(number, 0, task(**data), seed=number)
    return number, reply_of(made, number)


def stepped(made, **data):
    """The reply to the first turn of an episode."""
    number, begun = opened(made, **data)
    assert begun.messages is not None, begun.failure
    made.step(number, action())
    reply = reply_of(made, number)
    made.close(number)
    return reply


def test_an_episode_is_opened_answered_and_closed(shared):
    number, begun = opened(shared, turns=2)
    assert begun.messages == ({"role": "user", "content": f"seed {number}"},)
    shared.step(number, action())
    first = reply_of(shared, number)
    assert first.result == StepResult(1.0, done=False, messages=({"role": "user", "content": "go on"},))
    assert 0 < first.seconds < PATIENCE_S
    shared.step(number, action(1))
    assert reply_of(shared, number).result == StepResult(2.0)
    shared.close(number)
    assert shared.pending == 0


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
def test_a_wrong_answer_fails_its_episode_alone(shared, caplog, does, words):
    held, _ = opened(shared, turns=2)
    reply = stepped(shared, **{"step 1": does})
    assert reply.result is None
    assert reply.failure.startswith("environment naughty, task 'one', step 1: ")
    assert reply.failure.count("environment naughty") == 1
    assert words in reply.failure
    caplog.text.encode()  # what is logged can be written to a file
    shared.step(held, action())
    assert reply_of(shared, held).result.reward == 1.0
    shared.close(held)


def test_a_failure_in_the_beginning_is_one_of_the_episode(shared):
    told, place = opened(shared, begin="fail")[1].failure.split(" (")
    assert told == "environment naughty, task 'one', begin: ValueError: no such word: None"
    assert place.endswith("naughty_environment.py, line 69, in fail)")


def test_numbers_of_numpy_and_rewards_by_the_token_pass(shared):
    assert stepped(shared, **{"step 1": "numpy"}).result == StepResult(0.5, parts={"a": 0.5}, metrics={"b": 3.0})
    result = stepped(shared, **{"step 1": "numpy_everywhere"}).result
    assert result == StepResult(1.5, success=False, info={"count": 3, "all": [0, 1]}, token_rewards=(0.5, 0.5, 0.5))
    assert stepped(shared, **{"step 1": "count_tokens"}).result == StepResult(5.0, token_rewards=(0.5, 0.5, 0.5))


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
    """The one that it held beside goes on where it was, in another process."""
    with pool(timeout_s=TIMEOUT_S if "timed out" in words else PATIENCE_S) as made:
        held, begun = opened(made, turns=3)
        made.step(held, action())
        assert reply_of(made, held).result.reward == 1.0
        before = time.monotonic()
        reply = stepped(made, **{"step 1": does})
        assert reply.failure == f"environment naughty, task 'one': {words}"
        assert time.monotonic() - before < PATIENCE_S
        made.step(held, action(1))
        assert reply_of(made, held).result.reward == 2.0
        assert begun.messages == ({"role": "user", "content": f"seed {held}"},)


def test_a_hanging_beginning_times_out():
    with pool(timeout_s=TIMEOUT_S) as made:
        assert opened(made, begin="hang")[1].failure.endswith("timed out after 0.3 s in begin")


def test_what_an_environment_prints_keeps_nobody_waiting(shared, caplog):
    """50 MB, of which the log has the beginning."""
    with caplog.at_level(logging.INFO, logger="skyrl_engine.rollout"):
        assert stepped(shared, **{"step 1": "chat"}).result.reward == 1.0
        until = time.monotonic() + PATIENCE_S
        while "the rest is left out" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
    assert "prints more than 65536 bytes; the rest is left out" in caplog.text
    assert len(caplog.text) < 10 * 2**16


def test_a_forked_child_neither_answers_nor_takes_requests():
    with pool(timeout_s=5.0) as made:
        number, _ = opened(made, turns=3, **{"step 1": "fork"})
        for turn in range(3):
            made.step(number, action(turn))
            assert reply_of(made, number).result.reward == turn + 1.0


def test_what_an_episode_started_ends_with_its_process(tmp_path):
    with pool(timeout_s=TIMEOUT_S) as made:
        reply = stepped(made, **{"step 1": "start_others", "pid": str(tmp_path / "pid")})
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
    with pool(retries=1, timeout_s=TIMEOUT_S if does == "hang" else PATIENCE_S) as made:
        number, begun = opened(made, turns=3, **{"step 2": does, "once": str(tmp_path / "once")})
        assert begun.messages == ({"role": "user", "content": f"seed {number}"},)
        for turn in range(3):
            made.step(number, action(turn))
            assert reply_of(made, number).result.reward == turn + 1.0
        assert (tmp_path / "once").exists()


def test_an_episode_that_fails_again_has_failed():
    with pool(retries=2) as made:
        assert stepped(made, **{"step 1": "fail"}).failure.startswith(
            "environment naughty, task 'one', step 1: ValueError: no such word: hello ("
        )


def test_an_episode_that_answers_otherwise_when_it_is_rebuilt_has_failed():
    with pool(retries=1) as made:
        number, _ = opened(made, turns=3, **{"step 1": "another_each_time", "step 2": "exit"})
        made.step(number, action())
        assert reply_of(made, number).result is not None
        made.step(number, action(1))
        assert reply_of(made, number).failure.endswith("answers otherwise when it is played again with the same seed and turns")


def test_a_closed_episode_is_closed_in_its_process(tmp_path):
    """At once, not with the next call; a failure to close is nobody else's."""
    closed = tmp_path / "closed"
    with pool() as made:
        number, _ = opened(made, closed=str(closed), close="fail")
        made.close(number)
        until = time.monotonic() + PATIENCE_S
        while not closed.exists() and time.monotonic() < until:
            made.poll(0.02)
        assert closed.read_text() == "closed\n"
        assert stepped(made).result.reward == 1.0
    assert closed.read_text() == "closed\n"


@pytest.mark.parametrize(("does", "words"), [("hang", "timed out after 0.3 s"), ("exit", "its process ended with exit code 3")])
def test_an_episode_that_loses_its_process_by_the_end_of_another_is_rebuilt(caplog, does, words):
    """It is not the one that failed, so that it needs no further try; the log names who did."""
    with pool(timeout_s=TIMEOUT_S if "timed out" in words else PATIENCE_S) as made:
        held, _ = opened(made, turns=3)
        made.step(held, action())
        assert reply_of(made, held).result.reward == 1.0
        number, _ = opened(made, close=does)
        with caplog.at_level(logging.WARNING, logger="skyrl_engine.rollout"):
            made.close(number)
            made.step(held, action(1))
            assert reply_of(made, held).result.reward == 2.0
    assert f"environment naughty, task 'one', close: {words}" in caplog.text


def test_a_slow_end_does_not_count_as_time_of_the_next_call():
    with pool(timeout_s=1.0) as made:
        number, _ = opened(made, close="take_a_while")
        made.close(number)
        held, begun = opened(made, begin="take_a_while")
        assert begun.failure is None
        made.close(held)


def test_an_end_that_hangs_keeps_nobody_waiting():
    """Others begin in another process, long before it is given up."""
    with pool() as made:
        number, _ = opened(made, close="hang")
        made.close(number)
        until = time.monotonic() + 3 * ASLEEP_S
        while time.monotonic() < until:
            made.poll(ASLEEP_S)
        assert stepped(made).result.reward == 1.0


def test_an_end_that_hangs_is_given_up(caplog):
    with pool(timeout_s=TIMEOUT_S) as made, caplog.at_level(logging.WARNING, logger="skyrl_engine.rollout"):
        number, _ = opened(made, close="hang")
        made.close(number)
        until = time.monotonic() + PATIENCE_S
        while "close: timed out" not in caplog.text and time.monotonic() < until:
            made.poll(0.05)
        assert "environment naughty, task 'one', close: timed out after 0.3 s" in caplog.text
        assert made._processes == []


def test_what_fails_in_the_end_is_logged(caplog):
    with pool() as made, caplog.at_level(logging.INFO, logger="skyrl_engine.rollout"):
        number, _ = opened(made, close="fail")
        made.close(number)
        until = time.monotonic() + PATIENCE_S
        while "will not close" not in caplog.text and time.monotonic() < until:
            made.poll(0.02)
    assert "environment naughty, task 'one', close: RuntimeError: will not close" in caplog.text


@pytest.mark.parametrize("held", [{1, 2}, float("nan"), object()])
def test_a_task_that_is_no_json_is_named(held):
    with (
        pool() as made,
        pytest.raises(RolloutError, match=r"environment naughty, task 'one': what it holds cannot be sent") as caught,
    ):
        opened(made, held=held)
    assert "plain JSON values" in caught.value.remedy


def test_a_long_cause_is_cut():
    with pool() as made:
        failure = stepped(made, **{"step 1": "fail_at_length"}).failure
    assert failure.startswith("environment naughty, task 'one', step 1: ValueError: xxx")
    assert len(failure) < 2000


def test_lines_that_are_no_answers_fail_the_episode_alone():
    """An environment that writes to descriptors which are not its own, which other episodes survive."""
    with pool() as made:
        held, _ = opened(made, turns=2)
        assert "its process wrote what is no answer in step 1" in stepped(made, **{"step 1": "write_everywhere"}).failure
        made.step(held, action())
        assert reply_of(made, held).result.reward == 1.0


def test_a_failure_while_an_episode_is_rebuilt_is_told_where_it_is(tmp_path):
    """The second turn ends the process; played again, the first one fails."""
    with pool(retries=1) as made:
        number, _ = opened(made, turns=3, **{"step 1": "fail_later", "step 2": "exit", "seen": str(tmp_path / "seen")})
        made.step(number, action())
        assert reply_of(made, number).result.reward == 1.0
        made.step(number, action(1))
        assert reply_of(made, number).failure.startswith("environment naughty, task 'one', step 1: ValueError: not again (")


def test_open_episodes_are_closed_in_the_end(tmp_path):
    made = pool_of()
    try:
        for name in ("a", "b"):
            opened(made, closed=str(tmp_path / name), close="fail")
    finally:
        made.shutdown()
    assert [(tmp_path / name).read_text() for name in ("a", "b")] == ["closed\n", "closed\n"]


def test_a_failed_episode_is_closed_too(tmp_path):
    made = pool_of()
    try:
        assert stepped(made, closed=str(tmp_path / "a"), **{"step 1": "fail"}).failure
    finally:
        made.shutdown()
    assert (tmp_path / "a").read_text() == "closed\n"


def test_an_episode_that_is_closed_while_it_hangs_says_nothing_more():
    with pool(timeout_s=TIMEOUT_S) as made:
        number, _ = opened(made, turns=2, **{"step 1": "hang"})
        made.step(number, action())
        assert made.poll(0.0) == []
        made.close(number)
        other, begun = opened(made)
        assert begun.messages is not None
        made.close(other)
        assert made.poll(2 * TIMEOUT_S) == []


def test_a_process_that_answered_is_not_stuck_because_nobody_asked_for_its_answer():
    """As between two steps, when the controller trains."""
    with pool(workers=1) as made:
        number, _ = opened(made)
        made.close(number)
        made.poll(0.0)
        time.sleep(0.2)
        made.open(8, 0, task(), seed=1)
        # hands the call on; on a busy machine the answer is there before this process goes on
        early = made.poll(0.0)
        time.sleep(0.2)
        made.open(9, 0, task(), seed=1)
        replies_of(made, (8, 9), came=early)
        assert len(made._processes) == 1


def test_a_large_turn_does_not_block_who_sends_it():
    """10 MB to a process that is still starting, which reads nothing yet."""
    with pool(timeout_s=30.0) as made:
        before = time.monotonic()
        made.open(1, 0, task(words="x" * 10**7), seed=1)
        made.poll(0.0)
        blocked = time.monotonic() - before
        assert reply_of(made, 1).messages is not None
        assert blocked < time.monotonic() - before
        made.step(1, action(text="y" * 10**7))
        assert reply_of(made, 1).result.reward == 1.0


@pytest.mark.parametrize("count", [6, pytest.param(64, marks=pytest.mark.nightly)])
def test_hanging_episodes_do_not_keep_others_waiting(count):
    """They hold a process each; the others are answered long before those time out."""
    with pool() as made:
        for number in range(count):
            made.open(number, 0, task(begin="hang"), seed=number)
        others = range(1000, 1020)
        for number in others:
            made.open(number, 0, task(), seed=number)
        assert {reply.messages is not None for reply in replies_of(made, others).values()} == {True}
        for number in others:
            made.step(number, action())
        assert {reply.result.reward for reply in replies_of(made, others).values()} == {1.0}
        assert made.pending == count


def test_an_environment_that_cannot_be_made_ends_the_run_with_the_cause():
    with pool("impossible") as made:
        made.open(1, 0, task(), seed=1)
        with pytest.raises(RolloutError, match=r"cannot be made in a process of its own: .*no licence"):
            reply_of(made, 1)


def test_a_process_that_ends_before_it_began_is_told():
    with pool("vanishing") as made:
        made.open(1, 0, task(), seed=1)
        assert reply_of(made, 1).failure.endswith("its process ended with exit code 3 before its environments were made")


def test_a_pool_leaves_neither_processes_nor_descriptors():
    def descriptors():
        return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 -- of numbers

    with pool() as made:
        stepped(made)
    before = descriptors()
    with pool(workers=2) as made:
        for number in range(4):
            made.open(number, 0, task(**({"begin": "hang"} if number == 0 else {})), seed=number)
        replies_of(made, [1, 2, 3])
        pids = [process.child.pid for process in made._processes]
    assert len(descriptors()) <= len(before)
    assert not any(map(_runs, pids))
