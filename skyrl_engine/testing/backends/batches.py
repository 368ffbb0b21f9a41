"""Batches for tests of backends, an objective over them, and its definition in plain autograd: one process, whole logits."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen
from torch import Tensor

from skyrl_engine.contracts.kinds.backend import EmbeddingNoise, MicroBatch
from skyrl_engine.contracts.kinds.needs import LOGPROBS_AT, TOP_1_AGREEMENT, Divergence
from skyrl_engine.contracts.values.extras import IMAGE_GRID, PIXEL_VALUES, TOKEN_TYPES
from skyrl_engine.contracts.values.outputs import Metric, RankOutput
from skyrl_engine.contracts.values.prefixes import PrefixTree
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.modeling.embedding_noise import draw_noise
from skyrl_engine.modeling.tiny import IMAGE_TOKEN, VOCABULARY
from skyrl_engine.objective.behind import Later
from skyrl_engine.proof.comparison import relative_difference
from skyrl_engine.proof.plain_model import PlainModel
from skyrl_engine.testing.adapters import with_adapter
from skyrl_engine.testing.pictures import Pictures, Variant, with_pictures

Arrays = dict[str, npt.NDArray[Any]]

EMPTY = 5
"""The row that `documents` leaves empty."""


@frozen(eq=False)
class Document:
    """One sequence: token ids int64[length], and weights float32[length], 0 where the token is not scored.

    `pictures` is None for a model that takes none; rows then have no fields for them.
    """

    number: int
    ids: Tensor
    weights: Tensor
    pictures: Pictures | None = None


def documents(vocabulary: int = VOCABULARY, *, count: int = 8, longest: int = 16, unscored: Sequence[int] = ()) -> list[Document]:
    """Return sequences of different lengths; number 5 is empty; those in `unscored` carry no loss."""
    draw = torch.Generator().manual_seed(1)
    sequences = []
    for number in range(count):
        length = 0 if number == EMPTY else longest - number
        ids = torch.randint(0, vocabulary, (length,), generator=draw)
        weights = (torch.rand(length, generator=draw) < 0.6) * torch.rand(length, generator=draw)
        weights[:1] = 0  # nothing comes before a first token
        sequences.append(Document(number, ids, torch.zeros_like(weights) if number in unscored else weights))
    return sequences


MANY = 22
"""The number of documents of a batch that is cut into more micro-batches than pipelines hold."""


def many_documents(vocabulary: int = VOCABULARY) -> list[Document]:
    """Return so many sequences: every fifth of more than 100 tokens, the others short; number 5 is empty."""
    draw = torch.Generator().manual_seed(2)
    sequences = []
    for number in range(MANY):
        length = 0 if number == EMPTY else 120 - number if number % 5 == 1 else 2 + number % 8
        ids = torch.randint(0, vocabulary, (length,), generator=draw)
        weights = (torch.rand(length, generator=draw) < 0.6) * torch.rand(length, generator=draw)
        weights[:1] = 0
        sequences.append(Document(number, ids, weights))
    return sequences


def branching_documents(vocabulary: int = VOCABULARY) -> list[Document]:
    """Return sequences of which 0 to 4 begin alike: a trunk, branches of branches, one that ends where another goes on, and two that are equal.

    Numbers 6 and 7 share nothing; number 5 is empty.
    """
    draw = torch.Generator().manual_seed(3)
    trunk, branch, *ends = (torch.randint(0, vocabulary, (length,), generator=draw) for length in (7, 4, 5, 3, 6, 9, 2))
    ids = [
        torch.cat([trunk, branch, ends[0]]),
        torch.cat([trunk, branch, ends[1]]),
        torch.cat([trunk, ends[2]]),
        torch.cat([trunk, branch]),
        torch.cat([trunk, branch, ends[1]]),
        trunk[:0],
        ends[3],
        ends[4],
    ]
    sequences = []
    for number, own in enumerate(ids):
        weights = (torch.rand(len(own), generator=draw) < 0.7) * torch.rand(len(own), generator=draw)
        weights[:1] = 0
        sequences.append(Document(number, own, weights))
    return sequences


def picture_documents(vocabulary: int, variant: Variant) -> list[Document]:
    """Return the documents with pictures: 0 and 3 have one, 1 and 6 have two, the others none."""
    draw = torch.Generator().manual_seed(1)
    sequences = []
    for number, (ids, pictures) in enumerate(with_pictures(vocabulary, variant, EMPTY)):
        weights = (torch.rand(len(ids), generator=draw) < 0.6) * torch.rand(len(ids), generator=draw)
        weights[:1] = 0
        sequences.append(Document(number, ids, torch.where(ids == IMAGE_TOKEN, 0, weights), pictures))
    return sequences


def build_padded(chosen: Sequence[Document], size: int) -> list[MicroBatch]:
    """Build micro-batches of `size` left-padded rows, each as wide as its longest document."""
    return [pad_documents(chosen[start : start + size]) for start in range(0, len(chosen), size)]


def build_packed(chosen: Sequence[Document], size: int) -> list[MicroBatch]:
    """Build micro-batches of `size` rows: two documents in the first row, an empty row, then three documents per row."""
    rows = [list(chosen[:2]), [], *(list(chosen[start : start + 3]) for start in range(2, len(chosen), 3))]
    return [pack_documents(rows[start : start + size]) for start in range(0, len(rows), size)]


def build_trees(chosen: Sequence[Document], size: int) -> list[MicroBatch]:
    """Build micro-batches of `size` rows: five documents in the first row, an empty row, then all others."""
    rows = [list(chosen[:5]), [], list(chosen[5:])]
    return [grow_trees(rows[start : start + size]) for start in range(0, len(rows), size)]


def drop_pixels(micro_batch: MicroBatch) -> MicroBatch:
    """Return the batch as pipeline stages after the first get it: grids and token types, and no pixels."""
    return evolve(
        micro_batch,
        inputs={name: tensor for name, tensor in micro_batch.inputs.items() if name != PIXEL_VALUES},
        ragged_offsets={name: offsets for name, offsets in micro_batch.ragged_offsets.items() if name != PIXEL_VALUES},
    )


def pad_documents(chosen: Sequence[Document]) -> MicroBatch:
    """Pad every document on its left to the longest, with attention mask and position ids, as the padded collator does."""
    width = max(1, *(len(document.ids) for document in chosen))
    ids, mask = (torch.zeros(len(chosen), width, dtype=torch.int64) for _ in range(2))
    positions = []
    for row, document in enumerate(chosen):
        start = width - len(document.ids)
        ids[row, start:], mask[row, start:] = document.ids, 1
        positions.append(row * width + start + document.weights.nonzero()[:, 0] - 1)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    lengths = Ragged.from_list([[len(document.ids)] for document in chosen], np.int64)
    return _micro_batch(inputs, positions, lengths, chosen)


def pack_documents(rows: Sequence[Sequence[Document]], *, align: int = 4, padding: int = 3) -> MicroBatch:
    """Pack every list of documents into a row, each document rounded up to `align`, as the packed collator does."""
    occupied = [[-(-len(document.ids) // align) * align for document in row] for row in rows]
    width = max(sum(spaces) for spaces in occupied) + padding
    ids, mask, places = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
    positions = []
    for number, row in enumerate(rows):
        starts = np.cumsum([0, *occupied[number]]).tolist()
        for start, document in zip(starts[:-1], row, strict=True):
            span = slice(start, start + len(document.ids))
            ids[number, span], mask[number, span], places[number, span] = document.ids, 1, torch.arange(len(document.ids))
            positions.append(number * width + start + document.weights.nonzero()[:, 0] - 1)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
    lengths = Ragged.from_list([[len(document.ids) for document in row] for row in rows], np.int64)
    return _micro_batch(inputs, positions, lengths, [document for row in rows for document in row])


def grow_trees(rows: Sequence[Sequence[Document]], *, padding: int = 3) -> MicroBatch:
    """Lay every list of documents into a row, the tokens with which several begin once, as the collator of trees does."""
    ordered = [sorted(row, key=lambda document: document.ids.tolist()) for row in rows]
    width = padding + max(sum(len(document.ids) for document in row) for row in rows)
    ids, mask, places = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
    positions: list[Tensor] = []
    cut: list[tuple[list[int], list[int], list[int]]] = []
    for number, row in enumerate(ordered):
        column_of: dict[tuple[int, ...], int] = {}  # by all tokens up to that of the column
        paths: list[list[int]] = []
        for document in row:
            tokens = document.ids.tolist()
            path = [column_of.setdefault(tuple(tokens[: place + 1]), len(column_of)) for place in range(len(tokens))]
            span = torch.tensor(path, dtype=torch.int64)
            ids[number, span], mask[number, span], places[number, span] = document.ids, 1, torch.arange(len(tokens))
            positions.append(number * width + span[document.weights.nonzero()[:, 0] - 1])
            paths.append(path)
        cut.append(_cut_into_segments(paths))
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
    lengths = Ragged.from_list([[len(document.ids) for document in row] for row in ordered], np.int64)
    tree = PrefixTree(*(Ragged.from_list(values, np.int64) for values in zip(*cut, strict=True)))
    return evolve(_micro_batch(inputs, positions, lengths, [document for row in ordered for document in row]), tree=tree)


def _cut_into_segments(paths: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """Return lengths and parents of the segments of a row, and the last segment of each path that has a token."""
    held: dict[int, tuple[int, list[int]]] = {}  # column: the column before, and the paths that have it
    for number, path in enumerate(paths):
        for before, column in zip([-1, *path], path, strict=False):
            held.setdefault(column, (before, []))[1].append(number)
    segment_of: dict[int, int] = {-1: -1}
    lengths: list[int] = []
    parents: list[int] = []
    for column, (before, holders) in sorted(held.items()):
        if before >= 0 and before == column - 1 and held[before][1] == holders:
            lengths[-1] += 1
        else:
            lengths.append(1)
            parents.append(segment_of[before])
        segment_of[column] = len(lengths) - 1
    return lengths, parents, [segment_of[path[-1]] for path in paths if path]


def _micro_batch(
    inputs: Mapping[str, Tensor],
    positions: Sequence[Tensor],
    lengths: Ragged,
    chosen: Sequence[Document],
) -> MicroBatch:
    nothing = torch.zeros(0, dtype=torch.int64)
    labels = torch.cat([nothing, *(document.ids[document.weights.nonzero()[:, 0]] for document in chosen)])
    pictures = [document.pictures for document in chosen if document.pictures is not None]
    offsets: dict[str, npt.NDArray[np.int64]] = {}
    if pictures:
        grids, pixels = [each.grids for each in pictures], [each.pixels for each in pictures]
        images = {IMAGE_GRID: torch.cat(grids), PIXEL_VALUES: torch.cat(pixels), TOKEN_TYPES: _types(inputs["input_ids"])}
        inputs = {**inputs, **images}
        offsets = {name: offsets_of([len(one) for one in each]) for name, each in ((IMAGE_GRID, grids), (PIXEL_VALUES, pixels))}
    numbers = np.array([document.number for document in chosen], dtype=np.int64)
    return MicroBatch(
        inputs,
        torch.cat([nothing, *positions]),
        labels,
        lengths,
        list(chosen),
        ragged_offsets=offsets,
        sample_ids=numbers,
        candidates=candidates(labels),
    )


def candidates(labels: Tensor) -> dict[str, Tensor]:
    """Return token ids to score in addition to labels int64[n], [n, k] by column: the label and another id twice, two ids far from the label,
    and the one that replaces it in passes with other labels.
    """
    other = (labels * 7 + 3) % VOCABULARY
    return {
        "near": torch.stack([labels, other, other], 1),
        "other": other[:, None],
        "far": torch.stack([(VOCABULARY - 1 - labels) % VOCABULARY, (labels + VOCABULARY // 2) % VOCABULARY], 1),
    }


def _types(ids: Tensor) -> Tensor:
    return (ids == IMAGE_TOKEN).long()


NOISE = 9.0
"""The `ModelConfig.neftune_alpha` of passes with noise."""


def add_noise(micro_batch: MicroBatch) -> MicroBatch:
    """Return the batch with the noise that `define_noise` gives each of its documents."""
    chosen: list[Document] = micro_batch.samples
    there = micro_batch.inputs["attention_mask"].bool()
    keys, lengths = (torch.zeros(there.shape, dtype=torch.int64) for _ in range(2))
    keys[there] = torch.cat([torch.zeros(0, dtype=torch.int64), *map(_noise_keys, chosen)])
    lengths[there] = torch.tensor([len(document.ids) for document in chosen for _ in document.ids], dtype=torch.int64)
    return evolve(micro_batch, noise=EmbeddingNoise(NOISE, keys, lengths))


def define_noise(document: Document, width: int) -> Tensor:
    """Return what is added to the embeddings of a document, float32[length, width]."""
    length = len(document.ids)
    return NOISE / math.sqrt(length * width) * draw_noise(_noise_keys(document), width)


def _noise_keys(document: Document) -> Tensor:
    return (document.number + 1) * 12345678901 + torch.arange(len(document.ids)) * 97


class WeightedObjective:
    """The objective sum w f(score) over documents and over the scores that `needs` names, each with its function f of `TERMS`.

    The sum is returned as the metric "loss", multiplied by `scale`; scores are returned only with `per_token_outputs`.
    """

    def __init__(
        self,
        *,
        scale: float = 1.0,
        temperature: float = 1.0,
        needs: Iterable[str] = ("logprobs", "entropy"),
        per_token_outputs: bool = True,
    ) -> None:
        self.scale = scale
        self.temperature = temperature
        self.needs = frozenset(needs)
        self.per_token_outputs = per_token_outputs

    def __call__(self, scores: Mapping[str, Tensor], micro_batch: MicroBatch) -> tuple[Tensor, RankOutput]:
        chosen: list[Document] = micro_batch.samples
        like = scores[min(self.needs)]
        weights = torch.cat([torch.zeros(0), *(document.weights[document.weights != 0] for document in chosen)]).to(like)
        terms = [TERMS[need](scores[need]) for need in sorted(self.needs)]
        total = self.scale * (weights * torch.stack(terms).sum(0)).sum()
        places = [document.weights.nonzero()[:, 0].numpy() for document in chosen]
        if not self.per_token_outputs:
            places = [place[:0] for place in places]
        offsets = offsets_of([len(document_places) for document_places in places])
        scored = Ragged(np.concatenate([np.zeros(0, dtype=np.int32), *places]).astype(np.int32), offsets)
        # outputs are one number per token
        per_token = {name: score for name, score in scores.items() if score.ndim == 1} if self.per_token_outputs else {}
        # read when the pass is over, as the engine's outputs are
        later = Later(like.device)
        metrics = later.send_metrics({"loss": Metric.sum(total)})
        output = RankOutput(
            np.array([document.number for document in chosen], dtype=np.int64),
            np.array([len(document.ids) for document in chosen], dtype=np.int64),
            scored,
            later.send_fields(per_token, offsets),
            metrics,
        )
        return total, output


DIVERGENCES = (Divergence("forward"), Divergence("reverse", temperature=2.0), Divergence("jensen_shannon", beta=0.3))
"""Needs of an objective that compares with a teacher."""

TERMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "logprobs": lambda logprobs: -logprobs,
    "entropy": lambda entropy: -0.1 * entropy,
    "values": lambda values: values**2,
    "logits": lambda logits: 0.01 * logits**2,
    "logsumexp": lambda logsumexp: 0.02 * logsumexp**2,
    "mean_logprob": lambda mean: -0.2 * mean,
    "log_sum_squares": lambda squares: 0.3 * squares**2,
    # unlike weights, so that the order of candidates counts
    f"{LOGPROBS_AT}:near": lambda logprobs: -(torch.tensor([0.5, 0.3, 0.2]).to(logprobs) * logprobs).sum(-1),
    f"{LOGPROBS_AT}:other": lambda logprobs: -logprobs[:, 0],
    f"{LOGPROBS_AT}:far": lambda logprobs: 0.1 * logprobs[:, 0] * logprobs[:, 1],
    **{comparison.need: lambda divergence: divergence + divergence**2 for comparison in DIVERGENCES},
    TOP_1_AGREEMENT: lambda agreement: 0.3 * agreement,
}
"""A score contributes so much per token."""


@frozen(eq=False)
class DefinedResult:
    """The result that a backend owes: the objective's value, gradients by parameter name, and scores of scored tokens by document.

    `definition` computes it. A proof's counterpart, of a batch with losses and reducers, is `proof.definition.BatchDefinition`; scores of both
    are those of `PlainModel`.
    """

    loss: float
    gradients: Arrays
    scores: Mapping[str, Mapping[int, npt.NDArray[Any]]]

    @property
    def logprobs(self) -> Mapping[int, npt.NDArray[Any]]:
        return self.scores["logprobs"]


def definition(
    directory: str,
    chosen: Sequence[Document],
    *,
    dtype: torch.dtype = torch.float64,
    temperature: float = 1.0,
    needs: Iterable[str] = ("logprobs", "entropy"),
    adapter: str | None = None,
    teacher: str | None = None,
    noise: bool = False,
) -> DefinedResult:
    """Compute `WeightedObjective` with the plain model, one document at a time. `teacher` is the directory of a model that is compared with.

    `adapter` is a PEFT directory: PEFT puts its adapters into the model, and only they and a value head get gradients. With `noise` the input
    embeddings have that of `define_noise`.
    """
    model = PlainModel.load(
        directory,
        dtype=dtype,
        value_head="values" in needs,
        images=chosen[0].pictures is not None,
        adapt=None if adapter is None else partial(with_adapter, adapter=adapter),
    )
    teacher_model = None if teacher is None else PlainModel.load(teacher, dtype=dtype)
    total, scores = plain_objective(model, chosen, temperature=temperature, needs=needs, teacher=teacher_model, noise=noise)
    torch.autograd.backward(total)
    gradients = {name: parameter.grad.numpy() for name, parameter in model.parameters.items() if parameter.grad is not None}
    return DefinedResult(total.item(), gradients, scores)


def plain_objective(
    model: PlainModel,
    chosen: Sequence[Document],
    *,
    temperature: float = 1.0,
    needs: Iterable[str] = ("logprobs", "entropy"),
    teacher: PlainModel | None = None,
    noise: bool = False,
) -> tuple[Tensor, dict[str, dict[int, npt.NDArray[Any]]]]:
    """Compute the objective of `WeightedObjective` one document at a time, and the scores of scored tokens by name and document."""
    total = torch.zeros(())
    scores_by_need: dict[str, dict[int, npt.NDArray[Any]]] = {need: {} for need in needs}
    for document in chosen:
        if len(document.ids) < 2:
            continue
        scores = model.scores(
            document.ids,
            temperature=temperature,
            candidates=candidates(document.ids[1:]),
            teacher=teacher,
            needs=needs,
            noise=partial(define_noise, document) if noise else None,
            **_pictures(document),
        )
        for need in needs:
            total = total + (document.weights[1:].to(scores[need]) * TERMS[need](scores[need])).sum()
            scores_by_need[need][document.number] = scores[need].detach().numpy()[document.weights[1:].numpy() != 0]
    return total, scores_by_need


def _pictures(document: Document) -> dict[str, Tensor]:
    """Return the image inputs of transformers' own model, which computes its own positions from them."""
    if document.pictures is None or not len(document.pictures.grids):
        return {}
    pictures = document.pictures
    return {TOKEN_TYPES: _types(document.ids[None]), PIXEL_VALUES: pictures.pixels, IMAGE_GRID: pictures.grids}


def find_worst_difference(gradients: Mapping[str, npt.NDArray[Any]], reference: Mapping[str, npt.NDArray[Any]]) -> float:
    """Return the worst parameter's ||g - g'|| / ||g'||, infinite where a number is not finite. Raises AssertionError where names differ."""
    assert gradients.keys() == reference.keys(), sorted(gradients.keys() ^ reference.keys())
    return max(relative_difference(gradients[name], true) for name, true in reference.items())
