"""Exported groups come back as they were, and are what SFT reads as data."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.data.sources.formats import detect, to_example
from skyrl_engine.data.sources.rows import Row
from skyrl_engine.errors import DataError, RolloutError
from skyrl_engine.rollout.exported import read_rollouts, rows_of, write_rows
from skyrl_engine.rollout.journal import open_journal
from skyrl_engine.testing.rollout_cases import groups, plain_group, require_same


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
@settings(deadline=None, max_examples=25)
@given(data=st.lists(groups(least=1), min_size=1, max_size=3, unique_by=lambda group: group.ticket))
def test_groups_come_back_as_they_were(tmp_path_factory, to, data):
    out = tmp_path_factory.mktemp("export") / f"rollouts.{to}"
    written = write_rows((row for group in data for row in rows_of(group, decode=str)), out, to)
    assert written >= len(data)
    for got, expected in zip(read_rollouts(out), data, strict=True):
        require_same(got, expected)


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_unknown_log_probabilities_are_null_and_come_back_as_nan(tmp_path, to):
    """As of an endpoint. The attempt has two stretches, a row each."""
    group = plain_group(0, rewards=(1.0,))
    (first,) = group.trajectories
    unknown = evolve(
        first,
        token_ids=np.arange(8, dtype=np.int32),
        kinds=np.array([0, 1, 0, 1], dtype=np.uint8),
        segment_offsets=np.array([0, 2, 3, 6, 8], dtype=np.int64),
        logprobs=np.full(3, np.nan, dtype=np.float32),
    )
    data = evolve(group, trajectories=(unknown,))
    rows = list(rows_of(data))
    assert [row["logprobs"] for row in rows] == [None, None]
    write_rows(rows, tmp_path / f"rollouts.{to}", to)
    require_same(next(iter(read_rollouts(tmp_path / f"rollouts.{to}"))), data)
    values = json.loads(json.dumps(rows[0]))
    assert to_example(Row(0, "line 1", values), "rollouts", has_template=True).loss.any()


def test_a_run_and_its_folder_are_read_alike(tmp_path):
    with open_journal(tmp_path / "rollouts", run="a") as journal:
        journal.append(plain_group(0))
    for place in (tmp_path, tmp_path / "rollouts"):
        require_same(next(iter(read_rollouts(place))), plain_group(0))


def test_sft_reads_the_rows(tmp_path):
    """The response carries loss where it was sampled; an attempt that failed carries none."""
    good, failed = rows_of(plain_group(0)), rows_of(plain_group(1, status="failed", cause="timed out"))
    for row, loss in ((next(good), [False, False, True, True, True]), (next(failed), [False] * 5)):
        values = json.loads(json.dumps(row))
        assert detect("auto", Row(0, "line 1", values)) == "rollouts"
        tokens = to_example(Row(0, "line 1", values), "rollouts", has_template=True)
        assert tokens.input_ids.tolist() == [0, 1, 2, 3, 4]
        assert tokens.loss.tolist() == loss
        assert tokens.response == 3


def test_a_rewritten_history_is_two_rows():
    group = plain_group(0, rewards=(1.0,))
    (first,) = group.trajectories
    two = evolve(
        first,
        token_ids=np.arange(8, dtype=np.int32),
        kinds=np.array([0, 1, 0, 1], dtype=np.uint8),
        segment_offsets=np.array([0, 2, 3, 6, 8], dtype=np.int64),
    )
    rows = list(rows_of(evolve(group, trajectories=(two,))))
    assert [(row["prompt_ids"], row["response_ids"], row["logprobs"]) for row in rows] == [
        ([0, 1], [2], [-0.5]),
        ([3, 4, 5], [6, 7], [-0.5, -0.5]),
    ]


def test_places_without_rollouts_are_told(tmp_path):
    with pytest.raises(RolloutError, match="holds no rollouts"):
        list(read_rollouts(tmp_path))
    with pytest.raises(RolloutError, match="there is no file or run directory"):
        list(read_rollouts(tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is no JSON object"),
        ('{"ticket": 0, "prompt_ids": [1], "response_ids": [2]}', "column 'reward': a number is needed"),
        ('{"ticket": 0, "segment_kinds": [0, 1], "prompt_ids": [1], "response_ids": [2]}', "need all columns of an export"),
    ],
)
def test_other_rows_are_told(tmp_path, text, words):
    (tmp_path / "x.jsonl").write_text(text + "\n")
    with pytest.raises(DataError, match=words):
        list(read_rollouts(tmp_path / "x.jsonl"))
    (tmp_path / "x.parquet").write_text("no Parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        list(read_rollouts(tmp_path / "x.parquet"))


PLAIN = {"task_key": "a", "prompt_ids": [5, 6], "response_ids": [7, 8, 2], "reward": 1.0, "logprobs": [-0.1, -2.0, -0.3]}


def read(folder, *rows, name="x.jsonl"):
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(list(rows)), folder / name)
    else:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_rollouts(folder / name))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"logprobs": "abc"}, "column 'logprobs': a flat list of numbers is needed, not 'abc'"),
        ({"logprobs": 0.5}, "a flat list of numbers is needed, not 0.5"),
        ({"logprobs": ["a", "b", "c"]}, "a flat list of numbers is needed"),
        ({"logprobs": [[-1.0], [-1.0], [-1.0]]}, "a flat list of numbers is needed"),
        ({"truncated": "false"}, "column 'truncated': true or false is needed, not 'false'"),
        ({"task_key": ["a"]}, r"has the task_key \['a'\]"),
        ({"task_key": True}, "has the task_key True"),
    ],
)
def test_plain_rows_that_are_none_are_told(tmp_path, changed, words):
    with pytest.raises(DataError, match=words):
        read(tmp_path, {**PLAIN, **changed}, PLAIN)


def test_a_group_that_goes_on_behind_another_is_told(tmp_path):
    """Its parts would be two groups with baselines of their own."""
    rows = [{**PLAIN, "task_key": key} for key in "aba"]
    with pytest.raises(DataError, match=r"line 3 is of the group 'a', which ended before"):
        read(tmp_path, *rows)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"segment_lengths": [2, 2]}, "do not cut 5 tokens"),
        ({"segment_lengths": [-2, 7]}, "do not cut 5 tokens"),
        ({"segment_kinds": [0]}, "do not cut 5 tokens"),
        ({"segment_kinds": [0, 7]}, r"segment_kinds are \[0, 7\]"),
        ({"segment_kinds": [1, 0]}, r"segment_kinds are \[1, 0\]"),
        ({"logprobs": [-1.0]}, "logprobs has 1 entries for 3 sampled tokens"),
        ({"rewards": [1.0]}, "rewards has 1 entries for 3 sampled tokens"),
        ({"versions": [0]}, "versions has 1 entries for 3 sampled tokens"),
        ({"response_ids": [2**40, 3, 4]}, "OverflowError"),
        ({"response_ids": [2.5, 3, 4]}, "'float' object cannot be interpreted as an integer"),
        ({"status": "lost"}, "status is 'lost'"),
        ({"success": "yes"}, "success 'yes'"),
        ({"parts": None}, "parts holds no names with values"),
        ({"member": 1}, r"the stretches of an attempt are \[0, 0\]"),
    ],
)
def test_columns_of_an_export_that_contradict_each_other_are_told(tmp_path, changed, words):
    """Lists of another length moved the numbers of all attempts after them."""
    first, second = rows_of(plain_group(0))
    assert len(first["response_ids"]) == len(first["rewards"]) == 3
    with pytest.raises(DataError, match=words):
        read(tmp_path, {**first, **changed}, second)


@pytest.mark.parametrize("info", [{"a": 1}, "no JSON", None])
def test_columns_of_another_program_may_have_names_of_ours(tmp_path, info):
    (group,) = read(tmp_path, {**PLAIN, "info": info, "metrics": 1.0}, PLAIN, name="x.parquet")
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 1.0]


def test_blank_lines_and_a_byte_order_mark_are_no_rows_and_other_bytes_are_told(tmp_path):
    line = json.dumps(PLAIN).encode() + b"\n"
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\n" + line)
    (group,) = read_rollouts(tmp_path / "x.jsonl")
    assert len(group.trajectories) == 2
    (tmp_path / "x.jsonl").write_bytes(line + b"\xff\xfe\n")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        list(read_rollouts(tmp_path / "x.jsonl"))


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_half_a_character_is_written_and_read(tmp_path, to):
    """JSON can spell one, so that data and what environments report may hold it; UTF-8 cannot."""
    group = plain_group(0, rewards=(1.0,))
    changed = evolve(
        group, trajectories=tuple(evolve(trajectory, info={"answer": "cut \ud83d"}) for trajectory in group.trajectories)
    )
    write_rows(rows_of(changed, decode=str), tmp_path / f"x.{to}", to)
    require_same(next(read_rollouts(tmp_path / f"x.{to}")), changed)


def test_a_file_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "x.jsonl").write_text("mine")
    with pytest.raises(RolloutError, match="is there already"):
        write_rows([], tmp_path / "x.jsonl", "jsonl")
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(RolloutError, match="cannot be written"):
        write_rows([{"a": 1}], tmp_path / "folder" / "x.jsonl", "jsonl")
