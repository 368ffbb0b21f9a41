"""Runs over streamed data: every row once a pass, the same run from any kill, and nothing that cannot work."""

import gzip
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from skyrl_engine import hookimpl
from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.observer import StepFinished
from skyrl_engine.errors import CheckpointError, ConfigError, DataError, PluginBrokenError
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.prepare import prepare
from skyrl_engine.training.sft.trainer import run_sft

Configure = Callable[..., ResolvedConfig]


@pytest.fixture
def shards(material: Path, tmp_path: Path) -> Path:
    """The 23 rows of `train.jsonl` in shards of four forms."""
    rows = [json.loads(line) for line in (material / "train.jsonl").read_text().splitlines()]
    folder = tmp_path / "shards"
    folder.mkdir()
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "a.jsonl").write_text("\n".join(lines[:6]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[6:11]).encode()))
    pq.write_table(pa.Table.from_pylist(rows[11:19]), folder / "c.parquet", row_group_size=3)
    table = pa.Table.from_pylist(rows[19:])
    with pa.ipc.new_stream(folder / "d.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return folder


def stream_of(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"train": str(folder), "streaming": True, "buffer_size": 6, "max_length": 32, **keys}


def samples_of(batch: Any) -> list[bytes]:
    columns = batch.columns
    return [
        columns.input_ids[columns.token_offsets[number] : columns.token_offsets[number + 1]].tobytes()
        for number in range(len(columns))
    ]


def walk(prepared: Any, position: Any, steps: int) -> tuple[list[bytes], list[Any]]:
    samples, positions = [], [position]
    for _ in range(steps):
        dataset, position = prepared.stream.mini_batch(position)
        samples += samples_of(dataset)
        positions.append(position)
    return samples, positions


def test_a_pass_holds_every_row_once_and_any_position_goes_on_as_if_nothing_had_stopped(
    configure: Configure, shards: Path, material: Path
) -> None:
    """Each position travels through JSON, as in a checkpoint, to a stream that has read nothing. 92 rows are 4 passes."""
    table = prepare(configure(data={"eval": None})).train
    prepared = prepare(configure(data=stream_of(shards, eval=None), training={"batch_size": 4, "steps": 2}))
    samples, positions = walk(prepared, prepared.start, 23)
    for number in range(4):
        assert sorted(samples[23 * number : 23 * (number + 1)]) == sorted(samples_of(table)), "a pass is the whole"
    assert len({tuple(samples[23 * number : 23 * (number + 1)]) for number in range(4)}) == 4, "in another order each time"
    assert samples[:23] != samples_of(table)
    for step, position in enumerate(positions[:-3]):
        document = json.loads(json.dumps(position.document()))
        other = (
            prepare(configure(data=stream_of(shards, eval=None), training={"batch_size": 4, "steps": 2})) if step == 0 else prepared
        )
        again, _ = walk(other, type(position).of(document), 3)
        assert again == samples[4 * step : 4 * (step + 3)], f"after {step} steps"


def mixed(shards: Path) -> dict[str, Any]:
    """Two streams with weights, of which the second is begun again and again."""
    return stream_of(shards, train=[str(shards / "[abc]*"), str(shards / "d*")], weights=[3, 1], eval=None)


def weights(directory: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(directory / "model" / "model.safetensors").items()}


class Interruption:
    """Ends the run after a step was recorded."""

    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        if event.step == self.step:
            raise RuntimeError("pulled the plug")


def test_a_run_that_was_interrupted_twice_equals_one_that_never_was(configure: Configure, shards: Path) -> None:
    settings: dict[str, Any] = {"data": mixed(shards), "training": {"steps": 8}, "checkpoint": {"every": 2}}
    whole = run_sft(configure("whole", **settings)).directory
    resolved = configure("interrupted", **settings)
    for step in (3, 6):
        with pytest.raises(PluginBrokenError, match="pulled the plug"):
            run_sft(resolved, observers=[Interruption(step)], resume=True)
    assert weights(run_sft(resolved, resume=True).directory) == weights(whole)
    steps = [record["metrics"] for record in read_metrics(whole / "metrics.jsonl") if record["kind"] == "step"]
    assert 0.6 < np.mean([step["sample_share/[abc]*"] for step in steps]) < 0.9
    assert (steps[-1]["data/rows"], steps[-1]["data/dropped"]) == (64, 0)
    assert steps[-1]["epoch"] > 2


KILLED = """
import json, os, signal, sys, threading
from skyrl_engine import hookimpl
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.training.sft.trainer import run_sft

class Killing:
    @hookimpl
    def skyrl_engine_step_finished(self, event):
        if event.step == int(sys.argv[2]):
            threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()

run_sft(resolve(from_dict(json.load(open(sys.argv[1])), "test")), observers=[Killing()], resume=True)
"""


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_that_was_killed_at_twenty_moments_equals_one_that_never_was(
    configure: Configure, tables: dict[str, Any], shards: Path, tmp_path: Path
) -> None:
    """One run, killed after each of its first 20 steps, some milliseconds later each time: inside a step or a checkpoint."""
    settings: dict[str, Any] = {"data": {**tables["data"], **mixed(shards)}, "training": {**tables["training"], "steps": 24}}
    whole = run_sft(configure("whole", **settings)).directory
    document = {**tables, **settings, "checkpoint": {"every": 1}, "run": {**tables["run"], "directory": str(tmp_path / "killed")}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    for moment in range(1, 21):
        arguments = [str(tmp_path / "config.json"), str(moment), str(0.003 * (moment % 7))]
        killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False, capture_output=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    resumed = run_sft(configure("killed", **settings), resume=True).directory
    assert weights(resumed) == weights(whole)


@pytest.mark.parametrize(
    ("keys", "error", "cause"),
    [
        ({"data": {"eval_fraction": 0.2}}, ConfigError, "data.eval_fraction: needs to know how many rows there are"),
        ({"data": {"max_samples": 5}}, ConfigError, "data.max_samples: needs to know how many rows there are"),
        (
            {"training": {"steps": None, "epochs": 2}},
            ConfigError,
            "training.steps: is not set, and how long a pass over a stream is",
        ),
        ({"training": {"drop_last": True}}, ConfigError, "training.drop_last: has no meaning"),
        ({"data": {"streaming": False, "buffer_size": 5}}, ConfigError, "data.buffer_size: is not read where data.streaming"),
        ({"data": {"max_length": 3}}, DataError, "more than data.max_length = 3"),
        ({"data": {"max_length": 3, "overlong": "drop"}}, DataError, "a pass over it dropped all of its rows"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    configure: Configure, shards: Path, keys: dict[str, Any], error: type[Exception], cause: str
) -> None:
    data = stream_of(shards, eval=None, **keys.get("data", {}))
    with pytest.raises(error, match=cause):
        prepare(configure(data=data, training=keys.get("training", {})))


def test_rows_that_cannot_be_streamed_are_refused(configure: Configure, tmp_path: Path) -> None:
    row = {"prompt": "1 + 1 =", "completion": " 2"}
    for name, rows, cause in (
        ("ids", [{**row, "group_ids": 1}], "column 'group_ids': samples that belong together cannot be told"),
        ("none", [], "has no rows"),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        with pytest.raises(DataError, match=cause):
            prepare(configure(data=stream_of(tmp_path / f"{name}.jsonl", eval=None)))
    (tmp_path / "array.json").write_text(json.dumps([row]))
    with pytest.raises(DataError, match="holds one JSON array, which is read whole"):
        prepare(configure(data=stream_of(tmp_path / "array.json", eval=None)))
    with pytest.raises(DataError, match="no file is named like"):
        prepare(configure(data=stream_of(tmp_path / "*.csv", eval=None)))


def test_a_position_in_other_data_is_refused(configure: Configure, shards: Path) -> None:
    settings: dict[str, Any] = {"data": stream_of(shards, eval=None), "training": {"steps": 2}}
    run_sft(configure("run", **settings))
    longer = {**settings, "training": {"steps": 3}}
    with pytest.raises(CheckpointError, match=r"run\.seed is 6, and .* was written with 5"):
        run_sft(configure("run", **longer, run={"seed": 6}), resume=True)
    with pytest.raises(CheckpointError, match="a setting that decides the order of the stream"):
        run_sft(configure("run", **{**longer, "data": {**settings["data"], "buffer_size": 7}}), resume=True)
    (shards / "e.jsonl").write_text((shards / "a.jsonl").read_text())
    with pytest.raises(CheckpointError, match="the training data, or a setting"):
        run_sft(configure("run", **longer), resume=True)


def test_shards_that_moved_to_another_dataset_are_refused(configure: Configure, shards: Path) -> None:
    """The same shards with the same weights: a place in the first dataset would be one in the second."""
    settings: dict[str, Any] = {"data": mixed(shards), "training": {"steps": 2}}
    run_sft(configure("run", **settings))
    moved = {**settings["data"], "train": [str(shards / "[ab]*"), str(shards / "[cd]*")]}
    with pytest.raises(CheckpointError, match="the training data, or a setting that decides the order of the stream, has changed"):
        run_sft(configure("run", data=moved, training={"steps": 3}), resume=True)


def test_a_mini_batch_may_take_several_passes_of_a_short_stream(configure: Configure, material: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text("".join((material / "train.jsonl").read_text().splitlines(keepends=True)[:3]))
    prepared = prepare(configure(data=stream_of(short, eval=None), training={"batch_size": 8}))
    samples, positions = walk(prepared, prepared.start, 3)
    assert [samples.count(sample) for sample in set(samples)] == [8, 8, 8]
    short.write_text("")
    with pytest.raises(DataError, match=r"the dataset .*short\.jsonl has no rows"):
        walk(prepared, positions[-1], 2)
