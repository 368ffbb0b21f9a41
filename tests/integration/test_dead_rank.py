"""A rank that raises ends the call with its number and the cause. One that is killed: tests/training/test_killed_rank.py."""

from pathlib import Path

import pytest

from skyrl_engine import Engine, EngineClosedError, PluginBrokenError
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.errors import WorkerError
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.workers.launch import launch_workers
from skyrl_engine.workers.messages import ForAdapterSet, GatherWeights, Save

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves sockets of its own to the garbage collector

LOSS = """
import torch.distributed as dist
from skyrl_engine import loss

@loss(needs=("logprobs",))
def failing(tokens, config):
    if dist.get_rank() == 0:
        raise ValueError("not on rank 0")
    return -tokens.logprobs
"""


def test_a_rank_that_raises_is_named_with_its_cause(models, worker_spec):
    """Other errors than typed ones reach the controller with rank, method and first line; all ranks answered, so they go on."""
    with launch_workers(worker_spec(models["llama"], 2), launch="ray") as group:
        with pytest.raises(WorkerError) as caught:
            group.ask(ForAdapterSet(7, Save(Path("unused"))))
        assert group.ask(GatherWeights())[0]
    assert "rank 0 failed in save: KeyError: 7" in str(caught.value)


@pytest.mark.nightly
def test_a_loss_that_fails_on_one_rank_ends_the_other_which_waits_for_it(tmp_path):
    """The error is the loss's, and calls that were under way after it do not speak of ranks that died."""
    write_model(tmp_path)
    write_tokenizer(tmp_path, ["a few words"])
    (tmp_path / "loss.py").write_text(LOSS)
    columns = SampleColumns.from_lists(input_ids=[[5, 6, 7, 8], [5, 9, 10]], num_actions=[2, 1])
    tables = {
        "model": {"path": str(tmp_path)},
        "loss": {"use": f"{tmp_path / 'loss.py'}:failing"},
        "run": {"launch": "ray", "ranks": 2},
    }
    with Engine.open(tables) as engine:
        plan = engine.plan(columns)
        learned, scored = engine.forward_backward(plan), engine.score(plan)
        with pytest.raises(
            PluginBrokenError, match=r"loss 'failing' of .* failed in its call: ValueError: not on rank 0"
        ) as caught:
            learned.result()
        assert "rank 0 of 2 met this in a pass" in caught.value.details
        for refused in (scored.result, engine.weights):
            with pytest.raises(EngineClosedError, match=r"all its ranks were ended after a failure \(loss 'failing'"):
                refused()
