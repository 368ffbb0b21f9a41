"""Reading the tool calls that a model wrote, by the family of its chat template. Nothing that a model wrote is ever evaluated."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from skyrl_engine.contracts.kinds.environment import ToolCall

Family = Literal["hermes", "llama", "qwen-xml"]
Calls = tuple[ToolCall, ...]

_BLOCK: Final = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION: Final = re.compile(r"<function=([^>\n]*)>(.*?)(</function>|(?=<function=)|\Z)", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]*)>(.*?)(</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_PYTHON_TAG: Final = "<|python_tag|>"
_OPENINGS: Final[Mapping[Family, Sequence[str]]] = {
    "hermes": ("<tool_call>",),
    "llama": (_PYTHON_TAG, "{"),
    "qwen-xml": ("<tool_call>", "<function="),
}
_BUILT_IN: Final = re.compile(r"(\w+)\.call\((.*)\)", re.DOTALL)
_ARGUMENT: Final = re.compile(r'\s*(\w+)\s*=\s*("(?:[^"\\]|\\.)*")\s*(?:,|\Z)', re.DOTALL)
_SHOWN: Final = 80
"""Most characters of a wrong call that a problem shows."""


def template_family(template: str) -> Family | None:
    """Tell from a chat template's text how the model writes calls of tools; None where no family is known to write so."""
    if "<function=" in template:
        return "qwen-xml"
    if "<tool_call>" in template:
        return "hermes"
    if _PYTHON_TAG in template or ("tool_calls" in template and re.search(r'"parameters"\s*:', template)):
        return "llama"
    return None


def read_tool_calls(text: str, family: Family | None, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[Calls, str | None]:
    """Return the calls in a turn of the model, in their order, and what is wrong with those that cannot be read (None: nothing).

    "hermes" is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; "llama" `{"name": ..., "parameters": {...}}` at the start of the
    turn or `<|python_tag|>` before a call; "qwen-xml" `<function=name><parameter=key>value</parameter></function>`, where the schemas of
    `tools` say which values are no text. What a model thinks before it answers calls nothing.
    """
    answer = _without_thoughts(text)
    if family == "hermes":
        return _gather_calls(_hermes(answer))
    if family == "qwen-xml":
        return _gather_calls(_qwen_xml(answer, tools))
    if family == "llama":
        return _gather_calls(_llama(answer))
    return (), None


def text_before_calls(text: str, family: Family | None) -> str:
    """Return what a turn says before its calls."""
    thoughts, closing, answer = text.rpartition("</think>")
    ends = [place for mark in _OPENINGS[family] if (place := answer.find(mark)) >= 0] if family is not None else []
    return (thoughts + closing + (answer[: min(ends)] if ends else answer)).rstrip()


def _gather_calls(parts: Iterable[ToolCall | str]) -> tuple[Calls, str | None]:
    calls, problem = [], None
    for part in parts:
        if isinstance(part, ToolCall):
            calls.append(part)
        elif problem is None:
            problem = part
    return tuple(calls), problem


def _without_thoughts(text: str) -> str:
    answer = text.rpartition("</think>")[2]
    return answer.partition("<think>")[0]


def _hermes(text: str) -> Iterable[ToolCall | str]:
    for body, closing in _BLOCK.findall(text):
        yield _call_of(body, ("arguments",)) if closing else f"a <tool_call> is not closed: {_shorten(body)}"


def _qwen_xml(text: str, tools: Sequence[Mapping[str, Any]]) -> Iterable[ToolCall | str]:
    for body, closing in _BLOCK.findall(text):
        if closing and "<function=" not in body:
            yield f"a <tool_call> holds no <function=name>: {_shorten(body)}"
    for name, body, closing in _FUNCTION.findall(text):
        if not name.strip():
            yield "a <function=> has no name"
        elif not closing:
            yield f"<function={name}> is not closed: {_shorten(body)}"
        else:
            yield _xml_call(name.strip(), body, _types(tools, name.strip()))


def _xml_call(name: str, body: str, types: Mapping[str, Any]) -> ToolCall | str:
    arguments: dict[str, Any] = {}
    for key, value, closing in _PARAMETER.findall(body):
        if not closing:
            return f"<parameter={key}> of the call of {name!r} is not closed: {_shorten(value)}"
        # the line breaks next to the tags are the format's
        arguments[key.strip()] = _convert_argument(value.removeprefix("\n").removesuffix("\n"), types.get(key.strip(), "string"))
    return ToolCall(name, arguments)


def _types(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the declared types of a tool's parameters, by name."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            if isinstance(properties, Mapping):
                return {key: schema.get("type", "string") for key, schema in properties.items() if isinstance(schema, Mapping)}
    return {}


def _convert_argument(text: str, declared: object) -> object:
    if declared == "string":
        return text
    try:
        return _json(text)
    except ValueError:
        return text


def _llama(text: str) -> Iterable[ToolCall | str]:
    answer = text.strip()
    tagged = answer.startswith(_PYTHON_TAG)
    answer = answer.removeprefix(_PYTHON_TAG).lstrip()
    if tagged and not answer.startswith("{"):
        yield _read_python_call(answer)
        return
    first = True
    # several calls follow each other, some models put a semicolon between them
    while answer.startswith("{"):
        try:
            value, end = _decoder().raw_decode(answer)
        except (ValueError, RecursionError) as error:
            # an answer may be JSON or set in braces without being a call
            if tagged or not first or '"name"' in answer:
                yield f"a call is no JSON ({_reason(error)}): {_shorten(answer)}"
            return
        if (
            not tagged
            and first
            and not (isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value))
        ):
            return
        yield _check_call(value, ("parameters", "arguments"), answer[:end])
        answer, first = answer[end:].lstrip().removeprefix(";").lstrip(), False


def _read_python_call(text: str) -> ToolCall | str:
    """Read `name.call(key="value", ...)`, as tools that such models were trained with are called."""
    match = _BUILT_IN.fullmatch(text.strip())
    if match is None:
        return f"after {_PYTHON_TAG} stands neither JSON nor name.call(...): {_shorten(text)}"
    name, inner = match.groups()
    arguments: dict[str, Any] = {}
    place = 0
    inner = inner.strip()
    while place < len(inner):
        argument = _ARGUMENT.match(inner, place)
        try:
            if argument is None:
                raise ValueError('an argument is not written as key="value"')
            arguments[argument.group(1)] = _json(argument.group(2))
        except ValueError as error:
            return f"the arguments of the call of {name!r} cannot be read ({_reason(error)}): {_shorten(inner)}"
        place = argument.end()
    return ToolCall(name, arguments)


def _call_of(body: str, keys: Sequence[str]) -> ToolCall | str:
    try:
        value = _json(body)
    except ValueError as error:
        return f"a call is no JSON ({_reason(error)}): {_shorten(body)}"
    return _check_call(value, keys, body)


def _check_call(value: object, keys: Sequence[str], body: str) -> ToolCall | str:
    """Return the call of an object with a name, and with arguments under one of `keys` or without any."""
    if not isinstance(value, dict):
        return f"a call is no JSON object: {_shorten(body)}"
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return f"a call has no name: {_shorten(body)}"
    arguments: object = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return f"the arguments of the call of {name!r} are no JSON object: {_shorten(body)}"
    return ToolCall(name, arguments)


def _json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, for values nested too deeply too."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _shorten(text: str) -> str:
    line = " ".join(text[: 4 * _SHOWN].split())
    return repr(line if len(line) <= _SHOWN else line[:_SHOWN] + "...")
