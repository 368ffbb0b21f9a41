"""Fill a token table with the rows of a source: recognise their format, tokenize them, read their images, bound their length."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np
from attrs import asdict, define, evolve, field, frozen

from skyrl_engine.config.schema import DataConfig, KnownFormat
from skyrl_engine.contracts.kinds.needs import ROLE_NEED
from skyrl_engine.contracts.values.roles import ROLE
from skyrl_engine.data.images.processor import Vision
from skyrl_engine.data.images.tokens import ImageInspection, digest_of_states
from skyrl_engine.data.sources.formats import (
    FORMATS,
    Example,
    Reading,
    detect,
    list_known_columns,
    to_examples,
)
from skyrl_engine.data.sources.preferences import HALVES
from skyrl_engine.data.sources.ready_tokens import Tokens
from skyrl_engine.data.sources.rows import BoolArray, Row, Source, WatchedColumns
from skyrl_engine.data.sources.steps import Steps
from skyrl_engine.data.table.bad_rows import BadRows
from skyrl_engine.data.table.sample_columns import GROUP, UNIT, Carried, ColumnReader, IdReader, apply_row_weight
from skyrl_engine.data.table.token_table import TokenTableWriter
from skyrl_engine.data.text.messages import Conversation
from skyrl_engine.data.text.plain import PlainText
from skyrl_engine.data.text.reward_token import append_reward_token, read_after_steps
from skyrl_engine.data.text.template_rule import Kind, Rendering, uses_template
from skyrl_engine.data.text.tokenization import SampleTokenizer, TokenizedSample
from skyrl_engine.errors import DataError

Progress = Callable[[str, int, int], None]

STEP_LABEL = "step_label"
"""Column of rows of steps: 1 at the token that carries a right step's loss, 0 elsewhere."""

PROMPT = "prompt_number"
"""Name of the sample value that is equal for samples of preferences with one prompt; rows of tokens have none."""

_SAMPLES_PER_BATCH = 256


@frozen(eq=False)
class TableFilling:
    """Everything that turns the wanted rows of a source into samples of a table.

    A dataset of which none of the first rows can be used is refused, whatever is done about bad rows; not so a few rows of a stream, which are
    not the `whole` of it.
    """

    source: Source
    wanted: BoolArray
    data: DataConfig
    reader: ColumnReader
    tokenizer: Any
    vision: Vision
    label: str
    progress: Progress | None
    reading: Reading = "samples"
    step_separator: str = "\n"
    whole: bool = True

    def __call__(self, table: TokenTableWriter) -> dict[str, Any]:
        """Write the kept samples to `table`; return counts, format, rendering, the number of rows with each column that was not read, what is
        wrong with the first rows that were left out for it, a digest of the image files, and the image files of dropped samples.
        """
        total = int(np.count_nonzero(self.wanted))
        images = ImageInspection(self.vision, self.data.bad_images)
        bad = BadRows(self.source.name, self.data.bad_rows)
        writing: _RowWriting | None = None
        unread: Counter[str] = Counter()
        read = 0
        for batch in _batches(_watch_rows(self.source.rows(self.wanted, on_bad=bad.add))):
            writing = writing or self._recognise(batch, table, bad)
            if writing is not None:
                for row, members in self._samples(batch, writing, images):
                    writing.write(row, members)
                for row in batch:
                    assert isinstance(row.values, WatchedColumns), "they were watched when they were read"
                    unread.update(row.values.unread(list_known_columns(writing.kind)))
            read += len(batch)
            if self.whole and read == len(batch) and all(row.number in bad.numbers for row in batch):
                raise bad.first
            if self.progress is not None:
                self.progress(self.label, read, total)
        if self.whole and writing is None and bad.numbers:
            raise bad.first
        bad.raise_all(total)
        counts, files = Counter({"rows": total}), frozenset[str]()
        if writing is not None:
            files = frozenset(writing.finish())
            counts.update(writing.counts)
        counts.update({"dropped_bad_images": images.dropped, "dropped_bad_rows": bad.dropped_count})
        return {
            "counts": dict(counts),
            "format": None if writing is None else writing.kind,
            "rendering": asdict(self._rendering(set() if writing is None else writing.kinds)),
            "unread": dict(unread),
            "bad_rows": bad.examples,
            "files": digest_of_states(images.seen),
            "others": sorted(images.seen.keys() - files),
        }

    def _recognise(self, batch: Sequence[Row], table: TokenTableWriter, bad: BadRows) -> "_RowWriting | None":
        """Return what writes rows of the format of the first row that has one; None where none has."""
        for row in batch:
            kind = bad.attempt(row.number, partial(detect, self.data.format, row, reading=self.reading), where=row.name)
            if kind is not None:
                return _RowWriting(self, table, kind, self._reader(kind), IdReader(row), bad)
        return None

    def _reader(self, kind: KnownFormat) -> ColumnReader:
        """Return what reads further columns: rows of preferences say the role of a sample in their own way, and rows of steps their labels."""
        own = ROLE_NEED if FORMATS[kind].has_roles else STEP_LABEL if kind == "stepwise" else None
        return ColumnReader({need: asker for need, asker in self.reader.needed.items() if need != own})

    def _rendering(self, kinds: AbstractSet[Kind]) -> Rendering:
        """Describe how the rows became tokens; the rows of one dataset become them in one way."""
        order: tuple[Kind, ...] = ("chat", "raw", "tokens")
        kind = next((kind for kind in order if kind in kinds), order[-1])
        return Rendering.of(kind, self.tokenizer, self.data.template)

    def _samples(
        self, batch: Sequence[Row], writing: "_RowWriting", images: ImageInspection
    ) -> Iterator[tuple[Row, "Sequence[_Member]"]]:
        """Yield the rows with their samples, each with its role and its image tokens; without example or without sample where images cannot be
        used and such rows are dropped. A row whose answers are all rated alike has none, and neither has a bad one.
        """
        kind, bad = writing.kind, writing.bad
        good = [row for row in batch if row.number not in bad.numbers]
        read = [(row, bad.attempt(row.number, partial(images.attempt, partial(self._examples, row, kind)))) for row in good]
        flat = [(row, example, role) for row, examples in read for example, role in examples or ()]
        encoded = iter(self._encode([(row.number, _name(row, kind, role), example) for row, example, role in flat], writing))
        laying = iter(images.look([example for _, example, _ in flat]))
        for row, examples in read:
            members: list[_Member] = []
            for example, role in examples or ():
                sample, lay = next(encoded), next(laying)
                if row.number not in bad.numbers and sample is not None:
                    laid = bad.attempt(row.number, partial(self._lay_images, row, images, partial(lay, sample)))
                    members.append((example, role, laid))
            if FORMATS[kind].gives == "pair":
                halves = [sample for *_, sample in members if sample is not None]
                bad.attempt(row.number, partial(_refuse_equal_halves, row, halves))
            yield row, members if examples is not None or row.number in bad.numbers else [(None, None, None)]

    def _encode(self, examples: Sequence[tuple[int, str, Example]], writing: "_RowWriting") -> Iterator[TokenizedSample | None]:
        """Yield a sample for each example, None for those of a row that cannot be tokenized."""
        try:
            yield from writing.encode(examples)
        except DataError:
            # one of them is bad: row by row, since the halves of a pair are tokenized together
            for number, own in groupby(examples, key=itemgetter(0)):
                of_row = list(own)
                samples = writing.bad.attempt(number, partial(writing.encode, of_row))
                yield from [None] * len(of_row) if samples is None else samples

    def _lay_images(self, row: Row, images: ImageInspection, lay: Callable[[], TokenizedSample]) -> TokenizedSample | None:
        laid = images.attempt(lay)
        return None if laid is None else apply_row_weight(row, laid)

    def _examples(self, row: Row, kind: KnownFormat) -> list[tuple[Example, int | None]]:
        """Return the examples of a row with their roles. Raises DataError for messages where no chat template is to write anything."""
        has_template = uses_template(self.tokenizer, self.data.template)
        examples = to_examples(row, kind, has_template=has_template, rating=self.data.rating)
        prompts = [example.prompt if isinstance(example, Steps) else example for example, _ in examples]
        if self.data.template == "none" and any(isinstance(prompt, Conversation) for prompt in prompts):
            raise DataError(
                f'{row.name} holds messages, which a chat template writes, and data.template is "none"',
                remedy="Remove data.template, or store prompt and answer as texts",
            )
        return examples


_Member = tuple[Example | None, int | None, TokenizedSample | None]
"""A sample of a row: its example, its role, its tokens."""


@frozen(eq=False)
class _Taken:
    """Counts that a sample adds, and its image files."""

    counts: Mapping[str, int]
    files: AbstractSet[str]


class _Units:
    """Samples of one unit, such as a preference pair, are kept or dropped together: what is left of one says something else."""

    def __init__(self) -> None:
        self._whole: Counter[str] = Counter()
        self._files: set[str] = set()
        self._members: list[tuple[int, _Taken]] = []
        self._lost: set[int] = set()

    def take(self, ids: Mapping[str, int], sample: _Taken) -> None:
        if UNIT in ids:
            self._members.append((ids[UNIT], sample))
        else:
            self._whole.update(sample.counts)
            self._files |= sample.files

    def lose(self, ids: Mapping[str, int]) -> None:
        if UNIT in ids:
            self._lost.add(ids[UNIT])

    @property
    def kept(self) -> BoolArray:
        """bool[N]: for each sample that was taken, if no other of its unit was lost. Either every row has a unit or none has."""
        return np.array([unit not in self._lost for unit, _ in self._members], dtype=np.bool_)

    @property
    def broken(self) -> bool:
        return any(unit in self._lost for unit, _ in self._members)

    @property
    def counts(self) -> Mapping[str, int]:
        return sum((Counter(sample.counts) for unit, sample in self._members if unit not in self._lost), self._whole)

    @property
    def files(self) -> set[str]:
        return self._files.union(*(sample.files for unit, sample in self._members if unit not in self._lost))


@define(eq=False)
class _RowWriting:
    """The rows of one format on their way into a table, and what was counted of them."""

    filling: TableFilling
    table: TokenTableWriter
    kind: KnownFormat
    reader: ColumnReader
    ids: IdReader
    bad: BadRows
    encode: SampleTokenizer = field(init=False)
    counts: Counter[str] = field(factory=Counter, init=False)
    kinds: set[Kind] = field(factory=set, init=False)
    _units: _Units = field(factory=_Units, init=False)
    _prompts: dict[str, int] = field(factory=dict, init=False)
    _reachable: set[int] = field(factory=set, init=False)
    _ends: AbstractSet[int] | None = field(init=False)

    @encode.default
    def _make_tokenizer(self) -> SampleTokenizer:
        return SampleTokenizer(
            self.filling.tokenizer,
            loss_on=self.filling.data.loss_on,
            preferences=self.filling.reading in ("preferences", "rewards"),
            step_separator=self.filling.step_separator,
        )

    @_ends.default
    def _find_ends(self) -> AbstractSet[int] | None:
        return _ends(self.filling.tokenizer)

    @property
    def _rewards(self) -> bool:
        """Say whether a token that carries the reward follows each sample, or each of its steps."""
        return self.filling.reading in ("rewards", "steps")

    def write(self, row: Row, members: Sequence[_Member]) -> None:
        """Write the samples of a row that are kept, and count them. What is lost takes its unit along."""
        named = self.bad.attempt(row.number, partial(self.ids, row)) or {}
        if FORMATS[self.kind].has_roles:
            # a row's two samples are a unit; sample ids of rows would be doubled
            named = {name: value for name, value in named.items() if name == GROUP}
            named |= {UNIT: row.number} if FORMATS[self.kind].gives == "pair" else {}
        fitted = None
        if row.number not in self.bad.numbers:
            # a key of its own says what becomes of long samples
            fitted = self.bad.attempt(row.number, partial(self._fit, members), may_drop=False)
        if fitted is None:
            self._units.lose(named)
            return
        if not members:
            self.counts["dropped_ties"] += 1
        if FORMATS[self.kind].gives == "pair" and _are_equal([sample for sample, _ in filter(None, fitted)]):
            self.counts["dropped_equal"] += len(fitted)
            return
        self._refuse_unreachable_images(row, fitted)
        self.bad.attempt(row.number, partial(self._append, row, members, fitted, named))
        if row.number in self.bad.numbers:
            self._units.lose(named)

    def finish(self) -> AbstractSet[str]:
        """Count what is left of units, and take the rest out of the table; return the image files of the samples that are kept."""
        self.counts.update(self._units.counts)
        if self._units.broken:
            self.table.keep(self._units.kept)
            self.counts["dropped_with_unit"] = int(np.count_nonzero(~self._units.kept))
        return self._units.files

    def _fit(self, members: Sequence[_Member]) -> "list[_Fit | None]":
        return [
            None if whole is None else _fit_to_length(self.filling.data, whole, reserved=int(self._rewards))
            for *_, whole in members
        ]

    def _refuse_unreachable_images(self, row: Row, fitted: "Sequence[_Fit | None]") -> None:
        """Refuse images that no batch could read, once for each part of the source."""
        samples = [sample for sample, _ in filter(None, fitted) if sample is not None]
        if any(not image.written for sample in samples for image in sample.images):
            part = int(self.filling.source.parts_of(row.number))
            if part not in self._reachable:
                self.filling.source.row(row.number)
                self._reachable.add(part)

    def _append(self, row: Row, members: Sequence[_Member], fitted: "Sequence[_Fit | None]", named: Mapping[str, int]) -> None:
        for (example, role, whole), fit in zip(members, fitted, strict=True):
            self.kinds.add(_kind(example))
            if isinstance(example, Conversation):
                self.counts["excluded_turns"] += example.excluded
                self.counts["unread_arguments"] += example.unread_arguments
            if whole is None or fit is None:
                self._units.lose(named)
                continue
            self.counts["removed_reasoning"] += whole.removed_reasoning
            sample, reason = fit
            if sample is None:
                self.counts[reason] += 1
                self._units.lose(named)
                continue
            own = {} if role is None else {ROLE: role, PROMPT: self._prompts.setdefault(whole.prompt, len(self._prompts))}
            cut = len(sample.loss) < len(whole.loss)
            if self.filling.reading == "steps":
                sample = read_after_steps(sample, self.filling.tokenizer.pad_token_id)
            elif self._rewards:
                sample = append_reward_token(sample, self.filling.tokenizer.pad_token_id)
            read = self.reader(row, sample if self._rewards else whole, sample)
            if sample.step_labels is not None:
                read = {**read, STEP_LABEL: sample.step_labels[int(np.argmax(sample.loss)) :]}
            self.table.append(sample, Carried(read, named, {**self.reader.values(row), **own}))
            self._units.take(named, _Taken(self._count(example, whole, sample, cut=cut), _files(example)))

    def _count(self, example: Example | None, whole: TokenizedSample, sample: TokenizedSample, *, cut: bool) -> Mapping[str, int]:
        """Return what a kept sample adds to the counts, `whole` before it may have been cut and got a token for its reward."""
        # a text that is no answer to anything begins so by its nature
        is_answer = isinstance(example, PlainText) and FORMATS[self.kind].is_answer
        unprompted = is_answer and not self._rewards and bool(whole.loss[0])
        unended = (
            self._ends is not None and not self._rewards and not isinstance(example, Tokens) and _last(whole) not in self._ends
        )
        return _count_sample(sample, cut=cut, unprompted=unprompted, unended=unended)


def _watch_rows(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows with values that know what was read of them."""
    return (evolve(row, values=WatchedColumns(row.values)) for row in rows)


def _kind(example: Example | None) -> Kind:
    if isinstance(example, Steps):
        return _kind(example.prompt)
    return "raw" if isinstance(example, PlainText) else "chat" if isinstance(example, Conversation) else "tokens"


def _are_equal(halves: Sequence[TokenizedSample | None]) -> bool:
    """Return True for both halves of a pair, in equal tokens."""
    match halves:
        case [TokenizedSample(input_ids=chosen), TokenizedSample(input_ids=rejected)]:
            return np.array_equal(chosen, rejected)
        case _:
            return False


def _refuse_equal_halves(row: Row, halves: Sequence[TokenizedSample]) -> None:
    if _are_equal(halves):
        raise row.wrong("rejected", "its tokens are equal to the chosen answer's", "Leave the row out: it prefers nothing")


def _name(row: Row, kind: KnownFormat, role: int | None) -> str:
    return row.name if FORMATS[kind].gives != "pair" or role is None else f"{row.name}, {HALVES[role]}"


def _files(example: Example | None) -> set[str]:
    images = example.images if isinstance(example, Conversation) else ()
    return {str(image.path) for image in images if image.path is not None}


def _batches(rows: Iterator[Row]) -> Iterator[Sequence[Row]]:
    while batch := list(islice(rows, _SAMPLES_PER_BATCH)):
        yield batch


_Fit = tuple[TokenizedSample | None, str]
"""A sample that was cut to the longest length; or None, and the name of what counts it where it is dropped."""


def _fit_to_length(data: DataConfig, sample: TokenizedSample, *, reserved: int = 0) -> _Fit:
    """Cut the sample to `data.max_length`, or return None and the name of what counts it where it is dropped; the first token, which has no
    predecessor, loses its loss. `reserved` more tokens will follow it.
    """
    loss = sample.loss.copy()
    loss[:1] = False
    if not loss.any():
        return None, "dropped_without_loss"
    limit = None if data.max_length is None else data.max_length - reserved
    if limit is not None and len(loss) > limit:
        if data.overlong == "error":
            more = " and one for the reward" if reserved else ""
            raise DataError(
                f"{sample.name} has {len(loss)} tokens{more}, more than data.max_length = {data.max_length}",
                remedy="Raise data.max_length, or set data.overlong to drop or truncate",
            )
        loss = loss[:limit]
        if data.overlong == "drop" or sample.images or not loss.any():  # a cut would part an image from its tokens
            return None, "dropped_overlong"
    weights = None if sample.weights is None else np.where(loss, sample.weights[: len(loss)], np.float32(0))
    return evolve(sample, input_ids=sample.input_ids[: len(loss)], loss=loss, weights=weights), ""


def _ends(tokenizer: Any) -> AbstractSet[int] | None:
    """Return the tokens that may end a turn where the tokenizer has no end-of-text token; None where it has one."""
    return None if tokenizer.eos_token_id is not None else {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}


def _last(sample: TokenizedSample) -> int:
    """Return the last token that carries loss."""
    return int(sample.input_ids[np.flatnonzero(sample.loss)[-1]])


def _count_sample(sample: TokenizedSample, *, cut: bool, unprompted: bool, unended: bool) -> dict[str, int]:
    """Return what a kept sample adds to the counts; it may be cut, or have an answer without a token before it or an end."""
    return {
        "samples": 1,
        "truncated": int(cut),
        "tokens": len(sample.loss),
        "loss_tokens": int(np.count_nonzero(sample.loss)),
        "boundary_tokens": sample.boundary_tokens,
        "unprompted": int(unprompted),
        "unended": int(unended),
        "images": len(sample.images),
        "image_tokens": sample.image_tokens,
    }
