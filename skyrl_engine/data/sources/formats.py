"""Recognise a dataset's format by its columns (tokens, rollouts, chat, prompt and completion, alpaca, text, preferences), and turn rows into
examples.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Literal

from skyrl_engine.config.schema import DataFormat
from skyrl_engine.contracts.values.roles import CHOSEN, REJECTED, ROLE
from skyrl_engine.data.sources.preferences import LABEL, judged, pair_of
from skyrl_engine.data.sources.ratings import ASKED, COMPLETIONS, rated_pair
from skyrl_engine.data.sources.ready_tokens import PROMPT_COLUMNS, RESPONSE_COLUMNS, Tokens, rollout_of, tokens_of
from skyrl_engine.data.sources.rows import Row, kind_of, listed
from skyrl_engine.data.text.messages import Conversation, conversation_of, image_columns, messages_of
from skyrl_engine.data.text.plain import PlainText
from skyrl_engine.errors import DataError

Example = Conversation | PlainText | Tokens
KnownFormat = Literal[
    "tokens", "rollouts", "messages", "prompt_completion", "alpaca", "text", "preference", "unpaired_preference", "ratings"
]
Reading = Literal["samples", "preferences", "rewards"]
"""A way to read rows: as samples, as preferences, or as preferences whose whole texts a reward model gives one number each."""

PAIRS: tuple[KnownFormat, ...] = ("preference", "ratings")
"""Formats whose rows are two samples each."""

PREFERENCES: tuple[KnownFormat, ...] = (*PAIRS, "unpaired_preference")
"""Formats whose samples have roles."""

# In the order in which they are tried. Each needs one column of every group.
_NEEDED: Mapping[KnownFormat, tuple[tuple[str, ...], ...]] = {
    "tokens": (("input_ids",), ("labels", "loss_mask", "num_actions")),
    "rollouts": (PROMPT_COLUMNS, RESPONSE_COLUMNS),
    "messages": (("messages", "conversations"),),
    "prompt_completion": (("prompt",), ("completion",)),
    "alpaca": (("instruction",), ("output",)),
    "text": (("text",),),
    "preference": (("chosen",), ("rejected",)),
    "unpaired_preference": (("prompt",), ("completion", "response"), (LABEL,)),
    "ratings": (ASKED, (COMPLETIONS,)),
}
# Tried where none of those fits, so that a row which one of them describes keeps its meaning.
_ALSO: Mapping[KnownFormat, tuple[tuple[str, ...], ...]] = {"prompt_completion": (("prompt",), ("response",))}


def detect(asked: DataFormat, first: Row, *, preferences: bool = False) -> KnownFormat:
    """Return the format of a dataset whose first row is `first`; where `preferences` are wanted, one of theirs, or ready tokens with roles.

    Raises DataError naming the columns it has and those that are needed.
    """
    have = list(first.values)
    if preferences and asked == "auto":
        of_tokens: tuple[KnownFormat, ...] = ("tokens", "rollouts") if ROLE in have else ()
        for name in (*PREFERENCES, *of_tokens):
            if _holds(_NEEDED[name], have):
                return name
        raise DataError(
            f"no format of preferences has the columns of the dataset: {listed(have)}",
            remedy=_suggestion(have, ["chosen", "rejected", "completion", LABEL])
            or 'Name them, for instance data.map.chosen="better" data.map.rejected="worse", or train on samples: trainer = "sft"',
            details=[f"format {name} needs {_described(name)}" for name in PREFERENCES],
        )
    if asked != "auto":
        if not _fits(asked, have):
            raise _missing(asked, first)
        return asked
    for table in (_NEEDED, _ALSO):
        for name, groups in table.items():
            if _holds(groups, have):
                return name
    known = [column for groups in _NEEDED.values() for group in groups for column in group]
    raise DataError(
        f"no known format has the columns of the dataset: {listed(have)}",
        remedy=_suggestion(have, known)
        or 'Name them, for instance data.map.prompt="question" data.map.completion="answer", or convert the dataset',
        details=[f"format {name} needs {_described(name)}" for name in _NEEDED],
    )


def to_example(row: Row, kind: KnownFormat, *, has_template: bool) -> Example:
    """Return the row as an example. Raises DataError naming the row and the column, also for images in a format without messages."""
    if not _fits(kind, list(row.values)):
        raise _missing(kind, row)
    example = _example(row, kind, has_template=has_template)
    if not isinstance(example, Conversation) and (columns := image_columns(row)):
        raise row.wrong(
            next(iter(columns)),
            f"it holds images, and format {kind!r} has no place for them",
            "Store messages with a part of type image for each, or remove the column to train on the rest",
        )
    return example


def to_examples(row: Row, kind: KnownFormat, *, has_template: bool, rating: str) -> list[tuple[Example, int | None]]:
    """Return the examples of a row: one without a role, or of a preference each with its role (0 chosen, 1 rejected).

    `rating` names the number by which answers are rated; there is no example where all are rated alike. Raises DataError as `to_example` does.
    """
    if kind not in PREFERENCES:
        return [(to_example(row, kind, has_template=has_template), None)]
    if not _fits(kind, list(row.values)):
        raise _missing(kind, row)
    if columns := image_columns(row):
        raise row.wrong(next(iter(columns)), "it holds images, and preferences over images are not trained", "Remove the column")
    if kind in PAIRS:
        pair = (
            pair_of(row, has_template=has_template) if kind == "preference" else rated_pair(row, rating, has_template=has_template)
        )
        return [(half, role) for role, half in enumerate(pair or ())]
    answer, wanted = judged(row, _prompt_completion(row))
    return [(answer, CHOSEN if wanted else REJECTED)]


def _example(row: Row, kind: KnownFormat, *, has_template: bool) -> Example:
    if kind == "messages":
        column = "messages" if row.values.get("messages") is not None else "conversations"
        return conversation_of(row, messages_of(row, column))
    if kind == "prompt_completion":
        return _prompt_completion(row)
    if kind == "alpaca":
        return _alpaca(row, has_template=has_template)
    if kind == "text":
        return PlainText(_string(row, "text"))
    assert kind not in PREFERENCES, "a preference is not one example"
    return rollout_of(row) if kind == "rollouts" else tokens_of(row)


def _fits(name: KnownFormat, columns: Sequence[str]) -> bool:
    return any(name in table and _holds(table[name], columns) for table in (_NEEDED, _ALSO))


def _holds(groups: Sequence[Sequence[str]], columns: Sequence[str]) -> bool:
    return all(any(column in columns for column in group) for group in groups)


def _missing(name: KnownFormat, row: Row) -> DataError:
    have = list(row.values)
    lacking = next(group for group in _NEEDED[name] if not any(column in have for column in group))
    return DataError(
        f"{row.name} has no column {' or '.join(map(repr, lacking))}, which format {name!r} needs; it has {listed(have)}",
        remedy=_suggestion(have, lacking) or f"Add the column, or set data.format to another of {', '.join(_NEEDED)}",
    )


def _described(name: KnownFormat) -> str:
    words = " and ".join(" or ".join(group) for group in _NEEDED[name])
    also = [" and ".join(" or ".join(group) for group in table) for table in (_ALSO.get(name),) if table is not None]
    return ", or ".join([words, *also])


def _suggestion(have: Sequence[str], wanted: Sequence[str]) -> str | None:
    for column in have:
        near = get_close_matches(column, wanted, n=1, cutoff=0.7)
        if near and column not in wanted:
            return f"Did you mean {near[0]!r} instead of {column!r}?"
    return None


def _string(row: Row, column: str) -> str:
    value = row.values.get(column)
    if not isinstance(value, str):
        raise row.wrong(column, f"a string is needed, not {kind_of(value)}", "Store text in this column")
    return value


def _prompt_completion(row: Row) -> Example:
    column = "completion" if row.values.get("completion") is not None or "response" not in row.values else "response"
    prompt, completion = row.values.get("prompt"), row.values.get(column)
    if isinstance(prompt, str) != isinstance(completion, str):
        raise row.wrong(
            column,
            f"it is {kind_of(completion)} while the prompt is {kind_of(prompt)}",
            "Store both as text, or both as lists of messages",
        )
    if isinstance(prompt, str):
        return PlainText(prompt + _string(row, column), len(prompt))
    before = messages_of(row, "prompt")
    return conversation_of(row, [*before, *messages_of(row, column)], first_reply=len(before))


def _alpaca(row: Row, *, has_template: bool) -> Example:
    """Return a chat of two messages where the tokenizer has a template, else plain text in sections with headings."""
    instruction, output = _string(row, "instruction"), _string(row, "output")
    context = _string(row, "input") if row.values.get("input") is not None else ""
    if has_template:
        request = f"{instruction}\n\n{context}" if context else instruction
        return conversation_of(row, [{"role": "user", "content": request}, {"role": "assistant", "content": output}])
    section = f"### Input:\n{context}\n\n" if context else ""
    prompt = f"### Instruction:\n{instruction}\n\n{section}### Response:\n"
    return PlainText(prompt + output, len(prompt))
