"""Read YAML text into plain values, with the line of every key.

Plain scalars follow the core schema of YAML 1.2 (section 10.3.2), not 1.1: `1e-6` is a number, `no` and `on` are text, `010` is ten, a date is
text. Merge keys (`<<`) of 1.1 are kept. A key given twice is refused.
"""

import re
from typing import Any

import yaml

from skyrl_engine.config.reading.origins import KeyPath
from skyrl_engine.errors import ConfigError, Problem

_CORE_SCHEMA = {
    "tag:yaml.org,2002:null": r"~|null|Null|NULL|",
    "tag:yaml.org,2002:bool": r"true|True|TRUE|false|False|FALSE",
    "tag:yaml.org,2002:int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "tag:yaml.org,2002:float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "tag:yaml.org,2002:merge": r"<<",
}
_PLAIN_TAGS = {*_CORE_SCHEMA, "tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


class CoreSchemaLoader(yaml.SafeLoader):
    """SafeLoader with the core schema's reading of plain scalars."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 -- PyYAML copies and fills this class attribute itself


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    # The core schema writes infinity and not-a-number with a dot in front, Python without.
    return float(re.sub(r"\.(?=inf|nan)", "", loader.construct_scalar(node).lower()))


for _tag, _pattern in _CORE_SCHEMA.items():
    # No table of first characters (None): every plain scalar is tried, which a configuration's size allows.
    CoreSchemaLoader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})\\Z"), None)
CoreSchemaLoader.add_constructor("tag:yaml.org,2002:int", _integer)
CoreSchemaLoader.add_constructor("tag:yaml.org,2002:float", _number)


def read_yaml(text: str, label: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The table, and the line (from 1) of every key. Raises ConfigError with line and column for everything that cannot be read."""
    try:
        loader = CoreSchemaLoader(text)
    except yaml.reader.ReaderError as error:
        where = f"{label}:{text.count(chr(10), 0, error.position) + 1}"
        raise ConfigError(
            [Problem(where, f"the character U+{error.character:04X} is not YAML", "Remove it or escape it")]
        ) from error
    try:
        root = loader.get_single_node()
        if root is None:
            return {}, {}
        walk = _Walk(label)
        walk.node(root, ())
        if walk.problems:
            raise ConfigError(walk.problems)
        table = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError([_syntax_problem(error, label)]) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([Problem(label, f"is not YAML: {' '.join(str(error).split())}", "Correct the file")]) from error
    finally:
        loader.dispose()
    if not isinstance(table, dict):
        raise ConfigError([Problem(label, "holds no tables", "Write keys and values, such as `model: {path: ...}`")])
    return table, walk.lines


def _syntax_problem(error: yaml.MarkedYAMLError, label: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    where = label if mark is None else f"{label}:{mark.line + 1}:{mark.column + 1}"
    cause = " ".join(str(part) for part in (error.context, error.problem) if part)
    return Problem(where, f"is not YAML: {cause}", "Correct the file at this place")


class _Walk:
    """Walks the composed document once: notes the lines of keys, and refuses values that a configuration cannot hold."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()

    def node(self, node: yaml.Node, path: KeyPath) -> None:
        if path:
            self.lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in self._open:
            self._refuse(node, "an alias refers to the table it stands in", "Write the values out")
            return
        if node.tag not in _PLAIN_TAGS:
            self._refuse(node, f"the tag {node.tag!r} is not read", "Write plain text, numbers, lists and tables")
            return
        self._open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            self._mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.node(item, (*path, index))
        self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> None:
        first_lines: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                merged.append(value)
            elif key.tag != "tag:yaml.org,2002:str":
                written = key.value if isinstance(key, yaml.ScalarNode) else "a list or table"
                self._refuse(key, f"the key {written} is not text", "Put the key in quotes")
            elif key.value in first_lines:
                self._refuse(
                    key, f"the key {key.value!r} is given twice, first on line {first_lines[key.value]}", "Remove one of the two"
                )
            else:
                first_lines[key.value] = key.start_mark.line + 1
                self.lines.setdefault((*path, key.value), key.start_mark.line + 1)
                self.node(value, (*path, key.value))
        for value in merged:
            # What the table says itself goes before what it merges: lines of keys seen above stay.
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in sources:
                self.node(source, path)

    def _refuse(self, node: yaml.Node, cause: str, remedy: str) -> None:
        mark = node.start_mark
        self.problems.append(Problem(f"{self.label}:{mark.line + 1}:{mark.column + 1}", cause, remedy))
