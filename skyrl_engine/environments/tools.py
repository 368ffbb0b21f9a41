"""Python functions as tools: their schema from their signature, their calls checked against it."""

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union

from attrs import frozen

from skyrl_engine.contracts.kinds.environment import Action, Message, ToolCall
from skyrl_engine.errors import DataError

_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@frozen(eq=False)
class Tool:
    """A function that a model may call. `schema` is what chat templates and OpenAI's interface take."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Tool":
        """Make a tool of a function whose parameters have types and whose docstring says what it does. Raises DataError."""
        name = function.__name__
        text = inspect.getdoc(function)
        if not text:
            raise DataError(f"the tool {name} has no docstring", remedy="Say in it what the tool does: the model reads that")
        hints = typing.get_type_hints(function)
        properties, required = {}, []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or parameter.name not in hints:
                raise DataError(
                    f"the parameter {parameter.name!r} of the tool {name} has no type, or stands for several",
                    remedy="Give every parameter a type that JSON has, such as str, int, float, bool, list[str]",
                )
            properties[parameter.name] = {
                **_schema(name, parameter.name, hints[parameter.name]),
                **_find_parameter_doc(text, parameter.name),
            }
            if parameter.default is parameter.empty:
                required.append(parameter.name)
        about = text.split("\n\n")[0].replace("\n", " ").strip()
        parameters = {"type": "object", "properties": properties, "required": required}
        return cls(function, {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}})

    async def answer(self, call: ToolCall) -> Message:
        """Call the function; what it raises, and arguments that it does not take, become the answer."""
        try:
            inspect.signature(self.function).bind(**call.arguments)
            made = self.function(**call.arguments)
            made = await made if inspect.isawaitable(made) else made
            content = made if isinstance(made, str) else json.dumps(made, ensure_ascii=False, default=str)
        except Exception as error:  # noqa: BLE001 -- the model is told, and may do better
            content = f"error: {type(error).__name__}: {error}"
        return tool_message(call, content)


async def answer_calls(tools: Sequence[Tool], action: Action) -> tuple[Message, ...]:
    """Return the answers to the calls in a turn of the model, in their order; none where it calls nothing. What is wrong with a call, or with
    how it is written, is the answer to it.
    """
    by_name = {tool.name: tool for tool in tools}
    if not by_name:
        return ()
    if action.tool_problem is not None:
        return ({"role": "tool", "name": "error", "content": f"error: {action.tool_problem}"},)
    answers = []
    for call in action.tool_calls:
        tool = by_name.get(call.name)
        unknown = f"error: there is no tool {call.name!r}; there are {', '.join(by_name)}"
        answers.append(tool_message(call, unknown) if tool is None else await tool.answer(call))
    return tuple(answers)


def tool_message(call: ToolCall, content: str) -> Message:
    """Return the answer to a call as a message."""
    message = {"role": "tool", "name": call.name, "content": content}
    return message if call.id is None else {**message, "tool_call_id": call.id}


def _schema(tool: str, parameter: str, hint: Any) -> dict[str, Any]:
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType):
        kinds = [argument for argument in arguments if argument is not NoneType]
        if len(kinds) == 1:
            return _schema(tool, parameter, kinds[0])
    if origin is Literal:
        return {"type": _TYPES[type(arguments[0])], "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(tool, parameter, arguments[0])}
    if origin is dict:
        return {"type": "object"}
    raise DataError(
        f"the parameter {parameter!r} of the tool {tool} has the type {hint!r}, which JSON has not",
        remedy="Use str, int, float, bool, list, dict, Literal or one of them | None",
    )


def _find_parameter_doc(text: str, parameter: str) -> dict[str, str]:
    """Return what a docstring says of a parameter, in a line `name: text` or `name (type): text`."""
    for line in text.splitlines():
        head, colon, rest = line.strip().partition(":")
        if colon and head.partition("(")[0].strip() == parameter and rest.strip():
            return {"description": rest.strip()}
    return {}
