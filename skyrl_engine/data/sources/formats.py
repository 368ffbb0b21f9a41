"""The formats of datasets, one row each: the columns by which a format is known, those that it may have, and what makes examples of its rows.

They are those of TRL, axolotl, LLaMA-Factory and OpenRLHF, and of datasets that are often trained on.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Literal

from attrs import frozen

from skyrl_engine.config.schema import DataFormat, KnownFormat
from skyrl_engine.contracts.values.roles import CHOSEN, REJECTED, ROLE
from skyrl_engine.data.sources.names_to_give import KEY, as_keys, propose_names
from skyrl_engine.data.sources.preferences import ANSWERS, COLUMNS, LABELS, find_named_column, pair_of, read_labelled_answer
from skyrl_engine.data.sources.questions import (
    HISTORY,
    INSTRUCTIONS,
    MESSAGES,
    PASSAGES,
    PROMPTS,
    SYSTEM,
    answer,
    find_prompt,
    system_of,
    with_system,
)
from skyrl_engine.data.sources.ratings import (
    COMPARED,
    COMPLETIONS,
    OF_A_ROW,
    PREFERRED,
    gather_answers,
    pair_by_comparison,
    pair_by_rating,
)
from skyrl_engine.data.sources.ready_tokens import PROMPT_COLUMNS, RESPONSE_COLUMNS, Tokens, rollout_of, tokens_of
from skyrl_engine.data.sources.rows import Row, Source, join_names, kind_of
from skyrl_engine.data.sources.steps import STEPS, Steps, steps_of
from skyrl_engine.data.text.messages import Conversation, conversation_of, image_columns, messages_of
from skyrl_engine.data.text.plain import PlainText
from skyrl_engine.errors import ColumnError, DataError

Example = Conversation | PlainText | Tokens | Steps
Gives = Literal["sample", "pair", "judged answer"]
"""Content of a row: one sample, a chosen and a rejected one, or one answer with a label. The samples of the last two have roles."""

Reading = Literal["samples", "preferences", "rewards", "steps"]
"""A way to read rows: as samples, as preferences, as preferences whose whole texts a reward model gives one number each, or as answers of
several steps, each of which it gives one."""

Columns = tuple[tuple[str, ...], ...]
"""Groups of columns, of each of which a row has one."""


WithRole = tuple[Example, int | None]
"""An example and its role (0 chosen, 1 rejected; None: it has none)."""

Read = Callable[[Row, "ReadingRule"], Sequence[WithRole]]
"""Makes the examples of a row. Raises DataError naming the row and the column."""


@frozen
class ReadingRule:
    """The settings of a dataset that reading a row depends on: if there is a chat template, and the number that rates answers."""

    has_template: bool
    rating: str | None = None


@frozen
class Format:
    """One format. Its rows have one column of every group of `needs`, or, where no other format fits, of one of `also`.

    `further` are columns that its rows may have too, and that mean something. `gives` says what a row holds, `read` makes its examples; of a
    pair whose answers are rated alike there are none. `gather`, where preferences are read, makes of rows with one answer each rows of this
    format; of other rows it makes nothing. Rows of ready tokens are `of_tokens`, and those that answer nothing are not `is_answer`.
    """

    name: KnownFormat
    gives: Gives
    read: Read
    needs: Columns
    also: tuple[Columns, ...] = ()
    further: tuple[str, ...] = ()
    gather: Callable[[Source, str | None], Source] | None = None
    of_tokens: bool = False
    is_answer: bool = True

    @property
    def described(self) -> str:
        return ", or ".join(" and ".join(" or ".join(group) for group in groups) for groups in (self.needs, *self.also))

    @property
    def columns(self) -> frozenset[str]:
        """All columns that mean something in this format."""
        return frozenset(self.further).union(*(group for groups in (self.needs, *self.also) for group in groups))

    @property
    def has_roles(self) -> bool:
        """Say if its samples are preferences: chosen or rejected."""
        return self.gives != "sample"

    def fits(self, columns: Collection[str]) -> bool:
        """Say if rows with these columns can be read."""
        return any(_holds(groups, columns) for groups in (self.needs, *self.also))


def _read_sample(make: Callable[[Row], Example]) -> Read:
    return lambda row, _rule: [(make(row), None)]


def _read_sample_by_template(make: Callable[[Row, bool], Example]) -> Read:
    return lambda row, rule: [(make(row, rule.has_template), None)]


def _read_pair(make: Callable[[Row, ReadingRule], Sequence[Example] | None]) -> Read:
    return lambda row, rule: list(zip(make(row, rule) or (), (CHOSEN, REJECTED), strict=False))


def _read_judged_answer(row: Row, rule: ReadingRule) -> Sequence[WithRole]:
    example, is_wanted = read_labelled_answer(row, has_template=rule.has_template)
    return [(example, CHOSEN if is_wanted else REJECTED)]


def _of_messages(row: Row) -> Example:
    return conversation_of(row, with_system(row, system_of(row), messages_of(row, find_named_column(row, MESSAGES))))


_REPLIES: Final = ("completion", "response", "answer", "output", "generation", "summary", "message_2")


def _of_prompt_and_completion(row: Row, has_template: bool) -> Example:
    column = find_named_column(row, _REPLIES)
    if row.values.get(column) is None and column not in row.values:
        column = next(name for name in _REPLIES if name in row.values)
    prompt = find_prompt(row, ("prompt", "question", "input", "article", "message_1"))
    if prompt is None:
        raise row.wrong("prompt", f"a string is needed, not {kind_of(None)}", "Store text in this column")
    return answer(row, prompt, column, has_template=has_template)


def _of_alpaca(row: Row, has_template: bool) -> Example:
    """Return a chat where there is a template, else plain text in sections with headings."""
    prompt = find_prompt(row, INSTRUCTIONS)
    if prompt is None:
        raise row.wrong("instruction", f"a string is needed, not {kind_of(None)}", "Store text in this column")
    return answer(
        row, prompt, find_named_column(row, ("output", "response", "RESPONSE")), has_template=has_template, rounds_count=True
    )


def _of_text(row: Row) -> Example:
    value = row.values.get("text")
    if not isinstance(value, str):
        raise row.wrong("text", f"a string is needed, not {kind_of(value)}", "Store text in this column")
    return PlainText(value)


def _of_segments(row: Row) -> Example:
    """Return the text of segments that each say if they carry loss."""
    segments = row.values.get("segments")
    if not isinstance(segments, list | tuple) or not segments:
        raise row.wrong("segments", f"a list of segments is needed, not {kind_of(segments)}", "Store [{label, text}, ...]")
    text, spans = "", []
    for number, segment in enumerate(segments):
        own, label = (segment.get("text"), segment.get("label")) if isinstance(segment, Mapping) else (None, None)
        if not isinstance(own, str) or not isinstance(label, bool):
            raise row.wrong("segments", f"segment {number} has no text and no label of true or false", "Store {label, text}")
        if label and own:
            spans.append((len(text), len(text) + len(own)))
        text += own
    return PlainText(text, len(text), tuple(spans))


_BESIDE_PROMPTS: Final = (*SYSTEM, HISTORY, "input", "tools", "chat_template_kwargs", "images", "image", "videos", "audios")
"""Columns that rows with a prompt may have in addition to it."""

FORMATS: Final[dict[KnownFormat, Format]] = {
    row.name: row
    for row in (
        Format(
            "tokens",
            "sample",
            _read_sample(tokens_of),
            needs=(("input_ids",), ("labels", "loss_mask", "num_actions")),
            further=("attention_mask", "margin"),
            of_tokens=True,
        ),
        Format(
            "rollouts",
            "sample",
            _read_sample(rollout_of),
            needs=(PROMPT_COLUMNS, RESPONSE_COLUMNS),
            further=("loss_mask",),
            of_tokens=True,
        ),
        Format("messages", "sample", _read_sample(_of_messages), needs=(MESSAGES,), further=_BESIDE_PROMPTS),
        Format(
            "prompt_completion",
            "sample",
            _read_sample_by_template(_of_prompt_and_completion),
            needs=(("prompt",), ("completion",)),
            also=(
                (("prompt",), ("response", "generation")),
                (("question",), ("response", "answer")),
                (("input",), ("output",)),
                (("article",), ("summary",)),
                (("message_1",), ("message_2",)),
            ),
            further=(*_BESIDE_PROMPTS, *PASSAGES, "choices", "solution", "explanation"),
        ),
        Format(
            "alpaca",
            "sample",
            _read_sample_by_template(_of_alpaca),
            needs=(("instruction",), ("output",)),
            also=((("instruction",), ("response",)), (("INSTRUCTION",), ("RESPONSE",))),
            further=(*_BESIDE_PROMPTS, "reflection", "corrected"),
        ),
        Format("text", "sample", _read_sample(_of_text), needs=(("text",),), is_answer=False),
        Format("segments", "sample", _read_sample(_of_segments), needs=(("segments",),)),
        Format(
            "preference",
            "pair",
            _read_pair(lambda row, rule: pair_of(row, has_template=rule.has_template)),
            needs=COLUMNS,
            further=(*PROMPTS, *_BESIDE_PROMPTS, "margin"),
        ),
        Format(
            "unpaired_preference",
            "judged answer",
            _read_judged_answer,
            needs=(LABELS, (*ANSWERS, *MESSAGES)),
            further=(*PROMPTS, *_BESIDE_PROMPTS),
        ),
        Format(
            "ratings",
            "pair",
            _read_pair(lambda row, rule: pair_by_rating(row, rule.rating, has_template=rule.has_template)),
            needs=(("prompt", "instruction", "question", "input"), COMPLETIONS),
            further=(*_BESIDE_PROMPTS, OF_A_ROW),
            gather=gather_answers,
        ),
        Format(
            "comparison",
            "pair",
            _read_pair(lambda row, rule: pair_by_comparison(row, has_template=rule.has_template)),
            needs=(*COMPARED, PREFERRED),
            further=("prompt", "context", HISTORY),
        ),
        Format(
            "stepwise",
            "sample",
            _read_sample_by_template(steps_of),
            needs=tuple((name,) for name in STEPS),
            further=(*PROMPTS, *SYSTEM),
        ),
    )
}
"""The formats by name, in the order in which they are tried, so that a row which one of them describes keeps its meaning."""


def list_known_columns(kind: KnownFormat) -> frozenset[str]:
    """Return the columns that mean something in one of the formats: none of them is passed over without a word.

    Rows of ready tokens also have the texts that they were made of, so that there only the columns of ready tokens count.
    """
    only_tokens = FORMATS[kind].of_tokens
    return frozenset().union(*(row.columns for row in FORMATS.values() if row.of_tokens or not only_tokens))


def gather_rows(wanted: DataFormat, source: Source, rating: str | None) -> Source:
    """Return the source of preferences with rows of one answer each gathered to rows of a format, where it may be of one that does so."""
    for row in FORMATS.values():
        if row.gather is not None and wanted in ("auto", row.name):
            source = row.gather(source, rating)
    return source


def detect(wanted: DataFormat, first: Row, *, reading: Reading = "samples") -> KnownFormat:
    """Return the format of a dataset whose first row is `first`; where preferences are read, one of theirs, or ready tokens with roles.

    Raises DataError naming the columns it has and those that are needed.
    """
    have = list(first.values)
    if reading == "steps":
        if wanted in ("auto", "stepwise") and FORMATS["stepwise"].fits(have):
            return "stepwise"
        raise ColumnError(
            f"right and wrong steps are to be learned, and the dataset has the columns {join_names(have)}",
            remedy="Store prompt, completions and labels: the steps of an answer, and true or false for each",
            key=KEY,
        )
    if wanted == "stepwise" or (all(name in have for name in STEPS) and "human_ref_A" not in have):
        raise DataError(
            f"{first.name} is of stepwise supervision: it has a label for each of its {STEPS[0]}, and only process reward models learn from "
            "single steps",
            remedy='Set trainer = "reward_model" and reward_model.preset = "steps", or judge whole answers: store prompt, completion and one '
            "label a row",
        )
    preferences = reading != "samples"
    if preferences and wanted == "auto":
        with_roles = [row for row in FORMATS.values() if row.has_roles]
        for row in (*with_roles, *(row for row in FORMATS.values() if row.of_tokens and ROLE in have)):
            if _holds(row.needs, have):
                return row.name
        raise ColumnError(
            f"no format of preferences has the columns of the dataset: {join_names(have)}",
            remedy=_proposal(first, ["chosen", "rejected", "completion", *LABELS])
            or 'Name them, for instance data.map.chosen=better data.map.rejected=worse, or train on samples: trainer = "sft"',
            key=KEY,
            details=[f"format {row.name} needs {row.described}" for row in with_roles],
        )
    if wanted != "auto":
        if not FORMATS[wanted].fits(have):
            raise _missing(wanted, first)
        return wanted
    fitting = next((row.name for row in FORMATS.values() if _holds(row.needs, have)), None)
    fitting = fitting or next((row.name for row in FORMATS.values() if any(_holds(groups, have) for groups in row.also)), None)
    if fitting is not None:
        return fitting
    known = [column for row in FORMATS.values() for group in row.needs for column in group]
    raise ColumnError(
        f"no known format has the columns of the dataset: {join_names(have)}",
        remedy=_proposal(first, known)
        or "Name them, for instance data.map.prompt=question data.map.completion=answer, or convert the dataset",
        key=KEY,
        details=[f"format {row.name} needs {row.described}" for row in FORMATS.values()],
    )


def to_example(row: Row, kind: KnownFormat, *, has_template: bool) -> Example:
    """Return the one example of a row that is one sample. Raises as `to_examples` does."""
    ((example, role),) = to_examples(row, kind, has_template=has_template, rating=None)
    assert role is None, "a preference is not one example"
    return example


def to_examples(row: Row, kind: KnownFormat, *, has_template: bool, rating: str | None) -> list[WithRole]:
    """Return the examples of a row: one without a role, or of a preference each with its role (0 chosen, 1 rejected).

    `rating` names the number by which answers are rated; there is no example where all are rated alike. Raises DataError naming the row and the
    column, also for images in a format without messages.
    """
    row_of_table = FORMATS[kind]
    if not row_of_table.fits(row.values):
        raise _missing(kind, row)
    columns = image_columns(row)
    examples = list(row_of_table.read(row, ReadingRule(has_template, rating)))
    if columns and not all(isinstance(example, Conversation) for example, _ in examples):
        raise row.wrong(
            next(iter(columns)),
            f"it holds images, and format {kind!r} has no place for them",
            "Store messages with a part of type image for each, or remove the column to train on the rest",
        )
    return examples


def _holds(groups: Sequence[Sequence[str]], columns: Collection[str]) -> bool:
    return all(any(column in columns for column in group) for group in groups)


def _missing(name: KnownFormat, row: Row) -> DataError:
    have = list(row.values)
    lacking = next(group for group in FORMATS[name].needs if not any(column in have for column in group))
    return ColumnError(
        f"{row.name} has no column {' or '.join(map(repr, lacking))}, which format {name!r} needs; it has {join_names(have)}",
        remedy=_proposal(row, lacking) or f"Add the column, or set data.format to another of {', '.join(FORMATS)}",
        key=KEY,
    )


def _proposal(row: Row, wanted: Collection[str]) -> str | None:
    """Return a remedy that names the columns of the row; None where nothing suggests itself."""
    names = propose_names(row.values, wanted)
    return f"Name its columns: {as_keys(names)}" if names else None
