"""Load a dataset split that a configuration names: tokenized, through the token cache, as sample columns."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from skyrl_engine.config.schema import DataConfig, KnownFormat
from skyrl_engine.contracts.values.bundles import Bundles, inseparable
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.contracts.values.source_names import SOURCE
from skyrl_engine.data.images.processor import NoVision, Vision, VisionInputs
from skyrl_engine.data.images.store import IMAGES, ImageStore, files_of, image_names
from skyrl_engine.data.images.tokens import digest_of_states, state_of_file
from skyrl_engine.data.sources.formats import Reading, gather_rows
from skyrl_engine.data.sources.locate import open_source
from skyrl_engine.data.sources.rows import BoolArray, Source
from skyrl_engine.data.table import arrow_arrays
from skyrl_engine.data.table.cache import TokenCache, cache_key
from skyrl_engine.data.table.filling import Progress, TableFilling
from skyrl_engine.data.table.sample_columns import ColumnReader, IdReader
from skyrl_engine.data.table.token_table import TokenTable
from skyrl_engine.data.text.template_rule import Rendering
from skyrl_engine.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "eval"]

_log = logging.getLogger(__name__)

_NO_VISION = NoVision()
_EVAL_STREAM = 0x6576616C  # keeps this use of the run's seed apart from its other uses


@frozen
class DataCounts:
    """Counts of rows and samples. `rows` were read; `samples` of them are kept, the others dropped for one of seven reasons. A row that holds a
    preference pair is two samples.

    `dropped_overlong` were longer than max_length, or lost every loss-carrying token when cut; `dropped_without_loss` had none from the start;
    `dropped_bad_rows` are rows that cannot be used; `dropped_bad_images` had an image that cannot be used; `dropped_with_unit` are of a unit
    of which another sample was dropped; `dropped_ties` are rows whose answers are all rated alike; `dropped_equal` are of pairs whose answers
    are equal once cut.
    `truncated` were cut and kept. `tokens` and `loss_tokens` are those of the
    kept samples, as are `boundary_tokens` (tokens across the start of a response), `images`, and `image_tokens`, which `tokens` counts too.
    `unprompted` are kept samples whose answer begins with the very first token, which cannot be predicted, so that it carries no loss.
    `unended` are kept texts and conversations whose last token with loss ends nothing, of a tokenizer without an end-of-text token.
    `unread_arguments` are tool calls whose arguments are a text that is no JSON object, which the template is given unchanged.
    `excluded_turns` are assistant turns of all rows whose own `weight` or `train` says that they carry no loss. `removed_reasoning` are rows
    whose chat template left out the reasoning of earlier turns. `from_cache` says that nothing had to be tokenized.
    """

    rows: int = 0
    samples: int = 0
    dropped_overlong: int = 0
    dropped_without_loss: int = 0
    dropped_bad_rows: int = 0
    dropped_bad_images: int = 0
    dropped_with_unit: int = 0
    dropped_ties: int = 0
    dropped_equal: int = 0
    truncated: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    boundary_tokens: int = 0
    unprompted: int = 0
    unended: int = 0
    unread_arguments: int = 0
    images: int = 0
    image_tokens: int = 0
    excluded_turns: int = 0
    removed_reasoning: int = 0
    from_cache: bool = False

    @property
    def dropped(self) -> int:
        return (
            self.dropped_overlong
            + self.dropped_without_loss
            + self.dropped_bad_rows
            + self.dropped_bad_images
            + self.dropped_with_unit
            + self.dropped_ties
            + self.dropped_equal
        )


@frozen(eq=False)
class TokenizedDataset:
    """`columns` view the memory-mapped cache file; `sample_values["row"]` int64[N] is each sample's row in the source. `rendering` says how
    the rows became tokens.

    Where samples have images, `columns.extras["images"]` names them (`data.image_store`), and `images` reads them. `columns.columns`
    holds what was asked for, and the ids are those of the rows, where they have any.
    """

    name: str
    format: KnownFormat
    columns: SampleColumns
    counts: DataCounts
    cache_file: Path
    source: Source
    rendering: Rendering
    images: ImageStore | None = None

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Return the names of its datasets, which `sample_values["source_number"]` numbers; none where it is one."""
        return tuple(name for name, _ in self.source.datasets)

    def name_of(self, sample: int) -> str:
        """Name a sample (position) for an error, with the file and line that it is from. Reads the source up to that row."""
        chosen_rows = np.zeros(len(self.source), dtype=np.bool_)
        chosen_rows[int(self.columns.sample_values["row"][sample])] = True
        return next(self.source.rows(chosen_rows)).name

    def take(self, samples: npt.ArrayLike) -> SampleColumns:
        """Return the chosen samples (positions) in the chosen order, images not read; of one that is chosen twice the copies have ids of
        their own.
        """
        return separate_copies(self.columns.take(samples), np.asarray(samples, dtype=np.int64))

    def batch(self, samples: npt.ArrayLike) -> SampleColumns:
        """Return the samples of `take` with their images read: all that a step needs. Raises ImageError."""
        columns = self.take(samples)
        return columns if self.images is None else self.images.load_images(columns)


def separate_copies(columns: SampleColumns, chosen: IntArray) -> SampleColumns:
    """Return the columns with new ids for the second and further copies of a sample; `chosen` int64[N] says which sample each is.

    A copy of a unit is a unit of its own, and a copy of a group a group.
    """
    order = np.argsort(chosen, kind="stable")
    repeats = np.diff(chosen[order], prepend=chosen[order[:1]] - 1) == 0
    if not repeats.any():
        return columns
    starts = np.flatnonzero(~repeats)
    copy = np.empty_like(chosen)
    copy[order] = np.arange(len(chosen)) - np.repeat(starts, np.diff(np.append(starts, len(chosen))))

    def renumber(ids: IntArray) -> IntArray:
        pairs, inverse = np.unique(np.stack([copy, ids]), axis=1, return_inverse=True)
        numbers = pairs[1].copy()
        later = np.flatnonzero(pairs[0] > 0)
        free = np.setdiff1d(np.arange(len(ids) + len(later), dtype=np.int64), ids)
        numbers[later] = free[: len(later)]
        return np.asarray(numbers[inverse.reshape(-1)], dtype=np.int64)

    return evolve(
        columns,
        sample_ids=renumber(columns.sample_ids),
        group_ids=renumber(columns.group_ids),
        unit_ids=renumber(columns.unit_ids),
        trajectory_ids=renumber(columns.trajectory_ids),
    )


def load_columns(
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    split: Split,
    seed: int = 0,
    needed: Mapping[str, str] = MappingProxyType({}),
    vision: Vision = _NO_VISION,
    progress: Progress | None = None,
    reading: Reading = "samples",
    step_separator: str = "\n",
) -> TokenizedDataset:
    """Load the training or the evaluation samples of a configuration.

    Evaluation samples come from `data.eval`, or else are the part `data.eval_fraction` of `data.train` chosen by `seed`, which training then
    leaves out; rows that share a group or a unit stay on one side. `data.max_samples` keeps the first rows of a source, before that.
    Of further columns those in `data.columns` are read and those in `needed`, which says of each who asks for it ("loss ppo needs").
    `reading` "preferences" makes of a pair two samples of a unit, every sample with a role; "rewards" also puts a token after each, the
    only one that carries loss, before which a model has read all of the text; "steps" puts `step_separator` after each step of an answer, and
    loss on the token after it, with the column "step_label".
    `vision` looks at images, which are named here and read by `TokenizedDataset.batch`. `progress(label, done, total)` is called with rows.
    Raises DataError, naming the sample and its file and line, ModelError where the tokenizer has no chat template, and UnsupportedError for
    images that `vision` does not take.
    """
    source = open_source_of(data, split)
    if reading in ("preferences", "rewards"):
        source = gather_rows(data.format, source, data.rating)
    reader = ColumnReader({**dict.fromkeys(data.columns, "data.columns names"), **needed})
    wanted = _select_split_rows(data, source, split, seed)
    cache = TokenCache.of(data.cache)
    images = _image_settings(vision, source)
    rows = np.packbits(wanted).tobytes()
    key = cache_key(source.digest, rows, tokenizer, data, reader.needed, images, reading=reading, step_separator=step_separator)
    label = f"tokenizing {'training' if split == 'train' else 'evaluation'} data"
    table = cache.read(key, lambda table: _are_images_unchanged(table, source))
    cached = table is not None
    if table is None:
        filling = TableFilling(source, wanted, data, reader, tokenizer, vision, label, progress, reading, step_separator)
        table = cache.write(key, filling)
    counts = evolve(DataCounts(**table.info["counts"]), from_cache=cached)
    if not counts.samples:
        raise DataError(
            f"no sample of {source.name} is left: of {counts.rows} rows {counts.dropped_overlong} were over-long and "
            f"{counts.dropped_without_loss} had no token that carries loss"
            + (f", {counts.dropped_bad_rows} could not be used" if counts.dropped_bad_rows else "")
            + (f", {counts.dropped_bad_images} had bad images" if counts.dropped_bad_images else "")
            + (f", {counts.dropped_with_unit} lost another of their unit" if counts.dropped_with_unit else "")
            + (f", {counts.dropped_ties} have answers that are all rated alike" if counts.dropped_ties else "")
            + (f", {counts.dropped_equal} are of pairs whose answers are equal once cut" if counts.dropped_equal else ""),
            remedy="Raise data.max_length, or correct the dataset",
            details=table.info["bad_rows"],
        )
    kind: KnownFormat = table.info["format"]
    warn_of_rows(data, counts, source.name, table.info["unread"])
    warn_of_bad_rows(counts.dropped_bad_rows, counts.rows, source.name, table.info["bad_rows"])
    store = None
    if table.images is not None:
        assert isinstance(vision, VisionInputs), "a table of images was made with what makes them"
        store = ImageStore(source, kind, table.images.written, vision, data.rating)
    rendering = Rendering(**table.info["rendering"])
    return TokenizedDataset(
        source.name, kind, label_samples(table, _number_datasets(table, source)), counts, table.path, source, rendering, store
    )


def warn_of_bad_rows(count: int, rows: int, name: str, examples: Sequence[str]) -> None:
    """Warn that `count` of `rows` rows of a source are left out, for reasons such as `examples`; without one say nothing."""
    if count:
        _log.warning(
            '%s of %s rows of %s cannot be used and are left out (data.bad_rows = "drop"), the first of them: %s',
            count,
            rows,
            name,
            examples[0],
        )


def warn_of_rows(data: DataConfig, counts: DataCounts, name: str, unread: Mapping[str, int]) -> None:
    """Warn of what rows may not mean: answers that are cut, begin or end strangely, and columns that are not read, with the rows of each."""
    if counts.removed_reasoning:
        _log.warning(
            "the chat template leaves out the reasoning of earlier turns in %s of %s rows of %s; with data.loss_on = all, these turns "
            "train without it",
            counts.removed_reasoning,
            counts.rows,
            name,
        )
    if counts.dropped_equal:
        _log.warning(
            "%s pairs of %s are left out: cut to data.max_length = %s tokens, their two answers are equal; raise it to train on them",
            counts.dropped_equal // 2,
            name,
            data.max_length,
        )
    if counts.unprompted:
        _log.warning(
            "%s of %s samples of %s have an empty prompt, and the tokenizer puts no token before a text: nothing stands before the first token "
            "of their answers, which is not trained on; give these rows a prompt, or use a tokenizer that begins texts with a token",
            counts.unprompted,
            counts.samples,
            name,
        )
    if counts.unended:
        _log.warning(
            "the tokenizer has no end-of-text token (eos_token), and %s of %s samples of %s end without another special token: nothing teaches "
            "the model to stop; set the eos_token of the tokenizer that model.tokenizer names",
            counts.unended,
            counts.samples,
            name,
        )
    if counts.unread_arguments:
        _log.warning(
            "the arguments of %s tool calls of %s are texts that are no JSON object: the chat template writes them as it writes a text; "
            "correct them, or store objects",
            counts.unread_arguments,
            name,
        )
    _warn_of_unread(unread, counts.rows, name)


_READ_BY: Mapping[str, str] = {
    "margin": "the loss bradley_terry reads margin with loss.margins = true",
    "label": 'trainer = "preference" with the preset kto learns from label',
    "kto_tag": 'trainer = "preference" with the preset kto learns from kto_tag',
    "chosen": 'trainer = "preference" learns from chosen and rejected',
    "videos": "videos are not trained on",
    "audios": "audios are not trained on",
    "helpfulness": 'trainer = "preference" makes pairs of answers by helpfulness',
}
"""Who reads a column that this run does not read."""


def _warn_of_unread(unread: Mapping[str, int], rows: int, name: str) -> None:
    """Warn of columns that mean something in a known format and were not read, each with the number of rows that have it."""
    if not unread:
        return
    columns = ", ".join(
        f"{column!r}" + ("" if count == rows else f" ({count} of {rows} rows)") for column, count in sorted(unread.items())
    )
    readers = "".join(f"; {_READ_BY[column]}" for column in sorted(unread) if column in _READ_BY)
    _log.warning(
        "%s has columns that are not read: %s%s; name another one in data.map, or remove what you do not want",
        name,
        columns,
        readers,
    )


def open_source_of(data: DataConfig, split: Split) -> Source:
    """Open the source that a split of the configuration is taken from. Raises DataError."""
    if split == "eval" and data.eval is not None:
        own_file = isinstance(data.eval, str) and Path(data.eval).expanduser().is_file()  # while the training data has subsets
        return open_source(data.eval, split=data.eval_split, subset=None if own_file else data.subset, names=data.map)
    if split == "eval" and not data.eval_fraction:
        raise DataError(
            "there is no evaluation data: neither data.eval nor data.eval_fraction is set",
            remedy="Set one of them, or do not evaluate",
        )
    return open_source(data.train, split=data.train_split, subset=data.subset, names=data.map, streaming=data.streaming)


def _select_split_rows(data: DataConfig, source: Source, split: Split, seed: int) -> BoolArray:
    """Return bool[rows]: the rows of the source that belong to the split."""
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
    bundles = _bundles(source, count)
    if len(bundles) < 2:
        raise DataError(
            f"all samples of {source.name} belong together, so data.eval_fraction can hold none out", remedy="Set data.eval"
        )
    held_out = min(max(round(count * data.eval_fraction), 1), count - 1)
    order = np.random.default_rng([seed, _EVAL_STREAM]).permutation(len(bundles))
    taken = int(np.searchsorted(np.cumsum(bundles.sizes[order]), held_out)) + 1
    taken = min(taken, len(bundles) - 1)
    wanted[bundles.members.take(order[:taken] if split == "eval" else order[taken:]).values] = True
    return wanted


def _bundles(source: Source, count: int) -> Bundles:
    """Return bundles of the first `count` rows that must stay together. Rows are read only where the first one has group or unit ids."""
    everything = np.arange(count, dtype=np.int64)
    first_rows = np.arange(len(source)) < count
    read = IdReader(next(source.rows(first_rows)))
    names = [name for name in read.names if name != "sample_ids"]
    if not names:
        return Bundles.by_label(everything, everything)
    ids = [read(row) for row in source.rows(first_rows)]
    return Bundles.by_label(
        everything, inseparable(*(np.asarray([sample_ids[name] for sample_ids in ids], dtype=np.int64) for name in names))
    )


def label_samples(table: TokenTable, datasets: IntArray | None) -> SampleColumns:
    """Return a table's samples as columns, with the number of each one's dataset, int64[N]; None: all are of one."""
    extras = {} if table.images is None else {IMAGES: image_names(table.images)}
    own = table.sample_values
    columns = SampleColumns.from_arrow(
        table.batch, columns=table.action_columns, sample_values=["row", *own.values()], extras=extras
    )
    values = {"row": columns.sample_values["row"], **{name: columns.sample_values[stored] for name, stored in own.items()}}
    if datasets is not None:
        values[SOURCE] = datasets
    return evolve(columns, sample_values=values)


def _number_datasets(table: TokenTable, source: Source) -> IntArray | None:
    """int64[N]: the number of each sample's dataset, where the source is several."""
    return source.datasets_of(arrow_arrays.values_of(table.batch.column("row"))) if source.datasets else None


def _are_images_unchanged(table: TokenTable, source: Source) -> bool:
    """Return True where the image files, those of dropped samples included, are as they were when the table was made."""
    files = set(table.info["others"])
    if table.images is not None:
        files |= files_of(table.images, arrow_arrays.values_of(table.batch.column("row")), source)
    return digest_of_states({path: state_of_file(path) for path in files}) == str(table.info["files"])


def _image_settings(vision: Vision, source: Source) -> list[str]:
    """Return everything, other than the rows, that decides the tokens of images, for the cache key."""
    if isinstance(vision, NoVision):
        return []
    return [vision.identity(), *(str(part.folder.absolute()) for part in source.parts if part.folder is not None)]
