"""Parts that the chat template leaves out of a conversation are refused, by sample, message and field."""

import logging

import pytest

from skyrl_engine.data.text.chat import ChatTemplate
from skyrl_engine.errors import DataError

ASK = {"role": "user", "content": "add 1 and 2"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "add(1, 2) = 3"}
ANSWER = {"role": "assistant", "content": "3"}
TOOL = {"type": "function", "function": {"name": "add"}}


def row(*messages, **more):
    return {"messages": list(messages), **more}


@pytest.mark.parametrize(
    ("conversation", "place"),
    [
        (row(ASK, CALLS), r"message 1, field 'tool_calls': the chat template leaves out the call of 'add'"),
        # its name and arguments are in the question and in the answer of the tool
        (
            row({"role": "user", "content": 'call add with {"a": 1, "b": 2}'}, CALLS, RESULT, ANSWER),
            "message 1, field 'tool_calls'",
        ),
        (row(ASK, {**ANSWER, "tool_calls": [CALL["function"]]}), "message 1, field 'tool_calls'"),
        (row(ASK, {**ANSWER, "reasoning_content": "1 + 2"}), "message 1, field 'reasoning_content'"),
        (row(ASK, {**ANSWER, "thinking": "1 + 2"}), "message 1, field 'thinking'"),
        (row({**ASK, "name": "Ada"}, ANSWER), "message 0, field 'name'"),
        (row(ASK, {**ANSWER, "function_call": {"name": "add"}}), "message 1, field 'function_call'"),
        (row({**ASK, "images": ["a.png"]}, ANSWER), "message 0, field 'images'"),
        (row(ASK, ANSWER, tools=[TOOL]), "column 'tools': the chat template leaves out the declared tool 'add'"),
    ],
)
def test_what_the_template_does_not_write_is_refused(load, make_tokenizer, conversation, place):
    with pytest.raises(DataError, match=rf"sample 1 \(.* line 2\), {place}"):
        load([row(ASK, ANSWER), conversation], make_tokenizer("chatml"))


DROPS_SYSTEM = """\
{%- for m in messages if m.role != 'system' -%}{{ m.role + ': ' + m.content + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""


def test_a_message_that_vanishes_is_refused_though_its_text_stands_elsewhere(load, make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = DROPS_SYSTEM
    with pytest.raises(DataError, match="message 0, field 'content': the chat template leaves out the text"):
        load([row(ASK, ANSWER), row({"role": "system", "content": "add"}, ASK, ANSWER)], tokenizer)


ARGUMENTS_LOST = """\
{%- for m in messages -%}{{ m.role + ': ' + m.content }}{%- for c in m.tool_calls or [] -%}{{ '[' + c.function.name + ']' }}{%- endfor -%}
{{ '\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""


def test_arguments_alone_are_missed_too(load, make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = ARGUMENTS_LOST
    with pytest.raises(DataError, match="the arguments of the call of 'add'"):
        load([row(ASK, CALLS)], tokenizer)


TRANSFORMS = """\
{%- for m in messages -%}{{ m.role + ': ' + (m.content | tojson | upper) + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""


@pytest.mark.parametrize("template", ["headers", "instructions", "opens_thinking", "tagged", "unmarked", TRANSFORMS])
def test_templates_that_trim_escape_or_change_texts_write_them(load, make_tokenizer, template):
    tokenizer = make_tokenizer("chatml" if template is TRANSFORMS else template)
    if template is TRANSFORMS:
        tokenizer.chat_template = template
    conversation = row({"role": "user", "content": '  "hé"\n '}, {"role": "assistant", "content": " yo\t"})
    assert len(load([conversation, conversation, conversation], tokenizer)) == 3


def test_a_whole_tool_conversation_passes_where_the_template_writes_it(load, make_tokenizer):
    conversation = row(ASK, {**CALLS, "reasoning_content": "hm"}, RESULT, ANSWER, tools=[TOOL])
    assert load([conversation], make_tokenizer("thinking")).counts.removed_reasoning == 0


@pytest.mark.parametrize("thought", [{"content": "<think>\nhm\n</think>\n\nyo"}, {"content": "yo", "reasoning_content": "hm"}])
def test_reasoning_of_earlier_turns_is_removed_by_design_and_told_once(load, make_tokenizer, caplog, thought):
    early = row({"role": "user", "content": "hi"}, {"role": "assistant", **thought}, ASK, ANSWER)
    with caplog.at_level(logging.WARNING, "skyrl_engine"):
        dataset = load([early, early], make_tokenizer("thinking"))
    assert dataset.counts.removed_reasoning == 2
    (record,) = caplog.records
    assert record.getMessage() == (
        f"the chat template leaves out the reasoning of earlier turns in 2 of 2 rows of {dataset.name}; "
        "with data.loss_on = all, these turns train without it"
    )


def test_reasoning_of_the_last_turn_is_refused(load, make_tokenizer):
    with pytest.raises(DataError, match="message 1, field 'content': the chat template leaves out the reasoning"):
        load([row(ASK, {"role": "assistant", "content": "<think>hm</think>3"})], make_tokenizer("opens_thinking"))


def test_reasoning_under_two_names_is_written_once(load, make_tokenizer):
    conversation = row(ASK, {**ANSWER, "reasoning_content": "hm", "reasoning": "hm"})
    assert load([conversation], make_tokenizer("thinking")).counts.removed_reasoning == 0


def test_plain_chats_cost_no_further_rendering(make_tokenizer, chat, monkeypatch):
    """One conversation of each kind is rendered once more; those after it are searched."""
    from skyrl_engine.data.text.messages import Conversation

    template = ChatTemplate(make_tokenizer("chatml"))
    renderings = []
    write = ChatTemplate.write
    monkeypatch.setattr(ChatTemplate, "write", lambda self, *a, **k: renderings.append(1) or write(self, *a, **k))
    counts = []
    for _ in range(3):
        renderings.clear()
        template.render(Conversation(chat("hi", "yo", "bye", "ok")["messages"]), name="one", loss_on="last")
        counts.append(len(renderings))
    assert counts == [3, 2, 2]
