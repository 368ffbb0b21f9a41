"""Samples that a plan assumes by their lengths in the place of the training data, which is then not read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from skyrl_engine.contracts.kinds.loss import Loss, compares_pairs
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.data.dataset import DataCounts, TokenizedDataset
from skyrl_engine.data.sources.formats import Reading
from skyrl_engine.data.sources.rows import Source
from skyrl_engine.data.text.template_rule import Rendering
from skyrl_engine.errors import DataError
from skyrl_engine.registry.bound_plugin import BoundPlugin

MOST_TOKENS: Final = 2**30
"""Tokens of more samples than these would take gigabytes of the controller's memory."""


def assume_samples(
    lengths: Sequence[int], *, batch_size: int, longest: int | None, reading: Reading, losses: Sequence[BoundPlugin[Loss]]
) -> TokenizedDataset:
    """Return samples of so many tokens that share nothing; the lengths are repeated where they fill no mini-batch of `batch_size`.

    Every token is a response, but of a text that a reward model reads only the one after it. Where `losses` compare pairs, or rewards are
    learned, each two lengths that follow each other are those of a pair. Raises DataError for a length above `longest`, for a pair of which one
    length is missing, and for more tokens than the controller holds.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    pair = 2 if reading == "rewards" or any(compares_pairs(part.product) for part in losses) else 1
    if len(tokens) % pair:
        raise DataError(
            f"--lengths gives {len(tokens):,} lengths, and the answers of a pair are two",
            remedy="Write the lengths of both answers, prompts included, on two lines that follow each other",
        )
    if longest is not None and (most := int(tokens.max())) > longest:
        raise DataError(
            f"--lengths gives a sample of {most:,} tokens, and samples have at most {longest:,}",
            remedy="Write the lengths of samples that are cut to data.max_length, or raise it as far as the model allows",
        )
    tokens = np.resize(tokens, max(len(tokens), -(-batch_size // pair) * pair))
    if (total := int(tokens.sum())) > MOST_TOKENS:
        raise DataError(
            f"--lengths gives {total:,} tokens in all, and a plan takes up to {MOST_TOKENS:,}",
            remedy="Write a part of the lengths: those of a random part of the samples, and the longest one",
        )
    count, offsets = len(tokens), offsets_of(tokens)
    ids = np.zeros(total, dtype=np.int32)
    # so that no two samples begin alike, and none shares its tokens with another
    ids[offsets[:-1]] = np.arange(count)
    columns = SampleColumns.create(
        input_ids=ids,
        token_offsets=offsets,
        action_offsets=np.arange(count + 1, dtype=np.int64) if reading == "rewards" else offsets,
        unit_ids=np.arange(count, dtype=np.int64) // pair,
    )
    counts = DataCounts(rows=count // pair, samples=count, tokens=total, loss_tokens=int(columns.loss_weight.sum(dtype=np.int64)))
    return TokenizedDataset("--lengths", "tokens", columns, counts, Path(), Source("--lengths", ()), Rendering("tokens"))
