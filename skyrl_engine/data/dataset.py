"""A dataset split, tokenized: from the configuration to sample columns, through the token cache."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.ragged import Ragged, offsets_of
from skyrl_engine.data.cache import TokenCache, cache_key
from skyrl_engine.data.formats import KnownFormat, detect, to_example
from skyrl_engine.data.locate import open_source
from skyrl_engine.data.rows import BoolArray, Row, Source
from skyrl_engine.data.token_table import TokenTable, TokenTableWriter
from skyrl_engine.data.tokenization import SampleTokenizer, TokenizedSample
from skyrl_engine.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[str, int, int], None]
Split = Literal["train", "eval"]

_SAMPLES_PER_BATCH = 256
_EVAL_STREAM = 0x6576616C  # keeps this use of the run's seed apart from its other uses


@frozen
class DataCounts:
    """What became of the rows. `rows` were read; `samples` of them are kept, the others dropped for one of two reasons.

    `dropped_overlong` were longer than max_length, or lost every loss-carrying token when cut; `dropped_without_loss` had none from the start;
    `truncated` were cut and kept. `tokens` and `loss_tokens` are those of the kept samples, as are `boundary_tokens` (tokens across the start
    of a response) and `images` (references kept in the columns). `from_cache` says that nothing had to be tokenized.
    """

    rows: int = 0
    samples: int = 0
    dropped_overlong: int = 0
    dropped_without_loss: int = 0
    truncated: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    boundary_tokens: int = 0
    images: int = 0
    from_cache: bool = False

    @property
    def dropped(self) -> int:
        return self.dropped_overlong + self.dropped_without_loss


@frozen(eq=False)
class TokenizedDataset:
    """`columns` view the memory-mapped cache file; `sample_values["row"]` int64[N] is each sample's row in the source.

    Where samples have images, `columns.extras["images"]` holds their references, strings, ragged per sample.
    """

    name: str
    format: KnownFormat
    columns: SampleColumns
    counts: DataCounts
    cache_file: Path

    def __len__(self) -> int:
        return len(self.columns)


def load_columns(
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    split: Split,
    seed: int = 0,
    progress: Progress | None = None,
) -> TokenizedDataset:
    """The training or the evaluation samples of a configuration.

    Evaluation samples come from `data.eval`, or else are the part `data.eval_fraction` of `data.train` chosen by `seed`, which training then
    leaves out. `data.max_samples` keeps the first rows of a source, before that. `progress(label, done, total)` is called with rows.
    Raises DataError, naming the sample and its file and line, and ModelError where the tokenizer has no chat template.
    """
    source = open_source_of(data, split)
    wanted = _wanted_rows(data, source, split, seed)
    cache = TokenCache.of(data.cache)
    key = cache_key(source.digest, np.packbits(wanted).tobytes(), tokenizer, data)
    label = f"tokenizing {'training' if split == 'train' else 'evaluation'} data"
    table = cache.read(key)
    cached = table is not None
    if table is None:
        table = cache.write(
            key, lambda writer: _tokenize(writer, source, wanted, data=data, tokenizer=tokenizer, label=label, progress=progress)
        )
    counts = evolve(DataCounts(**table.info["counts"]), from_cache=cached)
    if not counts.samples:
        raise DataError(
            f"no sample of {source.name} is left: of {counts.rows} rows {counts.dropped_overlong} were over-long and "
            f"{counts.dropped_without_loss} had no token that carries loss",
            remedy="Raise data.max_length, or correct the dataset",
        )
    return TokenizedDataset(source.name, table.info["format"], _columns(table), counts, table.path)


def open_source_of(data: DataConfig, split: Split) -> Source:
    """The rows that a split of the configuration is taken from. Raises DataError."""
    if split == "eval" and data.eval is not None:
        own_file = Path(data.eval).expanduser().is_file()  # beside training data with subsets
        return open_source(data.eval, split=data.eval_split, subset=None if own_file else data.subset)
    if split == "eval" and not data.eval_fraction:
        raise DataError(
            "there is no evaluation data: neither data.eval nor data.eval_fraction is set",
            remedy="Set one of them, or do not evaluate",
        )
    return open_source(data.train, split=data.train_split, subset=data.subset)


def _wanted_rows(data: DataConfig, source: Source, split: Split, seed: int) -> BoolArray:
    """bool[rows]: the rows of the source that belong to the split."""
    total = len(source)
    if total == 0:
        raise DataError(f"the dataset {source.name} has no rows", remedy="Give it at least one sample")
    count = total if data.max_samples is None else min(total, data.max_samples)
    wanted = np.zeros(total, dtype=np.bool_)
    if data.eval is not None or not data.eval_fraction:
        wanted[:count] = True
        return wanted
    if count < 2:
        raise DataError(
            f"data.eval_fraction {data.eval_fraction} of one sample leaves nothing to train on", remedy="Use at least two samples"
        )
    held_out = min(max(round(count * data.eval_fraction), 1), count - 1)
    order = np.random.default_rng([seed, _EVAL_STREAM]).permutation(count)
    wanted[order[:held_out] if split == "eval" else order[held_out:]] = True
    return wanted


def _tokenize(
    table: TokenTableWriter,
    source: Source,
    wanted: BoolArray,
    *,
    data: DataConfig,
    tokenizer: Any,
    label: str,
    progress: Progress | None,
) -> dict[str, Any]:
    """Write the kept samples to `table`; the counts and the format."""
    total = int(np.count_nonzero(wanted))
    rows = source.rows(wanted)
    counts: Counter[str] = Counter()
    kind: KnownFormat | None = None
    encode = SampleTokenizer(tokenizer, all_turns=data.loss_on == "all")
    for batch in _batches(rows):
        kind = kind or detect(data.format, batch[0])
        known = kind
        has_template = bool(tokenizer.chat_template)
        examples = ((row.number, row.name, to_example(row, known, has_template=has_template)) for row in batch)
        for sample in encode(examples):
            fitted = _fitted(data, sample, counts)
            if fitted is not None:
                table.append(fitted)
        counts["rows"] += len(batch)
        if progress is not None:
            progress(label, counts["rows"], total)
    return {"counts": dict(counts), "format": kind}


def _batches(rows: Iterator[Row]) -> Iterator[Sequence[Row]]:
    while batch := list(islice(rows, _SAMPLES_PER_BATCH)):
        yield batch


def _fitted(data: DataConfig, sample: TokenizedSample, counts: Counter[str]) -> TokenizedSample | None:
    """The sample within `data.max_length`, or None if it is dropped; the first token, which has no predecessor, without loss."""
    loss = sample.loss.copy()
    loss[:1] = False
    if not loss.any():
        counts["dropped_without_loss"] += 1
        return None
    limit = data.max_length
    if limit is not None and len(loss) > limit:
        if data.overlong == "error":
            raise DataError(
                f"{sample.name} has {len(loss)} tokens, more than data.max_length = {limit}",
                remedy="Raise data.max_length, or set data.overlong to drop or truncate",
            )
        loss = loss[:limit]
        if data.overlong == "drop" or not loss.any():
            counts["dropped_overlong"] += 1
            return None
        counts["truncated"] += 1
    counts.update(
        samples=1,
        tokens=len(loss),
        loss_tokens=int(np.count_nonzero(loss)),
        boundary_tokens=sample.boundary_tokens,
        images=len(sample.images),
    )
    return evolve(sample, input_ids=sample.input_ids[: len(loss)], loss=loss)


def _columns(table: TokenTable) -> SampleColumns:
    images = table.images
    extras = {} if images is None else {"images": Ragged(images[0], offsets_of(images[1]))}
    return SampleColumns.from_arrow(table.batch, sample_values=["row"], extras=extras)
