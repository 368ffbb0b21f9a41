"""Tasks of ranks in the tests of adapters and of images: importable by name, because ranks are spawned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fsdp_tasks import arrays, start

from skyrl_engine.contracts import AdamWSettings, MicroBatch, ModelConfig, RankEnvironment
from skyrl_engine.modeling.lora import list_trained_parameters
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.backends.batches import (
    Arrays,
    WeightedObjective,
    build_packed,
    build_padded,
    documents,
    picture_documents,
)
from skyrl_engine_fsdp.backend import FsdpBackend
from skyrl_engine_fsdp.gradients import full
from skyrl_engine_fsdp.pieces import PiecesReader
from skyrl_engine_fsdp.plugin import FsdpConfig

LAYOUTS: dict[str, Callable[..., list[MicroBatch]]] = {"padded": build_padded, "packed": build_packed}
OPTIMIZER = AdamWSettings(learning_rate=1e-2, weight_decay=0.1)


def batch(
    backend: FsdpBackend, rows: str, size: int, unscored: tuple[int, ...] = (), *, pictures: bool = False
) -> list[MicroBatch]:
    """The micro-batches of `size` rows of this rank's share, which tensor-parallel ranks have alike."""
    everyone = picture_documents(VOCABULARY, "own") if pictures else documents(unscored=unscored)
    return LAYOUTS[rows](everyone[backend.coords.dp :: backend._meshes.topology.dp], size)


def adapters(backend: FsdpBackend) -> Arrays:
    """Whole values of what is trained."""
    return {
        name: full(parameter.detach()).cpu().numpy().copy() for name, parameter in list_trained_parameters(backend._model).items()
    }


def gradients_of(
    directory: str,
    *,
    rows: str = "padded",
    sizes: tuple[int, ...],
    unscored: tuple[int, ...] = (),
    pictures: bool = False,
    needs: Any = None,
    **model: Any,
) -> list[tuple[float, Arrays, float]]:
    """Per micro-batch size: this rank's part of the objective, the gradient summed over ranks, and the norm that the step reports."""
    backend = start(directory, AdamWSettings(learning_rate=1e-30, max_grad_norm=None), **model)
    results = []
    for size in sizes:
        objective = WeightedObjective() if needs is None else WeightedObjective(needs=needs)
        output = backend.forward_backward(batch(backend, rows, size, unscored, pictures=pictures), objective)
        gradients = arrays(backend.gradients())
        results.append((output.metrics["loss"].value, gradients, backend.optim_step().grad_norm))
    backend.close()
    return results


def draw_adapters(directory: str, **model: Any) -> tuple[Arrays, list[int]]:
    """New adapters, and the next random numbers after they were made."""
    torch.manual_seed(7)
    backend = start(directory, **model)
    state = adapters(backend), torch.randint(0, 2**31, (4,)).tolist()
    backend.close()
    return state


def list_dtypes(directory: str, **model: Any) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Precisions of frozen parameters, and of trained ones."""
    backend = start(directory, **model)
    everyone = list(backend._model.parameters())
    dtypes = tuple({parameter.dtype for parameter in everyone if parameter.requires_grad is learns} for learns in (False, True))
    backend.close()
    return dtypes[0], dtypes[1]


def train(backend: FsdpBackend, steps: int, *, pictures: bool = False) -> list[tuple[float, float]]:
    """Per step: this rank's part of the objective, and the gradient norm."""
    history = []
    for _ in range(steps):
        output = backend.forward_backward(batch(backend, "padded", 2, pictures=pictures), WeightedObjective())
        history.append((output.metrics["loss"].value, backend.optim_step().grad_norm))
    return history


def continue_training(directory: str, checkpoint: Path, *, pictures: bool = False, **model: Any) -> tuple[Any, Any, list[str], int]:
    """(history, trained weights) of two more steps, uninterrupted and from a checkpoint between; its entries; trained parameters."""
    first = start(directory, OPTIMIZER, **model)
    train(first, 2, pictures=pictures)
    first.save(checkpoint)
    uninterrupted = train(first, 2, pictures=pictures), adapters(first)
    second = start(directory, OPTIMIZER, **model)
    torch.manual_seed(12345)  # whatever the state was, the checkpoint's counts
    train(second, 1, pictures=pictures)
    second.load(checkpoint)
    resumed = train(second, 2, pictures=pictures), adapters(second)
    assert second._optimizer is not None
    return (
        uninterrupted,
        resumed,
        sorted(PiecesReader(checkpoint).read_metadata().state_dict_metadata),
        len(second._optimizer.state),
    )


def export_adapters(
    directory: str, target: Path, *, pictures: bool = False, **model: Any
) -> tuple[Arrays, dict[int, np.ndarray], Arrays]:
    """Export after two steps: merged weights, log-probabilities of this rank's documents, and what is trained."""
    backend = start(directory, OPTIMIZER, **model)
    train(backend, 2, pictures=pictures)
    backend.export(target)
    output = backend.forward(batch(backend, "padded", 2, pictures=pictures), WeightedObjective())
    logprobs = dict(zip(output.sample_ids.tolist(), output.fields["logprobs"], strict=True))
    state = arrays(backend.weights()), logprobs, adapters(backend)
    backend.close()
    return state


def export_alone(directory: str, checkpoint: Path, target: Path, **model: Any) -> Arrays:
    """As `skyrl-engine export` does: one rank that only scores reads the checkpoint."""
    backend = FsdpBackend(FsdpConfig())
    backend.setup(ModelConfig(directory, **model), None, RankEnvironment(dist.get_rank(), dist.get_world_size(), "cpu", 0))
    backend.load(checkpoint)
    backend.export(target)
    weights = adapters(backend)
    backend.close()
    return weights


def save_adapters(directory: str, checkpoint: Path, **model: Any) -> Arrays:
    """A checkpoint after a step, and the adapters in it."""
    backend = start(directory, OPTIMIZER, **model)
    train(backend, 1)
    backend.save(checkpoint)
    weights = adapters(backend)
    backend.close()
    return weights
