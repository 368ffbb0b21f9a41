"""Tasks out of tables: the readers of training data, one task per row."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from attrs import Factory, field, frozen
from attrs.validators import ge, lt

from skyrl_engine.contracts.kinds.environment import Message, Split, Task
from skyrl_engine.contracts.values.model import PLACE
from skyrl_engine.data.sources.locate import open_source
from skyrl_engine.data.sources.rows import Row, join_names
from skyrl_engine.environments.prompts import PromptOptions
from skyrl_engine.errors import ColumnError, DataError

_SPLIT_STREAM = 0x7461736B
"""Keeps this use of a seed apart from others."""

_NAMES_KEY = "map"
"""The option that holds the data's own names of columns."""

_ROLES = ("system", "user", "assistant", "tool")
_IMAGES = ("images", "image")


@frozen
class TableOptions(PromptOptions):
    """Options of an environment whose tasks are rows: where they are read, and what is held out."""

    data: str | tuple[str, ...] = field(kw_only=True, metadata={PLACE: "path"})
    """Tasks: a file (JSON, JSONL, CSV, Parquet, Arrow), a folder of such files, or a hub id; or a list of them. A row has `prompt` (text or
    messages) or `messages`; every other column is the task's data."""

    eval_data: str | tuple[str, ...] | None = field(default=None, kw_only=True, metadata={PLACE: "path"})
    """Held-out tasks, given like `data`; none: see `eval_fraction`."""

    eval_fraction: float = field(default=0.0, kw_only=True, validator=[ge(0.0), lt(1.0)])
    """Share of `data` to hold out where `eval_data` is not set."""

    subset: str | None = field(default=None, kw_only=True)
    """Configuration of a hub dataset that has several."""

    train_split: str = field(default="train", kw_only=True)
    """Split of `data` to read, where it has splits."""

    eval_split: str = field(default="test", kw_only=True)
    """Split of `eval_data` to read, where it has splits."""

    map: Mapping[str, str] = field(default=Factory(dict), kw_only=True)
    """The data's own names of columns: `map.prompt = "question"` reads its column `question` as `prompt`."""

    split_seed: int = field(default=0, kw_only=True)
    """Seed that chooses the held-out tasks of `eval_fraction`."""


@frozen(eq=False, slots=False)
class TableTasks:
    """The rows of one split as tasks. Rows are read once, when the first is asked for, and checked all.

    A task's key is its row's column `key` or `id`, else the number of the row; those of `eval_data` have "eval/" before it.
    """

    options: TableOptions
    split: Split
    tools: Sequence[Mapping[str, Any]] = ()

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    @cached_property
    def _tasks(self) -> list[Task]:
        tasks = [self._task(row) for row in self._rows()]
        seen: dict[str, int] = {}
        for number, task in enumerate(tasks):
            if task.key in seen:
                raise DataError(
                    f"two tasks have the key {task.key!r}: number {seen[task.key] + 1} and number {number + 1} of {self.split}",
                    remedy="Give every row its own `key` (or `id`), or remove the column",
                )
            seen[task.key] = number
        return tasks

    def _rows(self) -> list[Row]:
        options = self.options
        if self.split == "eval" and options.eval_data is not None:
            own_file = isinstance(options.eval_data, str) and Path(options.eval_data).expanduser().is_file()
            subset = None if own_file else options.subset
            return self._read(options.eval_data, split=options.eval_split, subset=subset)
        rows = self._read(options.data, split=options.train_split, subset=options.subset)
        if options.eval_data is not None or not options.eval_fraction:
            return [] if self.split == "eval" else rows
        held_out = max(1, round(len(rows) * options.eval_fraction))
        order = np.random.default_rng([options.split_seed, _SPLIT_STREAM]).permutation(len(rows))
        chosen = np.sort(order[:held_out] if self.split == "eval" else order[held_out:])
        return [rows[int(number)] for number in chosen]

    def _read(self, location: str | tuple[str, ...], *, split: str, subset: str | None) -> list[Row]:
        return list(open_source(location, split=split, subset=subset, names=self.options.map, names_key=_NAMES_KEY).rows())

    def _task(self, row: Row) -> Task:
        values = {name: _plain(value) for name, value in row.values.items()}
        for name in _IMAGES:
            if values.get(name):
                raise DataError(
                    f"{row.name} has images, and tasks with images are not supported yet", remedy="Remove the column, or such rows"
                )
        prompt_columns = [name for name in ("prompt", "messages") if values.get(name) not in (None, "", [])]
        if len(prompt_columns) != 1:
            if prompt_columns:
                raise DataError(f"{row.name} has both prompt and messages", remedy="Give every row one of them")
            text = next((name for name, value in values.items() if isinstance(value, str) and value.strip()), "question")
            raise ColumnError(
                f"{row.name} has neither prompt nor messages; it has {join_names(values)}",
                remedy=f"Give every row one of them, or say which column is the prompt, for instance {_NAMES_KEY}.prompt={text}",
                key=_NAMES_KEY,
            )
        prompt = values.pop(prompt_columns[0])
        key = next((str(values[name]) for name in ("key", "id") if values.get(name) is not None), str(row.number))
        if self.split == "eval" and self.options.eval_data is not None:
            key = f"eval/{key}"
        tools = _tools(row, values.pop("tools", None)) or self.tools
        given = _prompt(row, prompt_columns[0], prompt)
        prompt_text = given if isinstance(given, str) else None
        return Task(key, self.options.messages(given), data=values, tools=tuple(tools), prompt_text=prompt_text)


def _prompt(row: Row, column: str, value: Any) -> str | list[Message]:
    if isinstance(value, str) and value.lstrip().startswith("[") and column == "messages":
        value = _parse_json(row, column, value)
    if isinstance(value, str):
        return value
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(message, dict) and "role" in message and "content" in message for message in value)
    ):
        raise row.wrong(column, "a text or a list of {role, content} objects is needed", "Store one of them")
    unknown = next((message["role"] for message in value if message["role"] not in _ROLES), None)
    if unknown is not None:
        raise row.wrong(column, f"a message has the role {unknown!r}", f"Give it one of {', '.join(_ROLES)}")
    if value[-1]["role"] == "assistant":
        raise row.wrong(column, "its last message is the assistant's, and the model is to speak next", "Remove that message")
    if any(not isinstance(message["content"], str) for message in value):
        raise row.wrong(column, "a message's content is not a text; images are not supported in tasks yet", "Store text")
    return value


def _tools(row: Row, value: Any) -> list[Mapping[str, Any]]:
    """Return a row's own tools, which many datasets store as text."""
    tools = _parse_json(row, "tools", value) if isinstance(value, str) and value.strip() else value or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise row.wrong(
            "tools", "a list of {type, function} objects is needed", "Store function schemas as chat templates take them"
        )
    return tools


def _parse_json(row: Row, column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise row.wrong(column, f"its text is no JSON: {error}", "Store a list, or a list as JSON") from error


def _plain(value: Any) -> Any:
    """Return a value of a table as JSON values; numbers that JSON does not have become null or text."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
