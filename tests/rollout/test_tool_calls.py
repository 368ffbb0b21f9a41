"""Calls of tools in what a model wrote, per family; what cannot be read is reported, and nothing is raised."""

import random
import re
import time

import pytest

from skyrl_engine.contracts.kinds.environment import ToolCall
from skyrl_engine.rollout.tool_calls import Family, read_tool_calls, template_family, text_before_calls
from skyrl_engine.testing.templates import TEMPLATES

FAMILIES: tuple[Family, ...] = ("hermes", "llama", "qwen-xml")
TREE = ToolCall("lookup", {"word": "tree"})
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "most": {"type": "integer"}}},
        },
    }
]

READ = [
    ("hermes", 'Well.\n<tool_call>\n{"name": "lookup", "arguments": {"word": "tree"}}\n</tool_call>', [TREE]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name": "b"}</tool_call>', ["a", "b"]),
    ("hermes", '<tool_call>{"name": "lookup", "arguments": "{\\"word\\": \\"tree\\"}"}</tool_call>', [TREE]),
    ("hermes", '<think>try <tool_call>{"name": "a"}</tool_call></think><tool_call>{"name": "b"}</tool_call>', ["b"]),
    ("hermes", '<think>I could <tool_call>{"name": "a"}</tool_call>', []),
    ("hermes", "no call", []),
    ("llama", '{"name": "lookup", "parameters": {"word": "tree"}}', [TREE]),
    ("llama", '<|python_tag|>{"name": "lookup", "parameters": {"word": "tree"}}', [TREE]),
    ("llama", '{"name": "a", "parameters": {}}; {"name": "b", "arguments": {}}', ["a", "b"]),
    ("llama", '{"name": "a", "parameters": {}}\nThat is my call.', ["a"]),
    ("llama", '<|python_tag|>lookup.call(word="tree")', [TREE]),
    ("llama", '<|python_tag|>lookup.call(word="a, \\"b\\"", most="2")', [ToolCall("lookup", {"word": 'a, "b"', "most": "2"})]),
    ("llama", '{"answer": 4}', []),
    ("llama", "{braces} are no call", []),
    ("llama", 'I write {"name": "a", "parameters": {}} to call', []),
    (
        "qwen-xml",
        "<tool_call>\n<function=lookup>\n<parameter=word>\ntree\n</parameter>\n<parameter=most>\n2\n</parameter>\n</function>\n</tool_call>",
        [ToolCall("lookup", {"word": "tree", "most": 2})],
    ),
    (
        "qwen-xml",
        "<function=lookup><parameter=word>\n a\n\nb \n</parameter></function>",
        [ToolCall("lookup", {"word": " a\n\nb "})],
    ),
    ("qwen-xml", "<function=lookup><parameter=word>12</parameter></function>", [ToolCall("lookup", {"word": "12"})]),
    ("qwen-xml", "<function=lookup><parameter=most>many</parameter></function>", [ToolCall("lookup", {"most": "many"})]),
    ("qwen-xml", "<function=other><parameter=n>12</parameter></function><function=b></function>", ["other", "b"]),
]


@pytest.mark.parametrize(("family", "text", "calls"), READ)
def test_calls_are_read(family: Family, text: str, calls: list[ToolCall | str]) -> None:
    found, problem = read_tool_calls(text, family, TOOLS)
    assert problem is None
    assert [call.name if isinstance(wanted, str) else call for call, wanted in zip(found, calls, strict=True)] == calls


WRONG = [
    ("hermes", '<tool_call>{"name": "a"', "is not closed"),
    ("hermes", '<tool_call>{"name": "a"<tool_call>{"name": "b"}</tool_call>', "is not closed"),
    ("hermes", "<tool_call>lookup(tree)</tool_call>", "no JSON \\(Expecting value at character 0\\): 'lookup\\(tree\\)'"),
    ("hermes", "<tool_call>[1]</tool_call>", "no JSON object"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "has no name"),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', "has no name"),
    ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "arguments of the call of 'a' are no JSON object"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is no JSON value"),
    ("hermes", "<tool_call>" + "[" * 200_000 + "</tool_call>", "no JSON"),
    ("llama", '{"name": "a", "parameters": {', "no JSON"),
    ("llama", '{"name": "a", "parameters": 3}', "are no JSON object"),
    ("llama", '{"name": "a", "parameters": {}}; {"name": ', "no JSON"),
    ("llama", "<|python_tag|>print(1)", "neither JSON nor name.call"),
    ("llama", "<|python_tag|>lookup.call(tree)", "not written as key="),
    ("llama", "<|python_tag|>{oops", "no JSON"),
    ("qwen-xml", "<function=lookup><parameter=word>tree", "<function=lookup> is not closed"),
    ("qwen-xml", "<function=lookup><parameter=word>tree</function>", "<parameter=word> of the call of 'lookup' is not closed"),
    ("qwen-xml", "<function=></function>", "has no name"),
    ("qwen-xml", "<tool_call>lookup</tool_call>", "holds no <function=name>"),
]


@pytest.mark.parametrize(("family", "text", "problem"), WRONG)
def test_what_cannot_be_read_is_told(family: Family, text: str, problem: str) -> None:
    _, description = read_tool_calls(text, family)
    assert description is not None
    assert re.search(problem, description)
    assert len(description) < 300


def test_calls_beside_a_wrong_one_are_kept() -> None:
    calls, problem = read_tool_calls('<tool_call>{"name": "a"}</tool_call><tool_call>{</tool_call>', "hermes")
    assert [call.name for call in calls] == ["a"]
    assert problem is not None


def test_no_family_has_no_calls() -> None:
    assert read_tool_calls('<tool_call>{"name": "a"}</tool_call>', None) == ((), None)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_text_is_read_without_an_error_and_soon(family: Family) -> None:
    """A model may write anything, a megabyte of opened tags too."""
    draw = random.Random(0)
    marks = [
        "<tool_call>",
        "</tool_call>",
        "<function=",
        ">",
        "<parameter=",
        "</parameter>",
        "{",
        "}",
        '"name"',
        ":",
        "<|python_tag|>",
    ]
    marks += ["</think>", "<think>", "\\", '"', "a.call(", ")", "\ud800", "\0", "9" * 5000, ";"]
    for _ in range(300):
        read_tool_calls("".join(draw.choices(marks, k=draw.randrange(40))), family, TOOLS)
    started = time.process_time()
    for mark in ("<tool_call>", "<function=a>", "<function=a><parameter=b>", "<|python_tag|>a.call(" + 'b="', '{"name":', "[", "x"):
        read_tool_calls((mark * (1_000_000 // len(mark))), family)
        read_tool_calls("<|python_tag|>a.call(" + 'b="c",' * 100_000 + ")", family)
    # generous: what grows with the square of the length takes minutes
    assert time.process_time() - started < 20


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_family_is_found_in_the_template(name: str) -> None:
    assert template_family(TEMPLATES[name].text) == TEMPLATES[name].family


@pytest.mark.parametrize(
    ("text", "family", "before"),
    [
        ("Well.\n<tool_call>{}</tool_call>", "hermes", "Well."),
        ("<think>a <tool_call></think>b<tool_call>{}", "hermes", "<think>a <tool_call></think>b"),
        ('{"name": "a", "parameters": {}}', "llama", ""),
        ("so\n<function=a></function>", "qwen-xml", "so"),
        ("plain ", None, "plain"),
    ],
)
def test_what_stands_before_calls(text: str, family: Family | None, before: str) -> None:
    assert text_before_calls(text, family) == before
