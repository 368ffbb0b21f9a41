"""Another process answers as this one does, or the plugin is broken: it orders sets of texts otherwise."""

import os
import sys
from pathlib import Path

import pytest

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.testing import another_process
from skyrl_engine.testing.another_process import ask
from skyrl_engine.testing.kit import promises_of
from skyrl_engine.testing.promise import Broken, Undecidable
from skyrl_engine.testing.recorded_sets import find_sources, record_sets
from skyrl_engine.testing.subject import Subject, select_plugin

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing", "skyrl_engine/contracts", "skyrl_engine/registry", "skyrl_engine/config"
)

BY_SETS = {
    "loss": """
from skyrl_engine import loss


@loss(needs=("logprobs",))
def mine(tokens, config):
    return -tokens.logprobs * (1 + ord(first()))
""",
    "correction": """
from skyrl_engine import correction


@correction(needs=("old_logprobs",))
def mine(tokens, config):
    return tokens.old_logprobs.new_full(tokens.old_logprobs.shape, ord(first()))
""",
    "reducer": """
import numpy as np
from skyrl_engine import reducer


@reducer(needs=("sample:domain",))
def mine(structure, config):
    domains = structure.sample_values["domain"].tolist()
    share = {domain: 1.0 + place for place, domain in enumerate(set(domains))}
    return structure.loss_weight * np.array([share[domain] for domain in domains])[structure.sequence_index]
""",
    "advantage": """
from skyrl_engine import advantage


@advantage()
def mine(batch, config):
    return batch.spread(batch.trajectory_rewards() * ord(first()))
""",
    "group_filter": """
from skyrl_engine import group_filter


@group_filter()
def mine(group, config):
    return f"by_{first()}"
""",
}
FIRST = "from string import ascii_letters\n\n\ndef first():\n    return next(iter(set(ascii_letters)))\n\n"


def finding(kind, source, folder):
    (folder / "mine.py").write_text(FIRST + source)
    subject = Subject.of_plugin(select_plugin(kind, "./mine.py:mine", {}, base=folder))
    (promise,) = (candidate for candidate in promises_of(kind) if candidate.name == "another_process")
    return promise.hold(subject)


@pytest.mark.parametrize("kind", BY_SETS)
def test_the_order_of_a_set_is_seen(kind, tmp_path):
    found = finding(kind, BY_SETS[kind], tmp_path)
    assert found.status == "broken", found
    assert "another order" in str(found.cause), found


def test_a_set_of_two_texts_of_the_plugin_s_own_is_seen_whichever_two(tmp_path):
    """A pair that the first process orders as this one does; another process is asked, which does not."""
    pairs = tuple((f"first {number}", f"second {number}") for number in range(40))
    pair = next(pair for pair in pairs if ask(list_set, pair) == list(set(pair)))
    source = f"""
from skyrl_engine import group_filter


@group_filter()
def mine(group, config):
    for name in set(NAMES):
        return name


NAMES = ["{{}} {{}}".format(*name.split()) for name in {list(pair)!r}]
"""
    assert finding("group_filter", source, tmp_path).status == "broken"


def test_the_order_of_a_set_of_an_environment_is_seen(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Which?"}\n')
    (tmp_path / "mine.py").write_text(
        "from skyrl_engine import reward\n\n\n@reward()\ndef mine(text, task):\n"
        "    return float([*{task.key, task.messages[0]['content']}].index(task.key))\n"
    )
    options = {"data": str(tmp_path / "tasks.jsonl")}
    subject = Subject.of_plugin(select_plugin("environment", "./mine.py:mine", options, base=tmp_path))
    (promise,) = (candidate for candidate in promises_of("environment") if candidate.name == "same_in_another_process")
    found = promise.hold(subject)
    assert found.status == "broken", found
    assert "in another process" in str(found.cause), found


ORDERS_USED = """
from collections import defaultdict

from skyrl_engine import group_filter

KNOWN, grouped = frozenset(("never", "asked")), defaultdict(set)


@group_filter()
def mine(group, config):
    for first in ("b", "a"):
        grouped["found"].add(first)
    order = [*{"d", "c"}, *(name for name in {("e", 1), ("f", 2)} if name not in KNOWN)]
    one, other = {"h", "g"} | set()
    if {"i", "j"} == KNOWN or sorted({"k", "l"}) == order or len({"m", "n"}) == 3 or list({1, 2}) == order:
        return {"o", "p"}.pop()
    return f"by_{list(grouped['found'])[0]}"
"""


def test_sets_whose_order_is_used_are_recorded(tmp_path):
    """Neither those that are only asked or sorted, nor those of numbers, nor one that no call uses."""
    (tmp_path / "mine.py").write_text(ORDERS_USED)
    plugin = select_plugin("group_filter", "./mine.py:mine", {}, base=tmp_path)
    sources = find_sources(plugin.loaded.record)
    called, sets = ask(record_sets, sources, call_filter, plugin.to_lock_entry())
    assert called in ("by_a", "by_b")
    assert sets.keys() == {frozenset(own) for own in ("ab", "cd", (("e", 1), ("f", 2)), "gh")}
    assert all(frozenset(order) == members for members, orders in sets.items() for order in orders)


def call_filter(lock):
    return Subject.of_plugin(SelectedPlugin.from_lock(lock)).make()(None)


def test_the_code_of_a_distribution_is_its_package():
    record = select_plugin("loss", "cross_entropy", {}).loaded.record
    sources = find_sources(record)
    assert (sources.package, Path(sources.place).name) == ("skyrl_engine_losses", "skyrl_engine_losses")
    assert sources.hold(str(Path(sources.place) / "plugin.py"))
    lock = select_plugin("loss", "cross_entropy", {}).to_lock_entry()
    assert ask(record_sets, sources, name_plugin, lock) == ("cross_entropy", {})


def name_plugin(lock):
    return SelectedPlugin.from_lock(lock).loaded.record.name


@pytest.mark.parametrize(
    "clock", ["time.localtime().tm_mday", "datetime.date.today().day", "int(datetime.now().timestamp()) // 86_400"]
)
def test_the_day_is_seen(clock, tmp_path):
    imports = "import datetime, time\n" if "date.today" in clock else "import time\nfrom datetime import datetime\n"
    first = f"{imports}\n\ndef first():\n    return chr(40 + {clock} % 31)\n\n"
    (tmp_path / "mine.py").write_text(first + BY_SETS["advantage"])
    subject = Subject.of_plugin(select_plugin("advantage", "./mine.py:mine", {}, base=tmp_path))
    (promise,) = (candidate for candidate in promises_of("advantage") if candidate.name == "another_process")
    found = promise.hold(subject)
    assert found.status == "broken", found
    assert "it is another day" in str(found.cause), found


@pytest.mark.parametrize("kind", BY_SETS)
def test_a_sorted_set_is_right(kind, tmp_path):
    source = BY_SETS[kind].replace("set(domains)", "sorted(set(domains))").replace("first()", "min(ascii_letters)")
    found = finding(kind, source, tmp_path)
    assert found.status == "kept", found


def test_the_kits_texts_have_another_order_there():
    for texts in another_process.TEXTS:
        assert ask(list_set, texts) != list(set(texts))


def list_set(texts):
    return list(set(texts))


def test_no_answer_changes_the_next(monkeypatch, tmp_path):
    assert ask(sys.path.append, "left behind") is None
    monkeypatch.setenv("TOLD_TO_BOTH", "yes")
    monkeypatch.chdir(tmp_path)
    assert "left behind" not in ask(list, sys.path)
    assert ask(os.getenv, "TOLD_TO_BOTH") == "yes"
    assert ask(os.getenv, "RANK") == "1"
    assert ask(Path.cwd) == tmp_path


def test_a_failure_there_is_told():
    with pytest.raises(Broken, match=r"fails in a fresh process: FileNotFoundError: .*no-such-file"):
        ask(os.stat, "no-such-file")
    with pytest.raises(Broken, match="fails in a fresh process: it ended with status 7"):
        ask(os._exit, 7)
    with pytest.raises(Undecidable, match="cannot be pickled"):
        ask(lambda: 1)
    assert ask(abs, -1) == 1, "and the next question is answered"


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(monkeypatch):
    real = another_process.Connection.recv_bytes
    monkeypatch.setattr(another_process.Connection, "recv_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask(abs, -1)
    monkeypatch.setattr(another_process.Connection, "recv_bytes", real)
    assert ask(abs, -2) == 2


def interrupt(*_):
    raise KeyboardInterrupt
