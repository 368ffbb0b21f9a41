"""The controller makes records of what ranks say, and tells a lost node from a dead rank; with a stand-in for Ray's calls."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_engine.errors import CheckpointError, PluginBrokenError
from skyrl_engine.workers.rank_log import RankLog, ranks_in_words
from skyrl_engine.workers.rank_output import RECORD, OutputReader
from skyrl_engine.workers.ray_actor import Failure, Place
from skyrl_engine.workers.ray_transport import RayTransport, _explain


class RayError(Exception):
    pass


class Call:
    """One call of an actor: computed when it is asked for, as the reader blocks."""

    def __init__(self, method: Any) -> None:
        self.method = method


class Actor:
    def __init__(self, reader: OutputReader) -> None:
        self.reader = reader
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda: Call(self._call(name)))

    def _call(self, name: str) -> Any:
        if name == "stop":
            self.reader.stop()

        def answer() -> Any:
            if self.lost:
                raise RayError
            return getattr(self.reader, name)()

        return answer


class Ray:
    """Two nodes, one of which can be lost."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self) -> None:
        self.actors: list[Actor] = []

    def remote(self, cls: type) -> Any:
        def make_actor(paths: dict[int, str]) -> Actor:
            self.actors.append(Actor(cls(paths)))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make_actor))

    def wait(self, calls: list[Call], **_: Any) -> tuple[list[Call], list[Call]]:
        return calls[:1], calls[1:]

    def get(self, call: Call, timeout: float | None = None) -> Any:
        return call.method()

    def kill(self, actor: Actor) -> None: ...


@pytest.fixture
def places(tmp_path: Path) -> list[Place]:
    """Ranks 0 and 1 on one node, rank 2 on another; each has said the same and something of its own."""
    record = json.dumps({"level": logging.WARNING, "name": "warnings", "message": "UserWarning: careful", "time": 1.5})
    found = []
    for rank, node in enumerate("aab"):
        output = tmp_path / f"output-{rank}"
        output.write_text(f"printed {rank}\n{RECORD}{record}\n")
        found.append(Place(node * 56, f"10.0.0.{node}", 1, node, 70 + rank, (), str(output)))
    return found


def test_every_rank_is_named_and_a_warning_keeps_what_the_rank_said(places: list[Place], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        RankLog(Ray(), places).close()
    records = [record for record in caplog.records if record.name == "skyrl_engine.ranks"]
    assert {record.getMessage() for record in records if record.levelname == "INFO"} == {
        f"rank {rank} ({node}, pid {70 + rank}) output: printed {rank}" for rank, node in enumerate("aab")
    }
    warned = [record for record in records if record.levelname == "WARNING"]
    assert sorted(record.getMessage() for record in warned) == [
        f"rank {rank} ({node}, pid {70 + rank}) warnings: UserWarning: careful" for rank, node in enumerate("aab")
    ]
    assert {record.said for record in warned} == {"UserWarning: careful"}
    assert {record.created for record in warned} == {1.5}


def test_a_node_is_lost_when_its_reader_is_gone_and_a_rank_when_only_it_is(places: list[Place]) -> None:
    ray = Ray()
    log = RankLog(ray, places)
    transport = RayTransport.__new__(RayTransport)
    transport._log, transport._places = log, places
    assert transport._find_lost_node(0, "run") is None
    alone = _explain("run", {2: "killed"}, {}, places)
    assert "rank 2 died during run: killed (it was on b (10.0.0.b), pid 72, CPU)" in str(alone)
    ray.actors[0].lost = True
    lost = transport._find_lost_node(1, "run")
    assert "the node a (10.0.0.a) was lost during run, and ranks 0 and 1 with it" in str(lost)
    log.close()


def test_a_plugin_s_error_explains_a_death_and_a_death_explains_other_errors(places: list[Place]) -> None:
    """A peer may die of what the failed rank called next; a rank whose peer died cannot write its checkpoint."""
    own, other = PluginBrokenError("loss 'mine' failed", remedy="Correct it"), CheckpointError("cannot be written", remedy="Look")
    assert _explain("run", {1: "killed"}, {0: Failure(own, own.summary, "")}, places) is own
    assert "rank 1 died during save" in str(_explain("save", {1: "killed"}, {0: Failure(other, other.summary, "")}, places))


def test_the_log_goes_on_without_a_reader_that_ended(
    places: list[Place], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node's lines arrive, and it is said whose no longer do."""
    monkeypatch.setattr(Actor, "_call", _losing(Actor._call, of_ranks={2}))
    with caplog.at_level(logging.INFO):
        RankLog(Ray(), places).close()
    assert "printed 1" in caplog.text
    assert "printed 2" not in caplog.text
    assert "the output of rank 2 is no longer read" in caplog.text


def _losing(call: Any, of_ranks: set[int]) -> Any:
    def change_actor(actor: Actor, name: str) -> Any:
        actor.lost = set(actor.reader._files) == of_ranks
        return call(actor, name)

    return change_actor


@pytest.mark.parametrize(("ranks", "words"), [([3], "rank 3"), ([0, 1], "ranks 0 and 1"), ([0, 1, 3], "ranks 0, 1 and 3")])
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words
