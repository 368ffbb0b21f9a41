"""The backend's description, its refusals, and what it keeps to itself."""

import logging
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from deepspeed_tasks import OPTIMIZER, arrays, batch, start, train

from skyrl_engine import DataError, UnsupportedError
from skyrl_engine.contracts import AdamWSettings, ModelConfig, RankEnvironment, Topology
from skyrl_engine.testing.backends.batches import WeightedObjective
from skyrl_engine.workers.process_group import pick_device
from skyrl_engine_deepspeed import library
from skyrl_engine_deepspeed.backend import DeepSpeedBackend
from skyrl_engine_deepspeed.plugin import DeepSpeedConfig, deepspeed
from skyrl_engine_deepspeed.settings import refuse_unsupported
from skyrl_engine_deepspeed.settings import settings as engine_settings

pytestmark = pytest.mark.usefixtures("alone")


def test_describing_the_backend_imports_no_torch() -> None:
    code = (
        "import sys; from skyrl_engine_deepspeed.plugin import deepspeed; "
        "described = deepspeed.skyrl_engine_describe_backend(None, world_size=3); "
        "assert described.topology.dp == 3 and described.capabilities == {'padded', 'packed', 'tree', 'value_head', 'lora', 'logits', "
        "'logsumexp', 'mean_logprob', 'log_sum_squares', 'logprobs_at', 'divergence', "
        "'second_model', 'asynchronous_saves', 'reference_by_adapters', 'compile', 'attention', 'embedding_noise', 'ema', 'freeze', 'vision'}; "
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert deepspeed.skyrl_engine_config_schema() is DeepSpeedConfig
    assert deepspeed.skyrl_engine_describe_backend(None, world_size=2).topology == Topology(dp=2)


AS_IF_ON_CUDA = """
import sys
from unittest.mock import patch
import torch
from skyrl_engine.testing.ranks.world import alone
from skyrl_engine.workers.process_group import pick_device
from skyrl_engine_deepspeed import library
with alone(), patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 1, set_device=lambda _: None):
    loaded = library.load(torch.device(pick_device("auto", 0)))
assert loaded.get_accelerator().device_name() == "cuda"
assert "skyrl_engine_deepspeed.cpu" not in sys.modules
"""


def test_what_runs_deepspeed_without_cuda_is_not_imported_where_torch_sees_a_device() -> None:
    """By a rank of `run.device = "auto"`, up to DeepSpeed with its groups; other tests have chosen the CPU in this process's environment."""
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    ran = subprocess.run([sys.executable, "-c", AS_IF_ON_CUDA], capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr


def test_what_runs_deepspeed_without_cuda_is_imported_where_torch_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "skyrl_engine_deepspeed.cpu", raising=False)
    monkeypatch.delattr("skyrl_engine_deepspeed.cpu", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    library.load(torch.device(pick_device("auto", 0)))
    assert "skyrl_engine_deepspeed.cpu" in sys.modules


@pytest.mark.parametrize("options", [{"zero_stage": 0, "offload_optimizer": True}, {"zero_stage": 2, "offload_parameters": True}])
def test_an_offload_of_what_is_not_divided_is_refused_while_planning(options: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match=r"needs ZeRO stage .*3, the run asks for stage"):
        deepspeed.skyrl_engine_describe_backend(DeepSpeedConfig(**options), world_size=2)  # type: ignore[arg-type] # options of both types


@pytest.mark.parametrize(
    ("options", "dtype", "cause", "remedy"),
    [
        ({"zero_stage": 3}, "float64", "float64 would be rounded", 'backend.use to "fsdp"'),
        ({"zero_stage": 0}, "bfloat16", "sums bfloat16 gradients in bfloat16", "zero_stage to 1, 2 or 3"),
        (
            {"zero_stage": 0, "offload_optimizer": True},
            "float32",
            "offload_optimizer needs ZeRO stage 1 or 2 or 3",
            "zero_stage to 3",
        ),
        ({"zero_stage": 2, "offload_parameters": True}, "float32", "offload_parameters needs ZeRO stage 3", "zero_stage to 3"),
        ({"offload_optimizer": True}, "float32", "this rank computes on the cpu", "run on CUDA devices"),
        ({"offload_parameters": True}, "float32", "this rank computes on the cpu", "run on CUDA devices"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_before_anything_is_loaded(
    options: dict[str, object], dtype: str, cause: str, remedy: str
) -> None:
    backend = DeepSpeedBackend(DeepSpeedConfig(**options))  # type: ignore[arg-type] # options of every type
    with pytest.raises(UnsupportedError, match=cause) as caught:
        backend.setup(ModelConfig("nowhere", dtype=dtype), AdamWSettings(), RankEnvironment(0, 1, "cpu", 0))  # type: ignore[arg-type] # as above
    assert remedy in caught.value.remedy
    backend.close()


def test_on_cuda_offload_is_configured_with_pinned_memory() -> None:
    config = DeepSpeedConfig(offload_optimizer=True, offload_parameters=True)
    refuse_unsupported(config, "bfloat16", torch.device("cuda:0"), learns=True)
    zero = engine_settings(config, "bfloat16", torch.device("cuda:0"), learns=True)["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_clipping_is_written_out(stage: int) -> None:
    """DeepSpeed's own default clips at a norm of 1."""
    config = DeepSpeedConfig(zero_stage=stage)  # type: ignore[arg-type] # drawn from what it takes
    assert engine_settings(config, "float32", torch.device("cpu"), learns=True)["gradient_clipping"] == 0.0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_without_a_gradient_changes_no_weight(models: dict[str, str], stage: int) -> None:
    backend = start(models["qwen3"], stage, OPTIMIZER)
    train(backend, 2)
    before = arrays(backend.weights())
    assert backend.optim_step().grad_norm == 0
    assert not list(backend.gradients())
    for name, weight in backend.weights():
        np.testing.assert_array_equal(weight.numpy(), before[name])
    train(backend, 1)
    backend.close()


@pytest.mark.parametrize("before", [None, "7"])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_environment_that_launchers_set_is_left_as_it_was(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, stage: int, before: str | None
) -> None:
    """In the user's process a LOCAL_RANK lets accelerate, and so Hugging Face's Trainer, look for other ranks."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if before is not None:
        monkeypatch.setenv("LOCAL_RANK", before)
    first, second = (start(models["qwen3"], stage, OPTIMIZER) for _ in range(2))
    first.close()
    train(second, 1)
    second.close()
    assert os.environ.get("LOCAL_RANK") == before


def test_an_objective_without_a_gradient_reaches_every_parameter_with_zero(models: dict[str, str]) -> None:
    class Detached(WeightedObjective):
        def __call__(self, *arguments: object) -> tuple[torch.Tensor, object]:  # type: ignore[override] # of any scores
            return torch.zeros(()), super().__call__(*arguments)[1]  # type: ignore[arg-type] # as given

    backend = start(models["qwen3"])
    backend.forward_backward(batch(), Detached())
    assert backend.optim_step().grad_norm == 0
    backend.close()


def test_tokens_outside_the_vocabulary_are_named(models: dict[str, str]) -> None:
    backend = start(models["qwen3"])
    (micro_batch, *_) = batch()
    micro_batch.inputs["input_ids"][0, -1] = 70_000
    with pytest.raises(DataError, match="token id 70000, the model's vocabulary has"):
        backend.forward([micro_batch], WeightedObjective())
    backend.close()


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (3, "float32")])
def test_deepspeed_prints_nothing(
    models: dict[str, str], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, stage: int, dtype: str
) -> None:
    """Standard output belongs to results, and logs hold nothing that a user must not worry about."""
    with caplog.at_level(logging.WARNING):
        backend = start(models["llama"], stage, OPTIMIZER, dtype=dtype)
        train(backend, 2)
        backend.close()
    assert capfd.readouterr().out == ""
    assert [record.getMessage() for record in caplog.records] == []


def test_closing_twice_is_no_mistake(models: dict[str, str]) -> None:
    backend = start(models["qwen3"])
    backend.close()
    backend.close()
