"""Tasks of ranks in the tests: importable by name, because ranks are spawned."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from skyrl_engine.contracts import AdamWSettings, MicroBatch, ModelConfig, RankEnvironment, RowKind
from skyrl_engine.modeling.tiny import VOCABULARY, write_model
from skyrl_engine.testing.backends.batches import (
    Arrays,
    Document,
    WeightedObjective,
    build_packed,
    build_padded,
    documents,
    picture_documents,
)
from skyrl_engine_deepspeed.backend import DeepSpeedBackend
from skyrl_engine_deepspeed.gradients import AccumulatedGradients
from skyrl_engine_deepspeed.plugin import DeepSpeedConfig

OPTIMIZER = AdamWSettings(learning_rate=1e-2, weight_decay=0.1)
STILL = AdamWSettings(learning_rate=1e-30, max_grad_norm=None)
"""A step that changes no weight: it only clears the gradient."""


def save_models(root: Path) -> dict[str, str]:
    """A tied Qwen3, an untied Llama, a critic, a model with dropout; biases and transposed weights, capped logits, experts."""
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen3": ("qwen3", {}),
        "llama": ("llama", {}),
        "critic": ("llama", {"value_head": True}),
        "dropout": ("qwen3", {"attention_dropout": 0.2}),
        "gpt2": ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": True}),
        "gemma2": ("gemma2", {"query_pre_attn_scalar": 12, "final_logit_softcapping": 1.0, "tie_word_embeddings": True}),
        "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 4}),
        "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    }
    for name, (family, settings) in configs.items():
        write_model(root / name, family, **settings)
    return {name: str(root / name) for name in configs}


def start(
    directory: str,
    stage: int = 3,
    optimizer: AdamWSettings | None = STILL,
    *,
    threshold: int = 0,
    rows: RowKind = "padded",
    **model: Any,
) -> DeepSpeedBackend:
    """A backend over the default process group. Chunks of five positions; unless said otherwise no parameter is kept whole."""
    backend = DeepSpeedBackend(DeepSpeedConfig(zero_stage=stage, persistence_threshold=threshold))  # type: ignore[arg-type] # checked by attrs
    environment = RankEnvironment(dist.get_rank(), dist.get_world_size(), "cpu", 0, rows)
    backend.setup(ModelConfig(directory, **{"logits_per_chunk": 5 * VOCABULARY, **model}), optimizer, environment)
    return backend


def own(chosen: list[Document]) -> list[Document]:
    """This rank's share."""
    return chosen[dist.get_rank() :: dist.get_world_size()]


def batch(rows: str = "padded", size: int = 2, unscored: tuple[int, ...] = (), *, pictures: bool = False) -> list[MicroBatch]:
    """This rank's micro-batches of `size` rows."""
    layout: Callable[..., list[MicroBatch]] = {"padded": build_padded, "packed": build_packed}[rows]
    chosen = picture_documents(VOCABULARY, "own") if pictures else documents(VOCABULARY, unscored=unscored)
    return layout(own(chosen), size)


def arrays(pairs: Iterator[tuple[str, torch.Tensor]]) -> Arrays:
    return {name: tensor.detach().numpy().copy() for name, tensor in pairs}


def gradients_of(
    directory: str,
    stage: int,
    *,
    rows: str = "padded",
    sizes: tuple[int, ...] = (1, 3),
    forgotten: bool = False,
    pictures: bool = False,
    **model: Any,
) -> list[tuple[float, Arrays, float]]:
    """Per micro-batch size: this rank's part of the objective, the gradient summed over ranks, and the norm that the step reports.

    `forgotten` plants the mistake to forget that DeepSpeed averages over ranks.
    """

    def mean(gradients: AccumulatedGradients, total: torch.Tensor) -> None:
        gradients.any = True
        gradients._engine.backward(total)

    backend = start(directory, stage, **model)
    results = []
    with patch.object(AccumulatedGradients, "backward", mean if forgotten else AccumulatedGradients.backward):
        for size in sizes:
            output = backend.forward_backward(batch(rows, size, pictures=pictures), WeightedObjective())
            gradients = arrays(backend.gradients())
            results.append((output.metrics["loss"].value, gradients, backend.optim_step().grad_norm))
    backend.close()
    return results


def reached_late(directory: str, stage: int) -> tuple[Arrays, Arrays]:
    """The gradient of values in one call and log-probabilities in the next, as the first step and as one after other steps."""
    backend = start(directory, stage, value_head=True)

    def accumulate() -> Arrays:
        backend.forward_backward(batch(), WeightedObjective(needs=("values",)))
        backend.forward_backward(batch(), WeightedObjective(needs=("logprobs",)))
        gradients = arrays(backend.gradients())
        backend.optim_step()
        return gradients

    first = accumulate()
    backend.forward_backward(batch(), WeightedObjective(needs=("logprobs", "entropy")))
    backend.optim_step()
    again = accumulate()
    backend.close()
    return first, again


def train(backend: DeepSpeedBackend, steps: int) -> list[tuple[float, float, float]]:
    """Per step: this rank's part of the objective, gradient norm, learning rate."""
    history = []
    for _ in range(steps):
        output = backend.forward_backward(batch(), WeightedObjective())
        step = backend.optim_step()
        history.append((output.metrics["loss"].value, step.grad_norm, step.learning_rate))
    return history


def continued(
    directory: str, stage: int, checkpoint: Path, *, before: int, after: int, later_stage: int | None = None, **options: Any
) -> tuple[Any, Any]:
    """(history, weights) of the last `after` steps: uninterrupted, and by a fresh backend, perhaps of another stage, from the checkpoint."""
    first = start(directory, stage, OPTIMIZER, **options)
    train(first, before)
    first.save(checkpoint)
    uninterrupted = train(first, after), arrays(first.weights())
    first.close()
    second = start(directory, stage if later_stage is None else later_stage, OPTIMIZER, **options)
    torch.manual_seed(12345)  # whatever the state was, the checkpoint's counts
    np.random.seed(1)
    train(second, 1)
    second.load(checkpoint)
    resumed = train(second, after), arrays(second.weights())
    second.close()
    return uninterrupted, resumed


def save_after_a_step(directory: str, stage: int, checkpoint: Path, **model: Any) -> Arrays:
    backend = start(directory, stage, OPTIMIZER, **model)
    train(backend, 1)
    backend.save(checkpoint)
    weights = arrays(backend.weights())
    backend.close()
    return weights


def load_in_training(directory: str, stage: int, checkpoint: Path) -> None:
    backend = start(directory, stage, OPTIMIZER)
    try:
        backend.load(checkpoint)
    finally:
        backend.close()


def load_and_train(
    directory: str, stage: int, checkpoint: Path, *, steps: int, drawn: int = 0, saves_to: Path | None = None
) -> Arrays:
    """Weights after so many steps from a checkpoint, which are saved too; `drawn` random numbers were drawn before."""
    backend = start(directory, stage, OPTIMIZER)
    torch.rand(drawn)
    backend.load(checkpoint)
    train(backend, steps)
    if saves_to is not None:
        backend.save(saves_to)
    weights = arrays(backend.weights())
    backend.close()
    return weights


def precision(directory: str, stage: int) -> tuple[Arrays, Arrays]:
    """Weights in bfloat16 training before and after a step that is smaller than bfloat16 can tell."""
    backend = start(directory, stage, AdamWSettings(learning_rate=1e-6), dtype="bfloat16")
    before = arrays(backend.weights())
    train(backend, 1)
    after = arrays(backend.weights())
    backend.close()
    return before, after


def scored(directory: str, checkpoint: Path | None = None, **model: Any) -> tuple[float, Arrays]:
    """Return what a backend that only scores gives: this rank's part of the objective, and weights."""
    backend = start(directory, 3, None, **model)
    if checkpoint is not None:
        backend.load(checkpoint)
    loss = backend.forward(batch(), WeightedObjective()).metrics["loss"].value
    weights = arrays(backend.weights())
    backend.close()
    return loss, weights


def exported(directory: str, stage: int, target: Path, **model: Any) -> Arrays:
    """Export after a step; returns the weights."""
    backend = start(directory, stage, OPTIMIZER, **model)
    train(backend, 2)
    backend.export(target)
    weights = arrays(backend.weights())
    backend.close()
    return weights
