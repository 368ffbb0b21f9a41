"""Rollouts as rows of other programs: JSON lines or Parquet, written from a journal and read back as groups.

A row is one *stretch* of an attempt: a prompt, and everything after it up to where the history was rewritten, so almost always the whole
attempt. The columns `prompt_ids`, `response_ids` and `loss_mask` are those of the data format `rollouts`, which `skyrl-engine sft` trains
on; nothing of a failed attempt carries loss. `prompt` and `response` are texts for people. The other columns hold what training by
reinforcement needs, so that nothing is lost on the way.
"""

import codecs
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.values import rollout_columns
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.contracts.values.rollout import (
    SEGMENT_OBSERVED,
    SEGMENT_PROMPT,
    SEGMENT_SAMPLED,
    Group,
    Status,
    Trajectory,
    VersionSpans,
)
from skyrl_engine.data.sources.ready_tokens import rollout_of
from skyrl_engine.data.sources.rows import Row
from skyrl_engine.errors import DataError, RolloutError
from skyrl_engine.rollout.journal_index import read_groups

To = Literal["jsonl", "parquet"]
Decode = Callable[[Sequence[int]], str]

_DOCUMENTS: Final = ("parts", "metrics", "info", "seconds")
"""Mappings, which Parquet keeps as JSON texts: their keys differ from row to row."""

_ROWS_PER_WRITE: Final = 1024

_GROUP_KEYS: Final = ("ticket", "group_id", "task_key", "uid")
"""Columns that may say which attempts are at one task; `uid` is verl's word."""


def rows_of(group: Group, *, step: int | None = None, decode: Decode | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a group; `step` is the one that trained on it. Without `decode` the texts are None."""
    for trajectory in group.trajectories:
        starts = [int(place) for place in np.flatnonzero(trajectory.kinds == SEGMENT_PROMPT)]
        sampled = np.concatenate([[0], np.cumsum(trajectory.sampled)]).astype(np.int64)
        for stretch, (first, end) in enumerate(pairwise([*(starts or [0]), len(trajectory.kinds)])):
            yield _row(group, trajectory, stretch, (first, end), sampled, step, decode)


def _row(
    group: Group,
    trajectory: Trajectory,
    stretch: int,
    segments: tuple[int, int],
    sampled: Any,
    step: int | None,
    decode: Decode | None,
) -> dict[str, Any]:
    first, end = segments
    begin, response_begin, last = (int(trajectory.segment_offsets[place]) for place in (first, min(first + 1, end), end))
    prompt, response = trajectory.token_ids[begin:response_begin].tolist(), trajectory.token_ids[response_begin:last].tolist()
    scored = slice(int(sampled[begin]), int(sampled[last]))
    versions = trajectory.versions.per_token(len(trajectory.logprobs))[scored]
    return {
        "ticket": group.ticket,
        "member": trajectory.member,
        "stretch": stretch,
        "environment": group.environment,
        "task_key": group.task_key,
        "group_start_version": group.start_version,
        "dropped": group.dropped,
        "step": step,
        "prompt": None if decode is None else decode(prompt),
        "response": None if decode is None else decode(response),
        "prompt_ids": prompt,
        "response_ids": response,
        "loss_mask": [int(is_sampled and trajectory.status != "failed") for is_sampled in trajectory.sampled[response_begin:last]],
        "segment_kinds": trajectory.kinds[first:end].tolist(),
        "segment_lengths": np.diff(trajectory.segment_offsets[first : end + 1]).tolist(),
        "versions": versions.tolist(),
        **{name: _list_known(values[scored]) for name, values in _columns_of(trajectory).items()},
        "reward": trajectory.reward,
        "unplaced_reward": float(trajectory.unplaced_reward),
        "status": trajectory.status,
        "cause": trajectory.cause,
        "success": None if trajectory.success is None else bool(trajectory.success),
        "start_version": trajectory.start_version,
        "stops": list(trajectory.stops),
        "tool_problems": trajectory.tool_problems,
        **{name: dict(getattr(trajectory, name)) for name in _DOCUMENTS},
    }


def _columns_of(trajectory: Trajectory) -> dict[str, npt.NDArray[Any]]:
    """Return the numbers per sampled token that an attempt has, by their names in the table of rollout columns."""
    present = {row.name: trajectory.per_token(row) for row in rollout_columns.ROLLOUT_COLUMNS}
    return {name: values for name, values in present.items() if values is not None}


def _list_known(values: npt.NDArray[Any]) -> list[Any] | None:
    """Return numbers as a list; None for log-probabilities that nobody gave, as JSON has no NaN."""
    return None if len(values) and np.isnan(values).all() else values.tolist()


def write_rows(rows: Iterable[Mapping[str, Any]], out: Path, to: To) -> int:
    """Write rows to a new file, and return how many there are. Raises RolloutError where the file cannot be written."""
    if out.exists():
        raise RolloutError(f"{out} is there already", remedy="Name a new file")
    aside = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        count = _write_jsonl(rows, aside) if to == "jsonl" else _write_parquet(rows, aside)
        aside.replace(out)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise RolloutError(
            f"{out} cannot be written ({error.strerror or error})", remedy="Name a file on a disk with space"
        ) from error
    return count


def _write_jsonl(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
            try:
                line.encode()
            except UnicodeEncodeError:
                # half a character has no UTF-8, but JSON spells it
                line = json.dumps(row, allow_nan=False) + "\n"
            file.write(line)
            count += 1
    return count


def _write_parquet(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count, batch = 0, []
    schema = _parquet_schema()
    with pq.ParquetWriter(path, schema) as writer:
        for row in rows:
            batch.append({**row, **{name: json.dumps(row[name], allow_nan=False) for name in _DOCUMENTS}})
            count += 1
            if len(batch) == _ROWS_PER_WRITE:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                batch = []
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
    return count


def _parquet_schema() -> Any:
    import pyarrow as pa

    number, text, numbers = pa.int64(), pa.string(), pa.list_(pa.int32())
    return pa.schema(
        {
            **dict.fromkeys(("ticket", "member", "stretch"), number),
            **dict.fromkeys(("environment", "task_key"), text),
            "group_start_version": number,
            "dropped": text,
            "step": number,
            **dict.fromkeys(("prompt", "response"), text),
            **dict.fromkeys(("prompt_ids", "response_ids", "loss_mask", "segment_kinds", "segment_lengths"), numbers),
            "versions": pa.list_(number),
            **{row.name: pa.list_(pa.from_numpy_dtype(row.dtype)) for row in rollout_columns.ROLLOUT_COLUMNS},
            **dict.fromkeys(("reward", "unplaced_reward"), pa.float64()),
            **dict.fromkeys(("status", "cause"), text),
            "success": pa.bool_(),
            "start_version": number,
            "stops": pa.list_(text),
            "tool_problems": number,
            **dict.fromkeys(_DOCUMENTS, text),
        }
    )


def read_rollouts(place: Path) -> Iterator[Group]:
    """Read recorded groups: by ticket those of a run directory or of its `rollouts` folder, in their order those of a file.

    A file is one that `write_rows` wrote, or another program's in the data format `rollouts`, whose rows have a `reward` and say which group
    they belong to; log-probabilities that it does not hold are NaN. Raises RolloutError for a place that holds none, DataError for rows that
    are none.
    """
    folder = journal_of(place)
    if folder is not None:
        has_rows = False
        for group in read_groups(folder):
            has_rows = True
            yield group
        if not has_rows:
            raise RolloutError(
                f"{place} holds no rollouts", remedy="Name a run of trainer rl, or a file that `rollouts export` wrote"
            )
        return
    if not place.is_file():
        raise RolloutError(f"there is no file or run directory {place}", remedy="Name a run of trainer rl, or an exported file")
    rows = _parquet_rows(place) if place.suffix == ".parquet" else _jsonl_rows(place)
    seen: set[str | int] = set()
    for number, (key, of_group) in enumerate(groupby(rows, key=lambda named: _group_key(*named))):
        rows_of_group = list(of_group)
        if key in seen:
            raise DataError(
                f"{rows_of_group[0][0]} is of the group {key!r}, which ended before: its attempts would be compared without those",
                remedy="Let the rows of a group stand together, and give later attempts at a task another group_id",
            )
        seen.add(key)
        yield _group_of(rows_of_group) if "segment_kinds" in rows_of_group[0][1] else _plain_group(rows_of_group, number)


def journal_of(place: Path) -> Path | None:
    """Return the journal of a run directory, or of its `rollouts` folder; None for what is no folder."""
    if not place.is_dir():
        return None
    return place / "rollouts" if (place / "rollouts").is_dir() else place


def _group_key(name: str, row: Mapping[str, Any]) -> str | int:
    for key in _GROUP_KEYS:
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            raise DataError(f"{name} has the {key} {value!r:.80}", remedy="Name groups by texts or whole numbers")
        if value is not None:
            return value
    raise DataError(
        f"{name} does not say which group it belongs to: attempts at one task are compared with each other",
        remedy=f"Give each row one of {', '.join(_GROUP_KEYS)}, the same for all attempts at one task, which stand together",
    )


def _plain_group(rows: Sequence[tuple[str, Mapping[str, Any]]], number: int) -> Group:
    """Make a group of rows that another program wrote: prompt, response, reward, and what else it kept."""
    first = rows[0][1]
    members = tuple(_plain_attempt(Row(member, name, row), number, member) for member, (name, row) in enumerate(rows))
    return Group(number, str(first.get("environment", "recorded")), str(_group_key(*rows[0])), 0, members)


def _plain_attempt(row: Row, ticket: int, member: int) -> Trajectory:
    tokens = rollout_of(row)
    prompt = len(tokens.input_ids) - tokens.response
    sampled = tokens.loss[prompt:]
    reward = row.values.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise row.wrong("reward", f"a number is needed, not {reward!r:.80}", "Store what the attempt earned")
    logprobs = _plain_numbers(row, "logprobs", sampled)
    further = {
        column.name: _plain_numbers(row, column.name, sampled)
        for column in rollout_columns.list_further_columns()
        if not _is_wide(row.values.get(column.name))
    }
    cut_off = row.values.get("truncated")
    if cut_off not in (None, False, True):
        raise row.wrong("truncated", f"true or false is needed, not {cut_off!r:.80}", "Store whether the attempt was cut off")
    # a segment ends where sampled tokens meet others
    ends = [*(np.flatnonzero(sampled[1:] != sampled[:-1]) + 1).tolist(), *([len(sampled)] if len(sampled) else [])]
    kinds = [SEGMENT_PROMPT, *(SEGMENT_SAMPLED if sampled[end - 1] else SEGMENT_OBSERVED for end in ends)]
    count = int(sampled.sum())
    rewards = np.zeros(count)
    rewards[-1:] = _float(reward)
    return Trajectory(
        ticket=ticket,
        member=member,
        token_ids=tokens.input_ids.astype(np.int32),
        kinds=np.array(kinds, dtype=np.uint8),
        segment_offsets=np.array([0, prompt, *(prompt + end for end in ends)], dtype=np.int64),
        logprobs=np.full(count, np.nan, dtype=np.float32) if logprobs is None else logprobs,
        versions=VersionSpans.one(0, count),
        rewards=rewards,
        unplaced_reward=0.0 if count else _float(reward),
        status="truncated" if cut_off else "finished",
        columns={name: values for name, values in further.items() if values is not None},
    )


def _is_wide(value: Any) -> bool:
    """Return True for several numbers per token, such as those of a teacher's likeliest tokens: no rollout column has that form."""
    return isinstance(value, list | tuple) and any(isinstance(item, list | tuple | np.ndarray) for item in value)


def _plain_numbers(row: Row, column: str, sampled: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32] | None:
    """float32: a row's numbers of its sampled tokens, which may stand for all of its response; numbers beyond float32 are infinite, missing
    ones NaN.
    """
    numbers = row.values.get(column)
    if numbers is None:
        return None
    with np.errstate(over="ignore"):
        try:
            array = np.asarray(numbers, dtype=np.float32) if isinstance(numbers, list | tuple) else None
        except (TypeError, ValueError, OverflowError):
            array = None
    if array is None or array.ndim != 1:
        raise row.wrong(column, f"a flat list of numbers is needed, not {numbers!r:.80}", "Store one number per sampled token")
    if len(array) == len(sampled):
        array = array[sampled]
    if len(array) != sampled.sum():
        raise row.wrong(column, f"it has {len(array)} entries for {sampled.sum()} sampled tokens", "Give one per sampled token")
    return array


def _float(value: float) -> float:
    """Return a number as a float; a whole number beyond the type becomes infinite, which is refused with the attempt's name."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not text.strip():
                continue
            try:
                row = json.loads(text.decode())
            except ValueError as error:
                raise DataError(f"{path} line {number} is not JSON ({error})", remedy="Export the rollouts again") from error
            if not isinstance(row, dict):
                raise DataError(f"{path} line {number} is no JSON object", remedy="Export the rollouts again")
            yield f"{path} line {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS_PER_WRITE):
                for row in batch.to_pylist():
                    ours = _DOCUMENTS if "segment_kinds" in row else ()
                    yield f"{path} row {number}", {**row, **{name: _document(row.get(name)) for name in ours}}
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error})", remedy="Export the rollouts again") from error


def _document(text: Any) -> Any:
    """Return what a text of JSON holds; what is none comes back as it is, and is refused with its row."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _group_of(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Group:
    name, first = rows[0]
    try:
        members = [
            _trajectory([row for _, row in of_member]) for _, of_member in groupby(rows, key=lambda named: named[1]["member"])
        ]
        return Group(
            int(first["ticket"]),
            str(first["environment"]),
            str(first["task_key"]),
            int(first["group_start_version"]),
            tuple(members),
            first["dropped"],
        )
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{name}: rollouts to train on by reinforcement need all columns of an export ({type(error).__name__}: {error})",
            remedy="Write the file with `skyrl-engine rollouts export`",
        ) from error


def _trajectory(rows: Sequence[Mapping[str, Any]]) -> Trajectory:
    def join_column(column: str, dtype: type[np.generic]) -> Any:
        # a number beyond the type becomes infinite, which is refused with the attempt's name
        with np.errstate(over="ignore"):
            return np.concatenate([np.asarray(row[column], dtype=dtype) for row in rows])

    rows = [{**row, "logprobs": [np.nan] * len(row["versions"])} if row["logprobs"] is None else row for row in rows]
    if (stretches := [row["stretch"] for row in rows]) != list(range(len(rows))):
        raise ValueError(f"the stretches of an attempt are {stretches}")
    tokens = [
        np.asarray([operator.index(token_id) for token_id in (*row["prompt_ids"], *row["response_ids"])], np.int32) for row in rows
    ]
    versions = join_column("versions", np.int64)
    further = [column for column in rollout_columns.list_further_columns() if all(row.get(column.name) is not None for row in rows)]
    starts = np.flatnonzero(np.diff(versions, prepend=-1))
    last = rows[-1]
    trajectory = Trajectory(
        ticket=int(last["ticket"]),
        member=int(last["member"]),
        token_ids=np.concatenate(tokens),
        kinds=join_column("segment_kinds", np.uint8),
        segment_offsets=offsets_of(join_column("segment_lengths", np.int64)),
        versions=VersionSpans(starts.astype(np.int32), versions[starts]),
        **{column.name: join_column(column.name, column.dtype) for column in rollout_columns.list_required_columns()},
        columns={column.name: join_column(column.name, column.dtype) for column in further},
        unplaced_reward=float(last["unplaced_reward"]),
        status=last["status"],
        cause=last["cause"],
        success=last["success"],
        start_version=int(last["start_version"]),
        stops=tuple(last["stops"]),
        tool_problems=int(last["tool_problems"]),
        **{name: last[name] for name in _DOCUMENTS},
    )
    if (wrong := _wrong_with(trajectory, len(versions))) is not None:
        raise ValueError(wrong)
    return trajectory


def _wrong_with(attempt: Trajectory, versions: int) -> str | None:
    """Say which columns of an attempt, of so many versions, contradict each other; None where none do."""
    lengths = np.diff(attempt.segment_offsets)
    if len(lengths) != len(attempt.kinds) or (lengths < 0).any() or lengths.sum() != len(attempt.token_ids):
        return f"segment_lengths {lengths.tolist()!s:.80} and segment_kinds do not cut {len(attempt.token_ids)} tokens"
    if (
        attempt.kinds[:1].tolist() != [SEGMENT_PROMPT]
        or not np.isin(attempt.kinds, (SEGMENT_PROMPT, SEGMENT_SAMPLED, SEGMENT_OBSERVED)).all()
    ):
        return f"segment_kinds are {attempt.kinds.tolist()!s:.80}"
    sampled = count_sampled_tokens(attempt)
    counts = {name: len(values) for name, values in _columns_of(attempt).items()}
    for name, count in {**counts, "versions": versions}.items():
        if count != sampled:
            return f"{name} has {count} entries for {sampled} sampled tokens"
    if attempt.status not in get_args(Status) or not isinstance(attempt.success, bool | None):
        return f"status is {attempt.status!r:.40}, and success {attempt.success!r:.40}"
    column = next((name for name in _DOCUMENTS if not isinstance(getattr(attempt, name), Mapping)), None)
    return None if column is None else f"{column} holds no names with values"


def segments_of(trajectory: Trajectory) -> Iterator[tuple[int, slice]]:
    """Yield the kind of every segment, and the places of its tokens."""
    for kind, (begin, end) in zip(trajectory.kinds.tolist(), pairwise(trajectory.segment_offsets.tolist()), strict=True):
        yield kind, slice(begin, end)


def count_sampled_tokens(trajectory: Trajectory) -> int:
    """Count the tokens that the model sampled."""
    return int(np.diff(trajectory.segment_offsets)[trajectory.kinds == SEGMENT_SAMPLED].sum())
