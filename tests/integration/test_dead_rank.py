"""A rank that dies ends the call with its number and the cause; the ranks that wait for it are ended too, and nothing hangs."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.plan import Layout
from skyrl_engine.contracts.ragged import offsets_of
from skyrl_engine.errors import WorkerError
from skyrl_engine.workers.dispatch import cut
from skyrl_engine.workers.launch import launch_workers
from skyrl_engine_collators.padded.collator import PaddedCollator

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves sockets of its own to the garbage collector


def actors() -> list[int]:
    """Process ids of this machine's rank actors that are inside a call, by their titles, which Ray sets."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:  # the process ended while we looked
                continue
            if title.startswith(b"ray::RankActor.call"):
                found.append(int(entry.name))
    return sorted(found)


def test_killing_a_rank_in_the_middle_of_a_step(models, worker_spec):
    count, length = 3000, 24
    offsets = offsets_of([length] * count)
    ids = np.random.default_rng(0).integers(0, 90, count * length)
    columns = SampleColumns.create(input_ids=ids, token_offsets=offsets, action_offsets=offsets)
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout(dp=2, micro_batch_rows=1)).mini_batches
    killed = threading.Event()

    def kill_one() -> None:
        deadline = time.monotonic() + 60
        while not (busy := actors()) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(busy[0], signal.SIGKILL)
        killed.set()

    with launch_workers(worker_spec(models["qwen3"], 2), launch="ray") as group:
        shards = group.put(cut(columns, mini_batch, np.ones(count * length), ()))
        threading.Thread(target=kill_one, daemon=True).start()
        with pytest.raises(WorkerError, match=r"rank [01] died during run: .*") as caught:
            group.run("forward_backward", shards, step=1, per_token_outputs=False)
        assert killed.wait(1)
    assert caught.value.rank in (0, 1)
    assert "resume from the latest checkpoint" in caught.value.remedy


def test_a_rank_that_raises_is_named_with_its_cause(models, worker_spec, tmp_path):
    """Other errors than typed ones reach the controller with rank, method and first line."""
    with launch_workers(worker_spec(models["llama"], 2), launch="ray") as group, pytest.raises(WorkerError) as caught:
        group._everywhere("no_such_method")
    assert "rank 0 failed in no_such_method: AttributeError" in str(caught.value)
