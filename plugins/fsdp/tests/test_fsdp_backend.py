"""The rest of the backend's contract on one rank."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_tasks import arrays, start, train
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine import DataError, ModelError, UnsupportedError
from skyrl_engine.contracts import AdamWSettings, LoraConfig, MicroBatch, RankOutput, Topology
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.backends.batches import WeightedObjective, build_padded, documents
from skyrl_engine_fsdp.plugin import FsdpConfig, fsdp

pytestmark = pytest.mark.usefixtures("alone")


def test_describing_the_backend_imports_no_torch() -> None:
    code = (
        "import sys; from skyrl_engine_fsdp.plugin import fsdp; "
        "described = fsdp.skyrl_engine_describe_backend(None, world_size=3); "
        "assert described.topology.dp == 3; "
        "assert described.capabilities == {'padded', 'packed', 'tree', 'value_head', 'tensor_parallel', 'context_parallel', "
        "'lora', 'load_in_4bit', 'vision', "
        "'logits', "
        "'logsumexp', 'mean_logprob', 'log_sum_squares', 'logprobs_at', 'divergence', "
        "'second_model', 'asynchronous_saves', 'reference_by_adapters', 'adapter_sets', 'sgd', 'adafactor', 'lion', 'muon', 'adamw_8bit', "
        "'parameter_groups', 'freeze', 'ema', 'compile', 'attention', 'offload', 'embedding_noise', 'stochastic_rounding'}; "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert fsdp.skyrl_engine_config_schema() is FsdpConfig
    assert fsdp.skyrl_engine_describe_backend(config=None, world_size=2).topology == Topology(dp=2)


def test_forward_scores_in_evaluation_mode_and_leaves_gradients_alone(models: dict[str, str]) -> None:
    backend = start(models["dropout"])
    batch = build_padded(documents(), 4)
    trained = backend.forward_backward(batch, WeightedObjective()).metrics["loss"].value
    before = arrays(backend.gradients())
    first, second = (backend.forward(batch, WeightedObjective()).metrics["loss"].value for _ in range(2))
    assert first == second, "dropout was active"
    assert first != trained, "dropout was not active in training"
    after = arrays(backend.gradients())
    assert before.keys() == after.keys()
    for name, gradient in before.items():
        np.testing.assert_array_equal(gradient, after[name])


def test_forward_after_a_step_uses_the_new_weights(models: dict[str, str]) -> None:
    backend = start(models["qwen3-tied"], AdamWSettings(learning_rate=1e-2))
    batch = build_padded(documents(), 4)
    before = backend.forward(batch, WeightedObjective()).metrics["loss"].value
    train(backend, 3)
    after = backend.forward(batch, WeightedObjective()).metrics["loss"].value
    assert after < before
    assert after == backend.forward_backward(batch, WeightedObjective()).metrics["loss"].value


def test_calls_add_up(models: dict[str, str]) -> None:
    backend = start(models["qwen3-tied"])
    batch = build_padded(documents(), 8)
    backend.forward_backward(batch, WeightedObjective())
    once = arrays(backend.gradients())
    backend.forward_backward(batch, WeightedObjective())
    for name, gradient in backend.gradients():
        np.testing.assert_array_equal(gradient.numpy(), 2 * once[name])


def test_an_empty_batch_gives_an_empty_output(models: dict[str, str]) -> None:
    backend = start(models["qwen3-tied"])
    assert len(backend.forward([], WeightedObjective()).sample_ids) == 0
    assert len(backend.forward_backward([], WeightedObjective()).sample_ids) == 0


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_empty_rows_and_left_padding_leave_everything_finite(models: dict[str, str], activation_checkpointing: bool) -> None:
    backend = start(models["qwen3-untied"], activation_checkpointing=activation_checkpointing)
    seen: list[torch.Tensor] = []

    class Keep(WeightedObjective):
        def __call__(self, scores: Mapping[str, torch.Tensor], micro: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
            seen.extend(scores.values())
            return super().__call__(scores, micro)

    backend.forward_backward([*build_padded([documents()[5]] * 2, 2), *build_padded(documents()[4:6], 2)], Keep())
    assert all(torch.isfinite(values).all() for values in seen)
    assert {len(values) for values in seen} == {0, int((documents()[4].weights != 0).sum())}
    assert all(np.isfinite(gradient).all() for gradient in arrays(backend.gradients()).values())


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(models: dict[str, str], scale: float) -> None:
    backend = start(models["qwen3-tied"], AdamWSettings(learning_rate=1e-2))
    train(backend, 1)
    before = arrays(backend.weights())
    backend.forward_backward(build_padded(documents(), 8), WeightedObjective(scale=scale))
    with pytest.raises(ModelError, match=r"optimizer step 2 is not finite") as caught:
        backend.optim_step()
    assert any("embed_tokens" in line for line in caught.value.details)
    assert not list(backend.gradients())
    for name, weight in arrays(backend.weights()).items():
        np.testing.assert_array_equal(weight, before[name])
    train(backend, 1)


def test_a_detached_objective_has_a_zero_gradient(models: dict[str, str]) -> None:
    backend = start(models["qwen3-tied"])

    class Detached(WeightedObjective):
        def __call__(self, *_: object) -> tuple[torch.Tensor, RankOutput]:
            return torch.zeros(()), RankOutput.empty()

    backend.forward_backward(build_padded(documents(), 4), Detached())
    assert backend.optim_step().grad_norm == 0


def test_without_a_limit_the_norm_is_still_reported(models: dict[str, str]) -> None:
    limited = start(models["llama-tied"], AdamWSettings(max_grad_norm=1e9))
    free = start(models["llama-tied"], AdamWSettings(max_grad_norm=None))
    assert train(limited, 2) == train(free, 2)


def test_entropy_is_computed_only_when_needed(models: dict[str, str]) -> None:
    backend = start(models["qwen3-tied"])
    names: set[str] = set()

    class Names(WeightedObjective):
        def __call__(self, scores: Mapping[str, torch.Tensor], micro: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
            names.update(scores)
            return super().__call__(scores, micro)

    backend.forward_backward(build_padded(documents(), 8), Names(needs=("logprobs",)))
    assert names == {"logprobs"}


def test_scores_it_cannot_compute_are_refused(models: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match="values"):
        start(models["qwen3-tied"]).forward(build_padded(documents(), 8), WeightedObjective(needs=("logprobs", "values")))


@settings(max_examples=5, deadline=None)
@given(token=st.integers(VOCABULARY, 2**31 - 1))
def test_tokens_outside_the_vocabulary_are_named(models: dict[str, str], token: int) -> None:
    backend = start(models["qwen3-tied"])
    (batch,) = build_padded(documents()[:2], 2)
    batch.inputs["input_ids"][0, 3] = token
    with pytest.raises(DataError, match=f"token id {token}, the model's vocabulary has {VOCABULARY}"):
        backend.forward([batch], WeightedObjective())


def test_scoring_only_needs_no_optimizer(models: dict[str, str]) -> None:
    from fsdp_tasks import FsdpBackend, ModelConfig, RankEnvironment

    backend = FsdpBackend(FsdpConfig())
    backend.setup(ModelConfig(models["qwen3-tied"]), None, RankEnvironment(0, 1, "cpu", 0))
    assert np.isfinite(backend.forward(build_padded(documents(), 8), WeightedObjective()).metrics["loss"].value)
    backend.close()
    backend.close()


@pytest.mark.parametrize("name", ["qwen3-tied", "critic"])
def test_storage_is_the_memory_that_steps_and_checkpoints_change(models: dict[str, str], name: str, tmp_path: Path) -> None:
    backend = start(models[name], AdamWSettings(learning_rate=1e-2), value_head=name == "critic")
    shown = backend.storage()
    assert shown is not None
    before = {key: tensor.clone() for key, tensor in shown.items()}
    assert not any(tensor.requires_grad for tensor in shown.values())
    assert dict(backend.weights()).keys() | {"lm_head.weight"} <= shown.keys()
    backend.save(tmp_path)
    train(backend, 2)
    for key, weight in backend.weights():
        assert torch.equal(shown[key], weight)
        # the steps' loss reads no values
        assert torch.equal(shown[key], before[key]) == key.startswith("score.")
    backend.load(tmp_path)
    assert all(torch.equal(shown[key], before[key]) for key in shown)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"lora": LoraConfig()}])
def test_weights_that_are_cast_or_adapted_are_not_shown(models: dict[str, str], settings: dict[str, Any]) -> None:
    assert start(models["qwen3-tied"], **settings).storage() is None
