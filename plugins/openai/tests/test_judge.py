"""A judge over a small endpoint of ours: answers, cost, cache, concurrency and faults."""

import json
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai_routes import Endpoint

from skyrl_engine import RolloutError, UnsupportedError
from skyrl_engine_openai import Judge
from skyrl_engine_openai.judge import _delete_free_slots, _lock

ASK = """
import json, sys
from skyrl_engine_openai import Judge
print(json.dumps(Judge(sys.argv[1], "m", max_tokens=6, cache=sys.argv[2])("one").text))
"""

CHAT = "/v1/chat/completions"
Served = tuple[str, Endpoint]


def judge_over(served: Served, **settings: object) -> Judge:
    return Judge(served[0], "m", **{"max_tokens": 6, **settings})  # type: ignore[arg-type]


def test_an_answer_comes_with_its_cost(plain: Served) -> None:
    judge, endpoint = judge_over(plain), plain[1]
    said = judge("is it right?")
    assert endpoint.bodies[-1]["messages"] == [{"role": "user", "content": "is it right?"}]
    assert endpoint.bodies[-1]["temperature"] == 0
    assert len(said.text) <= 6
    prompt = endpoint.tokenizer.apply_chat_template(endpoint.bodies[-1]["messages"], add_generation_prompt=True, tokenize=False)
    assert said.metrics == {
        "judge/requests": 1.0,
        "judge/cache_hits": 0.0,
        "judge/prompt_tokens": float(len(endpoint.tokenizer.encode(prompt))),
        "judge/completion_tokens": float(len(said.text) + (said.finish == "stop")),
    }
    assert judge([{"role": "user", "content": "is it right?"}]).text == said.text


def test_a_known_answer_costs_nothing_in_another_process_either(plain: Served, tmp_path: Path) -> None:
    cache = tmp_path / "judge.sqlite3"
    endpoint = plain[1]
    said = judge_over(plain, cache=cache)("one")
    count = len(endpoint.bodies)
    again = judge_over(plain, cache=cache)("one")
    assert (again.text, again.finish) == (said.text, said.finish)
    assert again.metrics["judge/cache_hits"] == 1.0
    assert sum(again.metrics.values()) == 1.0
    ended = subprocess.run([sys.executable, "-c", ASK, plain[0], str(cache)], capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == said.text
    assert len(endpoint.bodies) == count
    # what decides the answer decides the question
    for other in ({"max_tokens": 5}, {"temperature": 0.5}):
        judge_over(plain, cache=cache, **other)("one")
    judge_over(plain, cache=cache)("two")
    assert len(endpoint.bodies) == count + 3


def test_the_key_is_sent_and_not_kept(plain: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")  # of the server
    with pytest.raises(UnsupportedError, match="NO_SUCH_KEY"):
        judge_over(plain, api_key_env="NO_SUCH_KEY")
    with pytest.raises(RolloutError, match="401"):
        judge_over(plain)("one")
    monkeypatch.setenv("MY_KEY", "sesame")
    cache = tmp_path / "judge.sqlite3"
    judge_over(plain, api_key_env="MY_KEY", cache=cache)("one")
    assert b"sesame" not in cache.read_bytes()
    with sqlite3.connect(cache) as rows:
        assert "sesame" not in json.dumps(rows.execute("SELECT * FROM answers").fetchall())
    rows.close()


def test_no_more_requests_than_the_limit_are_under_way(plain: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, lock, under_way, most = plain[1], threading.Lock(), 0, 0
    complete: Callable[..., object] = endpoint.complete

    def count(*arguments: object) -> object:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        try:
            return complete(*arguments)
        finally:
            with lock:
                under_way -= 1

    monkeypatch.setattr(endpoint, "complete", count)
    # a judge each, as in processes of their own
    threads = [threading.Thread(target=judge_over(plain, concurrency=2), args=(f"question {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2


def test_no_file_of_a_slot_stays(plain: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even that of a process which was killed; one that is held stays until it is free."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    judge = judge_over(plain, concurrency=2)
    judge._slots.mkdir()
    (judge._slots / "1").touch()
    judge("first")
    assert list(tmp_path.iterdir()) == []
    with judge._take_slot(), judge._take_slot():
        assert sorted(slot.name for slot in judge._slots.iterdir()) == ["0", "1"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["429 0", "500", "cut"])
def test_a_question_is_asked_again_where_that_may_help(plain: Served, wrong: str) -> None:
    plain[1].misbehaviour[CHAT] = f"once {wrong}"
    assert judge_over(plain, retries=1)("one").metrics["judge/requests"] == 1.0
    assert CHAT not in plain[1].misbehaviour


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("500", "2 attempts failed"),
        ("403", "refused /chat/completions .403.: Forbidden"),
        ("html", "a web page"),
        ("notjson", "no JSON"),
        ("garbage", "no chat completion"),
        ("hang", "in time"),
    ],
)
def test_a_judge_that_fails_says_why_and_keeps_nothing(plain: Served, wrong: str, words: str, tmp_path: Path) -> None:
    plain[1].misbehaviour[CHAT] = wrong
    judge = judge_over(plain, retries=1, seconds=0.5, cache=tmp_path / "judge.sqlite3")
    with pytest.raises(RolloutError, match=words):
        judge("one")
    plain[1].misbehaviour.clear()
    assert judge_over(plain, cache=tmp_path / "judge.sqlite3")("one").metrics["judge/cache_hits"] == 0.0


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="base URL"):
        Judge("host:80", "m")
    with pytest.raises(ValueError, match="concurrency"):
        Judge("http://host/v1", "m", concurrency=0)


def test_slots_that_others_delete_meanwhile_are_made_again(tmp_path: Path) -> None:
    place = tmp_path / "slots"

    def take_and_delete() -> None:
        for _ in range(300):
            if (held := _lock(place / "0")) is not None:
                held.close()
                _delete_free_slots(place)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(take_and_delete) for _ in range(8)]:
            done.result()
