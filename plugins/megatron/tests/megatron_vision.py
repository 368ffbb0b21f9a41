"""Tasks of ranks in the tests of models that see; importable by name, because ranks are spawned."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch.distributed as dist
from attrs import frozen
from megatron_tasks import ROWS, arrays, own, start

from skyrl_engine.contracts import AdamWSettings, MicroBatch, RankOutput
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.backends.batches import Arrays, Document, WeightedObjective, drop_pixels, picture_documents
from skyrl_engine.testing.pictures import Variant
from skyrl_engine_megatron.backend import MegatronBackend
from skyrl_engine_megatron.plugin import MegatronConfig

KINDS: Mapping[str, Sequence[int]] = {
    "one image": (0, 3),
    "several images of different sizes": (1, 6),
    "no image": (2, 4),
    "mixed": range(8),
}
"""Documents by what they have; of the mixed ones a rank, and a micro-batch, may have no image, and one has not even a token."""

Case = tuple[str, str, int]
"""A kind, the layout of rows, and rows per micro-batch."""


def pictures(kind: str, variant: Variant = "own") -> list[Document]:
    known = picture_documents(VOCABULARY, variant)
    return [known[number] for number in KINDS[kind]]


@frozen(eq=False)
class Seen:
    """A rank's result of one case: outputs of learning and of evaluation, and the gradient summed over ranks."""

    learned: RankOutput
    evaluated: RankOutput
    gradients: Arrays


def batch_of(backend: MegatronBackend, chosen: Sequence[Document], rows: str, size: int) -> list[MicroBatch]:
    """This rank's share. Stages after the first get no pixels, as the engine gives them none."""
    documents = ROWS[rows](own(chosen, backend), size)
    return documents if backend.coords.pp == 0 else [drop_pixels(document) for document in documents]


def score_pictures(directory: str, options: MegatronConfig, cases: Sequence[Case], **model: Any) -> list[Seen]:
    """Every case, one after the other, with one model."""
    outputs = []
    with closing(start(directory, options=options, **model)) as backend:
        for kind, rows, size in cases:
            batch = batch_of(backend, pictures(kind), rows, size)
            learned = backend.forward_backward(batch, WeightedObjective())
            outputs.append(Seen(learned, backend.forward(batch, WeightedObjective()), arrays(backend.gradients())))
            backend.zero_grad()
    return outputs


def steps(backend: MegatronBackend, count: int) -> list[tuple[float, float]]:
    """Per step this rank's part of the loss, 0 where it collects nothing, and the gradient norm."""
    history = []
    for _ in range(count):
        output = backend.forward_backward(batch_of(backend, pictures("mixed"), "packed", 2), WeightedObjective())
        step = backend.optim_step()
        history.append((output.metrics["loss"].value if "loss" in output.metrics else 0.0, step.grad_norm))
    return history


def train_from_start(directory: str, options: MegatronConfig, optimizer: AdamWSettings, count: int) -> list[tuple[float, float]]:
    with closing(start(directory, optimizer, options=options)) as backend:
        return steps(backend, count)


def continue_training(directory: str, options: MegatronConfig, optimizer: AdamWSettings, checkpoint: Path) -> Any:
    """(history, weights) of two steps: uninterrupted, and by a fresh backend from the checkpoint before them."""
    with closing(start(directory, optimizer, options=options)) as first:
        steps(first, 2)
        first.save(checkpoint)
        uninterrupted = steps(first, 2), arrays(first.weights())
    dist.barrier()
    return uninterrupted, resume_checkpoint(directory, options, optimizer, checkpoint)


def resume_checkpoint(directory: str, options: MegatronConfig, optimizer: AdamWSettings, checkpoint: Path) -> Any:
    """(history, weights) of two steps from a checkpoint."""
    with closing(start(directory, optimizer, options=options)) as backend:
        backend.load(checkpoint)
        return steps(backend, 2), arrays(backend.weights())


def export_weights(directory: str, options: MegatronConfig, target: Path) -> tuple[Arrays, RankOutput]:
    """Weights after two steps, which are exported, and what they score."""
    with closing(start(directory, AdamWSettings(learning_rate=1e-2), options=options)) as backend:
        steps(backend, 2)
        backend.export(target)
        batch = batch_of(backend, pictures("mixed"), "padded", 3)
        return arrays(backend.weights()), backend.forward(batch, WeightedObjective())


def scores_of(directory: str, options: MegatronConfig, kind: str, variants: Sequence[Variant]) -> list[RankOutput]:
    """Evaluations of the same documents with other pictures."""
    with closing(start(directory, options=options, learns=False)) as backend:
        batches = (batch_of(backend, pictures(kind, variant), "packed", 2) for variant in variants)
        return [backend.forward(batch, WeightedObjective()) for batch in batches]
