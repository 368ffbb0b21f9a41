"""A row of the table of rollout columns is all that a new number per token needs: from an environment's answer to what losses read, and back
from the journal and from exports.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from skyrl_engine.contracts.kinds.environment import EnvironmentClaims, StepResult
from skyrl_engine.contracts.kinds.generator import Completion
from skyrl_engine.contracts.values import rollout_columns
from skyrl_engine.contracts.values.rollout import Group, Trajectory, VersionSpans
from skyrl_engine.contracts.values.rollout_columns import RolloutColumn
from skyrl_engine.errors import ContractError, RolloutError
from skyrl_engine.rollout.arrow_codec import formats
from skyrl_engine.rollout.checking import check_journal
from skyrl_engine.rollout.columns import to_columns
from skyrl_engine.rollout.env_pool import _result
from skyrl_engine.rollout.episode_process import EpisodeServer
from skyrl_engine.rollout.exported import read_rollouts, rows_of, write_rows
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.rollout.journal_index import read_groups
from skyrl_engine.rollout.transcript import Transcript
from skyrl_engine.testing.rollout_cases import plain_group, require_same

TURNS = ((5, 6, 7), (8, 9))
ANSWERS = ({"doubt": (0.5, 0.25, -1.0), "progress": 0.75}, {"doubt": (2.0, 4.0), "progress": 1.5})


class Doubtful:
    """An environment of two turns, whose answers have the columns that its claims name; it is its own episode."""

    def __init__(self, *answers, claimed=("doubt", "progress")):
        self.answers, self.claims = answers, EnvironmentClaims(max_turns=2, columns=claimed)

    def open(self, task, seed):
        return self

    def begin(self):
        return ()

    def step(self, action):
        last = action.turn == len(TURNS) - 1
        more = () if last else ({"role": "user", "content": "on"},)
        return StepResult(1.0, done=last, messages=more, columns=self.answers[action.turn])

    def close(self):
        pass


@pytest.fixture
def two_more(monkeypatch):
    """The table with two rows more: one number per token, and one per turn."""
    rows = (RolloutColumn("doubt", "doubt"), RolloutColumn("progress", "progress_of_turns", per="turn"))
    monkeypatch.setattr(rollout_columns, "ROLLOUT_COLUMNS", (*rollout_columns.ROLLOUT_COLUMNS, *rows))


def answers_of(environment):
    """Two answers of an environment as the engine receives them from its process: lines of JSON."""
    server = EpisodeServer([environment])
    task = {"key": "a", "messages": [], "prompt_ids": [1], "data": {}, "tools": [], "images": []}
    server.handle({"do": "open", "episode": 3, "environment": 0, "task": task, "seed": 1})
    for turn, tokens in enumerate(TURNS):
        action = {"text": "", "token_ids": tokens, "turn": turn, "finish": "stop", "tool_calls": [], "tool_problem": None}
        yield json.loads(json.dumps(server.handle({"do": "step", "episode": 3, "action": action}), allow_nan=False))
    server.close_all()


def attempt_of(environment) -> Trajectory:
    transcript = Transcript(np.array([1, 2], dtype=np.int32))
    for tokens, answer in zip(TURNS, answers_of(environment), strict=True):
        logprobs = np.full(len(tokens), -0.5, dtype=np.float32)
        transcript.add_completion(Completion(0, np.array(tokens), logprobs, VersionSpans.one(0, len(tokens)), "stop"))
        result = _result(answer["result"])
        transcript.add_reward(result.reward, result.token_rewards)
        transcript.add_columns(result.columns)
        if not result.done:
            transcript.add_observation(np.array([3, 3], dtype=np.int32))
    return transcript.trajectory(ticket=4, member=0, start_version=0)


@pytest.mark.usefixtures("two_more")
def test_a_new_column_travels_from_the_environment_to_what_losses_read_and_back_from_the_disk(tmp_path: Path) -> None:
    group = Group(4, "doubtful", "a", 0, (attempt_of(Doubtful(*ANSWERS)),))
    with open_journal(tmp_path / "rollouts", run="a") as journal:
        journal.append(group)
    assert check_journal(tmp_path / "rollouts").wrong == ()
    back = list(read_groups(tmp_path / "rollouts"))
    for to in ("jsonl", "parquet"):
        write_rows((row for row in rows_of(group)), tmp_path / f"out.{to}", to)
        back += read_rollouts(tmp_path / f"out.{to}")
    for got in (group, *back):
        require_same(got, group)
        columns = to_columns([got], environments=["doubtful"]).columns
        assert columns["doubt"].tolist() == [0.5, 0.25, -1.0, 0, 0, 2.0, 4.0]
        assert columns["progress_of_turns"].tolist() == [0, 0, 0.75, 0, 0, 0, 1.5]
        assert columns["doubt"].dtype == np.float32
        assert "teacher_logprobs" not in columns


@pytest.mark.parametrize(
    ("answers", "claimed", "words"),
    [
        ((ANSWERS[0], {}), ("doubt", "progress"), "columns lacks 'doubt', which the environment's claims name"),
        (ANSWERS, ("doubt",), "columns has 'progress', which the environment's claims do not name"),
        (({"dout": (0.0,) * 3},), (), "no column 'dout' of rollouts; there is teacher_logprobs, doubt, progress"),
        (({"doubt": (0.0,) * 2},), ("doubt",), r"doubt = \(0.0, 0.0\), where 3 finite numbers are due, one per token"),
        (({"doubt": 0.5},), ("doubt",), "where 3 finite numbers are due"),
        (({"doubt": (0.0, float("nan"), 0.0)},), ("doubt",), "where 3 finite numbers are due"),
    ],
)
@pytest.mark.usefixtures("two_more")
def test_an_answer_with_other_columns_than_claimed_fails_by_name(answers, claimed, words) -> None:
    failures = [answer.get("failure", "") for answer in answers_of(Doubtful(*answers, ANSWERS[-1], claimed=claimed))]
    assert any(re.search(words, failure) for failure in failures), failures


def test_claims_of_an_unknown_column_are_refused() -> None:
    with pytest.raises(ContractError, match="there is no column 'doubt' of rollouts; there is teacher_logprobs"):
        EnvironmentClaims(columns=("doubt",))


def test_attempts_without_the_column_take_it_from_the_batch_and_not_from_the_journal(tmp_path: Path) -> None:
    """A column of some attempts alone is no column of the batch: a part that needs it was refused while planning."""
    group = plain_group(1)
    taught = evolve(group.trajectories[0], columns={"teacher_logprobs": np.float32([-1, -2, -3])})
    mixed = evolve(group, trajectories=(taught, group.trajectories[1]))
    with open_journal(tmp_path, run="a") as journal:
        journal.append(mixed)
    (back,) = read_groups(tmp_path)
    require_same(back, mixed)
    assert "teacher_logprobs" not in to_columns([back], environments=["spell"]).columns


def test_a_journal_of_fewer_rows_is_read_and_one_of_more_is_refused(tmp_path: Path, monkeypatch) -> None:
    table = rollout_columns.ROLLOUT_COLUMNS
    monkeypatch.setattr(rollout_columns, "ROLLOUT_COLUMNS", tuple(row for row in table if row.in_every_attempt))
    assert formats() == ("3", "2")
    with open_journal(tmp_path, run="a") as journal:
        journal.append(plain_group(0))
    monkeypatch.setattr(rollout_columns, "ROLLOUT_COLUMNS", table)
    taught = [
        evolve(trajectory, ticket=1, columns={"teacher_logprobs": np.float32([-1, -2, -3])})
        for trajectory in plain_group(1).trajectories
    ]
    with open_journal(tmp_path, run="a", resumed=0) as journal:
        journal.append(evolve(plain_group(1), trajectories=tuple(taught)))
    first, second = read_groups(tmp_path)
    require_same(first, plain_group(0))
    assert [trajectory.columns["teacher_logprobs"].tolist() for trajectory in second.trajectories] == [[-1, -2, -3]] * 2
    monkeypatch.setattr(rollout_columns, "ROLLOUT_COLUMNS", tuple(row for row in table if row.in_every_attempt))
    with pytest.raises(RolloutError, match=r"no journal of rollouts of format 2 to 3 \(4\)"):
        list(read_groups(tmp_path))


def test_a_damaged_segment_of_fewer_rows_is_written_with_all_of_them(tmp_path: Path, monkeypatch) -> None:
    table = rollout_columns.ROLLOUT_COLUMNS
    monkeypatch.setattr(rollout_columns, "ROLLOUT_COLUMNS", tuple(row for row in table if row.in_every_attempt))
    with open_journal(tmp_path, run="a") as journal:
        journal.append(plain_group(0))
        journal.append(plain_group(1))
    monkeypatch.setattr(rollout_columns, "ROLLOUT_COLUMNS", table)
    (segment,) = tmp_path.glob("*.arrow")
    content = bytearray(segment.read_bytes())
    content[-60] ^= 1
    segment.write_bytes(content)
    open_journal(tmp_path, run="a", resumed=0).close()
    (back,) = read_groups(tmp_path)
    require_same(back, plain_group(0))


def test_a_journal_that_was_written_before_the_table_is_read_and_goes_on(tmp_path: Path) -> None:
    """The file is one of format 3, whose records have no column that environments give."""
    shutil.copy(Path(__file__).parent / "material" / "format-3.arrow", tmp_path / "segment-00000001.arrow")
    groups = [plain_group(ticket, rewards=(0.1 * ticket, 0.7), parts={"right": 0.1}) for ticket in range(3)]
    with open_journal(tmp_path, run="run-a", resumed=1) as journal:
        (learned,) = journal.index.learned[1].read_learned()
        assert learned.advantages.tolist() == [0.5, 1.0, 2.0]
        journal.append(plain_group(3, start_version=1))
    for got, group in zip(read_groups(tmp_path), [*groups, plain_group(3, start_version=1)], strict=True):
        require_same(got, group)
    assert check_journal(tmp_path).wrong == ()
