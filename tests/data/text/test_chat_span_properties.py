"""Spans found by comparing renderings equal those that the same template states itself with generation tags.

The tagged template is an independent account: its spans come from the tags alone, not from any search. Covered are reasoning, tool calls,
repeated texts and texts that look like headers, in a template that renders a turn differently once another question follows. Not covered:
templates that reorder messages or change their texts.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.data.text.chat import ChatTemplate
from skyrl_engine.data.text.messages import Conversation

TEXTS = st.lists(
    st.sampled_from(["a", "b", " ", "\n", "\n\n", "<", "<think>", "think", "assistant\n", "[call]", "yes", "é🙂"]),
    min_size=1,
    max_size=6,
).map("".join)
VISIBLE = TEXTS.map(lambda text: "x" + text)
REASONING = st.none() | st.sampled_from(["hm", "so\n\nyes", "x"])
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@st.composite
def conversations(draw):
    messages = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXTS)})
        for _ in range(draw(st.integers(0, 2))):
            call = {"role": "assistant", "content": draw(st.just("") | VISIBLE), "tool_calls": [CALL]}
            if thought := draw(REASONING):
                call["reasoning_content"] = thought
            messages += [call, {"role": "tool", "content": draw(TEXTS)}]
        thought, answer = draw(REASONING), draw(VISIBLE)
        messages.append({"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{answer}" if thought else answer})
    return Conversation(messages)


@settings(max_examples=150, deadline=None)
@given(chat=conversations(), loss_on=st.sampled_from(("last", "all")))
def test_found_spans_equal_tagged_spans(make_tokenizer, chat, loss_on):
    found = ChatTemplate(make_tokenizer("thinking")).render(chat, name="it", loss_on=loss_on)
    stated = ChatTemplate(make_tokenizer("thinking_tagged")).render(chat, name="it", loss_on=loss_on)
    assert found.text == stated.text
    assert found.spans == stated.spans
