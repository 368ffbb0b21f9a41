"""An engine whose ranks ended, by `close` or by a failure, refuses every verb in one way; and the failure itself is reported soon."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from skyrl_engine import Engine, EngineClosedError, ModelError, PluginBrokenError, UnsupportedError
from skyrl_engine.contracts.kinds.generator import GenerationRequest, Sampling
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import LoraConfig
from skyrl_engine.engine.frozen_model import FrozenModel

COLUMNS = SampleColumns.from_lists(input_ids=[[5, 6, 7, 8], [5, 9, 10], [11, 12, 13, 14, 15], [3, 4, 5]], num_actions=[2, 2, 3, 1])
FAILS = """
import torch.distributed as dist
from pathlib import Path
from skyrl_engine import loss

@loss(needs=("logprobs",))
def failing(tokens, config):
    last = dist.get_world_size() - 1
    if Path(FILE).exists() and dist.get_rank() == last and (last > 0 or len(tokens.logprobs) == 1):
        raise ValueError("this sample is nothing for me")
    return -tokens.logprobs
"""
TAKES_NOTHING_OF_THE_RANKS = {
    "assembly",
    "close",
    "describe",
    "drain_peak_bytes",
    "ended",
    "has_adapter_sets",
    "has_sampler",
    "launch",
    "open",
    "vocabulary_size",
}


@pytest.fixture
def failing(model: Path, tmp_path: Path) -> dict[str, Any]:
    """Tables of a run with a loss that fails on the last of several ranks, or on the sample of one token, while the file `fails` is there."""
    (tmp_path / "loss.py").write_text(FAILS.replace("FILE", repr(str(tmp_path / "fails"))))
    (tmp_path / "fails").touch()
    return {
        "model": {"path": str(model)},
        "loss": {"use": f"{tmp_path / 'loss.py'}:failing"},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"micro_batch_rows": 1},
    }


def verbs(engine: Engine, folder: Path) -> dict[str, Callable[[], Any]]:
    """Every public name of an engine that asks something of the ranks, or of their state, as a call that would be right."""
    plan = engine.plan(COLUMNS)
    arguments: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("score", "evaluate", "forward_backward", "train", "place"), (plan,)),
        **dict.fromkeys(("save", "save_async", "load", "export", "keep_model_files", "list_files"), (folder,)),
        "plan": (COLUMNS,),
        "use_loss": ({"use": "cross_entropy"},),
        "use_reducer": ({"use": "token_mean"},),
        "begin_profile": (folder,),
        "add_frozen": (FrozenModel("other", None),),
        "add_adapters": (LoraConfig(rank=2),),
        "start_sampler": (None,),
        "generate": ([],),
        "add_weights": ("other", folder),
    }
    public = {name for name in dir(Engine) if not name.startswith("_")} - TAKES_NOTHING_OF_THE_RANKS
    calls: dict[str, Callable[[], Any]] = {}
    for name in public:
        if isinstance(inspect.getattr_static(Engine, name), property):
            calls[name] = partial(getattr, engine, name)
        else:
            calls[name] = partial(getattr(engine, name), *arguments.get(name, ()))
    return calls


def test_a_closed_engine_refuses_every_verb_and_may_be_closed_again(model: Path, tmp_path: Path) -> None:
    engine = Engine.open({"model": {"path": str(model)}})
    calls = verbs(engine, tmp_path / "unwritten")
    assert engine.ended is None
    engine.close()
    engine.close()
    assert engine.ended == "it was closed"
    assert {"plan", "train", "weights", "sampler"} <= calls.keys()
    for name, call in calls.items():
        with pytest.raises(EngineClosedError, match=r"takes no calls any more: it was closed\. Open it again"):
            print(name, call())
    assert not (tmp_path / "unwritten").exists()


def test_a_failure_on_one_rank_is_told_and_ends_those_that_wait_for_it(
    failing: dict[str, Any], tmp_path: Path, without_ray: None
) -> None:
    """Rank 0 waits for rank 1 in the backward pass. What was saved before opens an engine that goes on."""
    tables = {**failing, "run": {"launch": "ray", "ranks": 2}}
    with Engine.open(tables) as engine:
        engine.save(tmp_path / "saved")
        saved = engine.weights()
        calls = verbs(engine, tmp_path / "unwritten")
        with pytest.raises(PluginBrokenError, match=r"loss 'failing' of .* failed in its call: ValueError: this sample") as caught:
            engine.train(engine.plan(COLUMNS))
        assert "rank 1 of 2 met this in a pass" in caught.value.details
        assert "all ranks were ended" in caught.value.details[-1]
        for name, call in calls.items():
            with pytest.raises(EngineClosedError, match=r"all its ranks were ended after a failure \(loss 'failing'"):
                print(name, call())
    (tmp_path / "fails").unlink()
    with Engine.open(tables) as engine:
        engine.load(tmp_path / "saved")
        again = engine.weights()
        assert all(np.array_equal(saved[name], again[name]) for name in saved)
        engine.train(engine.plan(COLUMNS))


def test_what_a_failed_pass_accumulated_is_refused_until_it_is_dropped(failing: dict[str, Any], tmp_path: Path) -> None:
    """The gradient of the micro-batches before the one that failed would be added to that of the next call."""
    with Engine.open(failing) as untouched:
        (tmp_path / "fails").unlink()
        untouched.forward_backward(untouched.plan(COLUMNS)).result()
        gradients = untouched.gradients()
    with Engine.open(failing) as engine:
        plan = engine.plan(COLUMNS)
        for failed in (lambda: engine.train(plan), lambda: engine.forward_backward(plan).result()):
            (tmp_path / "fails").touch()
            with pytest.raises(PluginBrokenError, match="this sample is nothing for me"):
                failed()
            (tmp_path / "fails").unlink()
            with pytest.raises(UnsupportedError, match="a gradient is accumulated already"):
                engine.train(plan)
            with pytest.raises((UnsupportedError, PluginBrokenError)):
                engine.optim_step()
            engine.discard()
            engine.forward_backward(plan).result()
            again = engine.gradients()
            assert all(np.array_equal(gradients[name], again[name]) for name in gradients)
            engine.discard()


def test_a_gradient_that_is_not_finite_can_be_dropped(model: Path, tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(
        f"""
from pathlib import Path
from skyrl_engine import loss

@loss(needs=("logprobs",))
def infinite(tokens, config):
    return tokens.logprobs * (float("inf") if Path({str(tmp_path / "breaks")!r}).exists() else -1.0)
"""
    )
    (tmp_path / "breaks").touch()
    with Engine.open({"model": {"path": str(model)}, "loss": {"use": f"{tmp_path / 'loss.py'}:infinite"}}) as engine:
        plan = engine.plan(COLUMNS)
        with pytest.raises(ModelError, match="not finite"):
            engine.train(plan)
        engine.discard()
        (tmp_path / "breaks").unlink()
        assert engine.train(plan).metrics["grad_norm"].result > 0
        assert engine.step == 1


ENDS_BADLY = """
from skyrl_engine import hookimpl
from skyrl_engine.contracts import GeneratorDescription


class Generator:
    def start(self, start): ...
    def submit(self, requests): ...
    def abort(self, request_ids=None): ...
    def update(self, weights, version, target="policy"): ...
    def release(self, target): ...
    def poll(self, timeout):
        raise ValueError("the first failure")
    def close(self):
        raise ValueError("and one that follows from it")


class Plugin:
    @hookimpl
    def skyrl_engine_describe_generator(self, config):
        return GeneratorDescription(frozenset({"logprobs"}), ("tensors",), "rank", 1)

    @hookimpl
    def skyrl_engine_make_generator(self, config):
        return Generator()


plugin = Plugin()
"""


def test_a_failure_to_close_hides_no_failure_and_keeps_nothing_open(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generator.py").write_text(ENDS_BADLY)
    tables = {"model": {"path": str(model)}, "generator": {"use": f"{tmp_path / 'generator.py'}:plugin"}}
    request = GenerationRequest(0, np.array([5], dtype=np.int32), Sampling(max_tokens=2), seed=0)
    with pytest.raises(PluginBrokenError, match="failed in poll: ValueError: the first failure"), Engine.open(tables) as engine:
        engine.generate([request]).result()
    assert "and one that follows from it" in caplog.text
    assert not dist.is_initialized()
    with pytest.raises(PluginBrokenError, match="failed in close"), Engine.open(tables) as engine:
        engine.generate([])
    assert not dist.is_initialized()
