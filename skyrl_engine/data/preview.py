"""A look at a tokenized dataset before training: tokens, which of them carry loss, lengths, and what padding would cost."""

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from skyrl_engine.config.schema import KnownFormat
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.pairs import roles_in
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray
from skyrl_engine.data.dataset import DataCounts, TokenizedDataset
from skyrl_engine.data.sources.formats import FORMATS
from skyrl_engine.data.sources.preferences import HALVES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_NO_CHARACTER = "\ufffd"
"""Decoding writes this for a part of a character."""
_TOKENS_OF_A_CHARACTER = 12
"""Most tokens that are looked at together: three characters of four bytes each, whose bytes tokens may share."""


@frozen
class TokenPreview:
    """One token as text; or an image, whose `count` tokens are all `id`, in one piece.

    A character that several tokens make is the text of the last of them, and those before it have none.
    """

    id: int
    text: str
    loss: bool
    count: int = 1


@frozen
class SamplePreview:
    """One sample; `row` is its number in the source, `role` which half of a preference it is ("chosen", "rejected"), None where it is none."""

    row: int
    tokens: tuple[TokenPreview, ...]
    response_tokens: int
    role: str | None = None

    @property
    def length(self) -> int:
        """Return the length in tokens, those of its images included."""
        return sum(token.count for token in self.tokens)


@frozen
class Bin:
    """`samples` have between `low` and `high` tokens, both included."""

    low: int
    high: int
    samples: int


@frozen
class ColumnPreview:
    """A column's values on the tokens that carry loss, of which each has `per_token`."""

    name: str
    low: float
    mean: float
    high: float
    per_token: int = 1


@frozen
class Preview:
    """`written` says if a chat template wrote the rows, `columns` are the further columns, `groups` how many groups the samples form
    (None: their rows have no group ids).

    `padding_share` is the part of all token places that would be padding if batches of `batch_size` samples, in the dataset's order, were
    padded to their longest; `padding_share_sorted` the same for batches of samples of like length.
    """

    name: str
    format: KnownFormat
    written: str
    counts: DataCounts
    samples: tuple[SamplePreview, ...]
    histogram: tuple[Bin, ...]
    shortest: int
    median: float
    longest: int
    batch_size: int
    padding_share: float
    padding_share_sorted: float
    columns: tuple[ColumnPreview, ...] = ()
    groups: int | None = None


def preview(
    dataset: TokenizedDataset, tokenizer: "PreTrainedTokenizerBase", *, samples: int = 3, batch_size: int = 32, bins: int = 10
) -> Preview:
    """Show the first `samples` samples token by token, of pairs both halves, and lengths and counts of all of them."""
    if FORMATS[dataset.format].gives == "pair":
        samples *= 2
    lengths = np.diff(dataset.columns.token_offsets)
    return Preview(
        name=dataset.name,
        format=dataset.format,
        written=str(dataset.rendering),
        counts=dataset.counts,
        samples=tuple(_sample(dataset, tokenizer, position) for position in range(min(samples, len(dataset)))),
        histogram=_histogram(lengths, bins),
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        longest=int(lengths.max()),
        batch_size=batch_size,
        padding_share=padding_share(lengths, batch_size),
        padding_share_sorted=padding_share(np.sort(lengths), batch_size),
        columns=tuple(_column(dataset.columns, name) for name in sorted(dataset.columns.columns)),
        groups=len(np.unique(dataset.columns.group_ids)) if dataset.columns.grouped else None,
    )


def _column(columns: SampleColumns, name: str) -> ColumnPreview:
    values = columns.columns[name][columns.loss_weight != 0].astype(np.float64)
    per_token = 1 if values.ndim == 1 else values.shape[1]
    return ColumnPreview(name, float(values.min()), float(values.mean()), float(values.max()), per_token)


def padding_share(lengths: IntArray, batch_size: int) -> float:
    """Return the share of padding when consecutive batches of samples, lengths int64[N], are each padded to their longest."""
    starts = np.arange(0, len(lengths), batch_size)
    sizes = np.diff(np.append(starts, len(lengths)))
    places = int((np.maximum.reduceat(lengths, starts) * sizes).sum()) if len(lengths) else 0
    return 1 - int(lengths.sum()) / places if places else 0.0


def _sample(dataset: TokenizedDataset, tokenizer: Any, position: int) -> SamplePreview:
    columns = dataset.columns
    ids = columns.input_ids[columns.token_offsets[position] : columns.token_offsets[position + 1]]
    weights = columns.loss_weight[columns.action_offsets[position] : columns.action_offsets[position + 1]]
    loss = np.zeros(len(ids), dtype=np.bool_)
    loss[len(ids) - len(weights) :] = weights != 0
    pieces = _pieces(dataset, position, ids)
    starts = np.cumsum([count for count, _ in pieces]) - [count for count, _ in pieces]
    texts = token_texts(tokenizer, [int(ids[start]) for start in starts], [image for _, image in pieces])
    tokens = tuple(
        TokenPreview(int(ids[start]), text, bool(loss[start]), count)
        for start, (count, _), text in zip(starts.tolist(), pieces, texts, strict=True)
    )
    roles = roles_in(columns.sample_values)
    role = None if roles is None else HALVES[int(roles[position])]
    return SamplePreview(int(columns.sample_values["row"][position]), tokens, len(weights), role)


def first_prompt(dataset: TokenizedDataset, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Return the tokens before the first one that carries loss, of the first sample, as pieces of text.

    A sample that a reward model reads carries loss only after its text: of these, the tokens that both halves of the first pair begin with.
    """
    if not len(dataset):
        return ()
    tokens = _sample(dataset, tokenizer, 0).tokens
    if dataset.columns.action_offsets[1] == 1 and FORMATS[dataset.format].gives == "pair":
        other = _sample(dataset, tokenizer, 1).tokens
        common = next((place for place, (a, b) in enumerate(zip(tokens, other, strict=False)) if a.id != b.id), 0)
        return tuple(token.text for token in tokens[:common])
    return tuple(token.text for token in takewhile(lambda token: not token.loss, tokens))


def show_boundaries(pieces: Sequence[str]) -> str:
    """Return pieces of a text in one line, with a bar where one token ends and the next begins."""
    return "|".join(pieces).replace("\n", "⏎")


def token_texts(tokenizer: Any, ids: Sequence[int], images: Sequence[str | None] | None = None) -> list[str]:
    """Return the text of every token, or what is shown for an image. Tokens that make a character together share its text, which the last of
    them has; of a character that is cut in two, the number of each token is shown.
    """
    images = [None] * len(ids) if images is None else images

    def decode_range(start: int, stop: int) -> str:
        return str(tokenizer.decode(list(ids[start:stop]), clean_up_tokenization_spaces=False))

    texts: list[str] = []
    while (start := len(texts)) < len(ids):
        shown = images[start]
        if shown is not None:
            texts.append(shown)
            continue
        limit = next((stop for stop in range(start, len(ids)) if images[stop] is not None), len(ids))
        ends = range(start + 1, min(start + _TOKENS_OF_A_CHARACTER, limit) + 1)
        whole = next(((stop, text) for stop in ends if _NO_CHARACTER not in (text := decode_range(start, stop))), None)
        if whole is None:
            texts.append(f"<token {ids[start]}>")
        else:
            stop, text = whole
            texts += [*[""] * (stop - start - 1), text]
    return texts


def _pieces(dataset: TokenizedDataset, position: int, ids: AnyArray) -> list[tuple[int, str | None]]:
    """Cut the sample into single tokens and images: the number of tokens of each piece, and the text to show for an image."""
    store = dataset.images
    images = iter(() if store is None else store.spans(dataset.columns, position))
    pieces: list[tuple[int, str | None]] = []
    place, number = 0, 0
    while place < len(ids):
        count, shown = 1, None
        if store is not None and ids[place] == store.vision.image_token:
            count, width, height = next(images)
            number += 1
            shown = f"<image {number}: {count} tokens, {width}x{height}>"
        pieces.append((count, shown))
        place += count
    return pieces


def _histogram(lengths: IntArray, bins: int) -> tuple[Bin, ...]:
    """Return at most `bins` bins of equal width over the lengths, in whole tokens."""
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // bins))
    starts = range(low, high + 1, width)
    counts = np.bincount((lengths - low) // width, minlength=len(starts))
    return tuple(Bin(start, min(start + width - 1, high), int(count)) for start, count in zip(starts, counts, strict=True))
