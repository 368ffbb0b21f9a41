"""Which characters of a rendered conversation carry loss. Double brackets enclose them; the expected texts are written by hand."""

import logging
import os
from pathlib import Path

import pytest

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.errors import DataError, ModelError
from skyrl_engine.model_facts.tokenizer import load_tokenizer

TOOL = {"type": "function", "function": {"name": "add"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

CHATML = """\
<|im_start|>user
hi<|im_end|>
<|im_start|>assistant
[[yo<|im_end|>]]
<|im_start|>user
bye<|im_end|>
<|im_start|>assistant
[[ok then<|im_end|>]]
"""

# loss on all replies
EXPECTED = {
    "chatml": CHATML,
    "headers": """\
<|bos|><|head|>user<|/head|>

hi<|eot|><|head|>assistant<|/head|>

[[yo<|eot|>]]<|head|>user<|/head|>

bye<|eot|><|head|>assistant<|/head|>

[[ok then<|eot|>]]""",
    "thinking": CHATML.replace("[[ok", "[[<think>\n\n</think>\n\nok"),
    "opens_thinking": "<|head|>U<|/head|>hi<|head|>A<|/head|>[[yo<|eot|>]]<|head|>U<|/head|>bye<|head|>A<|/head|>[[ok then<|eot|>]]",
    "unmarked": "user: hi\nassistant: [[yo\n]]user: bye\nassistant: [[ok then\n]]",
    "instructions": "<|bos|>[I] hi [/I][[ yo<|eot|>]][I] bye [/I][[ ok then<|eot|>]]",
    "tagged": CHATML,
}


@pytest.mark.parametrize("template", EXPECTED)
@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_the_loss_covers_the_replies_and_their_end_of_turn_token(load, make_tokenizer, marked, chat, *, template, loss_on):
    tokenizer = make_tokenizer(template)
    expected = EXPECTED[template]
    if loss_on == "last":
        expected = expected.replace("[[", "", 1).replace("]]", "", 1)
    dataset = load([chat("hi", "yo", "bye", "ok then")], tokenizer, loss_on=loss_on)
    assert marked(dataset, tokenizer) == expected


@pytest.mark.parametrize("template", sorted(EXPECTED.keys() - {"opens_thinking"}))
def test_a_completion_carries_loss_from_its_first_turn_to_the_end(load, make_tokenizer, marked, chat, *, template):
    """Other turns and the template's words between and after turns too; a prompt of several turns carries none."""
    tokenizer = make_tokenizer(template)
    expected = EXPECTED[template].replace("]]", "")
    first, _, last = expected.split("[[")
    rows = [chat("hi", "yo", "bye", "ok then")]
    assert marked(load(rows, tokenizer, loss_on="completion"), tokenizer) == expected.replace("[[" + last, last) + "]]"
    messages = rows[0]["messages"]
    parted = load([{"prompt": messages[:3], "completion": messages[3:]}], tokenizer, loss_on="completion")
    assert marked(parted, tokenizer) == expected.replace(first + "[[", first) + "]]"


@pytest.mark.parametrize("said", [{"weight": 0}, {"weight": 0.5}])
def test_a_completion_whose_messages_have_weights_is_refused(load, make_tokenizer, chat, said):
    row = chat("hi", "yo", "bye", "ok then")
    row["messages"][1] |= said
    with pytest.raises(DataError, match="all tokens carry the same") as caught:
        load([row], make_tokenizer("chatml"), loss_on="completion")
    assert 'data.loss_on = "all"' in caught.value.remedy


@pytest.mark.parametrize("template", EXPECTED)
def test_what_carries_loss_is_what_follows_the_generation_prompt(load, make_tokenizer, marked, chat, template):
    """The prompt's tokens are those a sampler would be given, up to a think block that the template opens for sampling alone."""
    tokenizer = make_tokenizer(template)
    row = chat("hi", "yo", "bye", "ok then")
    columns = load([row], tokenizer).columns
    prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
    length = int(columns.token_offsets[1] - columns.action_offsets[1])
    if template == "opens_thinking":
        prompt = prompt[:length]
    assert columns.input_ids[:length].tolist() == list(prompt)


@pytest.mark.parametrize("template", ["chatml", "headers", "thinking", "tagged"])
def test_repeated_turns_are_told_apart(load, make_tokenizer, marked, chat, template):
    tokenizer = make_tokenizer(template)
    text = marked(load([chat(*["same", "words"] * 4)], tokenizer, loss_on="all"), tokenizer)
    assert text.count("[[words") + text.count("[[<think>\n\n</think>\n\nwords") == 4
    assert text.replace("[[", "").replace("]]", "") == tokenizer.apply_chat_template(
        chat(*["same", "words"] * 4)["messages"], tokenize=False
    )


def test_reasoning_that_the_template_removes_is_not_trained_on(load, make_tokenizer, marked, chat):
    tokenizer = make_tokenizer("thinking")
    row = chat("q", "<think>\nhm\n</think>\n\nfirst", "r", "<think>\nso\n</think>\n\nsecond")
    assert marked(load([row], tokenizer, loss_on="all"), tokenizer) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[[first<|im_end|>]]\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n[[<think>\nso\n</think>\n\nsecond<|im_end|>]]\n"
    )


@pytest.mark.parametrize("arguments", ["{a: 1", "[1]", ""])
def test_arguments_that_are_no_json_object_are_told_and_written_as_text(load, make_tokenizer, marked, arguments, caplog):
    tokenizer = make_tokenizer("thinking")
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [CALL, call]}]
    with caplog.at_level(logging.WARNING, "skyrl_engine"):
        dataset = load([{"messages": messages}], tokenizer)
    assert f'[call]add "{arguments}"[/call]' in marked(dataset, tokenizer)
    assert dataset.counts.unread_arguments == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the arguments of 1 tool calls of ")


@pytest.mark.parametrize(
    "first", [{"content": ""}, {"content": None}, {"content": "let me see"}, {"content": "", "reasoning_content": "hm"}]
)
def test_tool_calls_before_a_later_question(load, make_tokenizer, marked, first):
    """The rendering up to each of these turns differs from the whole one: reasoning and the empty think block vanish."""
    tokenizer = make_tokenizer("thinking")
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [CALL], **first},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "it is 2"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "no more"},
    ]
    thought = "let me see\n" if first["content"] else ""
    assert marked(load([{"messages": messages, "tools": [TOOL]}], tokenizer, loss_on="all"), tokenizer) == (
        '<|im_start|>system\n[{"type": "function", "function": {"name": "add"}}]<|im_end|>\n<|im_start|>user\nq<|im_end|>\n'
        f'<|im_start|>assistant\n[[{thought}[call]add {{"a": 1}}[/call]<|im_end|>]]\n<|im_start|>user\n[result]2[/result]<|im_end|>\n'
        "<|im_start|>assistant\n[[it is 2<|im_end|>]]\n<|im_start|>user\nand?<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\n\n</think>\n\nno more<|im_end|>]]\n"
    )


@pytest.mark.parametrize("empty", ["", " ", "\n"])
def test_an_empty_reply_teaches_its_end_of_turn_token(load, make_tokenizer, marked, chat, empty):
    tokenizer = make_tokenizer("thinking")
    text = marked(load([chat("hi", empty, "bye", "ok")], tokenizer, loss_on="all"), tokenizer)
    assert text.startswith(f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[{empty}<|im_end|>]]\n<|im_start|>user\nbye")


def test_a_conversation_that_starts_with_the_assistant(load, make_tokenizer, marked):
    tokenizer = make_tokenizer("chatml")
    messages = [{"role": "assistant", "content": "welcome"}, {"role": "user", "content": "hi"}]
    assert marked(load([{"messages": messages}], tokenizer), tokenizer) == (
        "<|im_start|>assistant\n[[welcome<|im_end|>]]\n<|im_start|>user\nhi<|im_end|>\n"
    )


def test_an_opened_think_block_does_not_swallow_the_reply_s_first_characters(load, make_tokenizer, marked, chat):
    tokenizer = make_tokenizer("opens_thinking")
    assert marked(load([chat("q", "<b>bold</b>")], tokenizer), tokenizer).endswith("<|/head|>[[<b>bold</b><|eot|>]]")


@pytest.mark.parametrize("text", ["  spaced  ", "\n\nlines\n\n", "naïve 日本語 🙂", "a"])
@pytest.mark.parametrize("template", ["chatml", "headers"])
def test_white_space_and_characters_of_many_bytes(load, make_tokenizer, marked, chat, *, template, text):
    tokenizer = make_tokenizer(template)
    shown = text.strip() if template == "headers" else text
    end = {"chatml": "<|im_end|>", "headers": "<|eot|>"}[template]
    for loss_on in ("last", "all"):
        assert f"[[{shown}{end}]]" in marked(load([chat("q", text)], tokenizer, loss_on=loss_on), tokenizer)


def test_the_template_s_beginning_of_text_is_not_doubled(load, make_tokenizer, chat):
    tokenizer = make_tokenizer("headers", adds_bos=True)
    ids = load([chat("hi", "yo")], tokenizer).columns.input_ids
    assert (ids == tokenizer.bos_token_id).sum() == 1


def test_a_turn_that_cannot_be_found_is_an_error_naming_the_sample(load, make_tokenizer, chat):
    with pytest.raises(DataError, match=r"sample 0 \(.*rows.jsonl line 1\): the assistant turn in message 1"):
        load([chat("", "", "", "")], make_tokenizer("opaque"), loss_on="all")


def test_a_template_s_refusal_names_the_sample_and_the_reason(load, make_tokenizer, chat):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"sample 0 .*refuses the conversation: roles must alternate"):
        load([chat("hi", "yo")], tokenizer)


def test_a_template_that_is_no_jinja_is_blamed_itself_with_its_line(load, make_tokenizer, chat):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{% for message in messages %}\n{{ message.content }\n{% endfor %}"
    with pytest.raises(ModelError, match=r"the chat template of .* is no Jinja template: line 2: unexpected '}'") as caught:
        load([chat("hi", "yo")], tokenizer)
    assert "chat_template.jinja" in caught.value.remedy


def test_a_tokenizer_without_a_template_cannot_take_conversations(load, make_tokenizer, chat):
    with pytest.raises(ModelError, match=r"no chat template.*model.chat_template"):
        load([chat("hi", "yo")], make_tokenizer(None))


def test_template_options_of_a_row_reach_the_template(load, make_tokenizer, marked, chat):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{{ mood }}" + tokenizer.chat_template
    dataset = load([{**chat("hi", "yo"), "chat_template_kwargs": {"mood": "calm"}}], tokenizer)
    assert marked(dataset, tokenizer).startswith("calm<|im_start|>user")


@pytest.mark.parametrize("metaspace", [False, True])
def test_a_tokenizer_without_offsets_gives_the_same_tokens_and_loss(load, make_tokenizer, chat, metaspace, monkeypatch):
    tokenizer = make_tokenizer("chatml", metaspace=metaspace)
    rows = [
        chat("hi", "yo", "bye", "ok then"),
        chat("  a", " b c ", "d", "e"),
        {"prompt": "two and", "completion": "two is four"},
        {"prompt": "a ", "completion": " b"},
    ]
    fast = [load([row], tokenizer, loss_on="all", max_length=1000).columns for row in rows]
    monkeypatch.setattr(type(tokenizer), "is_fast", property(lambda _: False))
    slow = [load([row], tokenizer, loss_on="all", max_length=1001).columns for row in rows]
    for left, right in zip(fast, slow, strict=True):
        assert left.input_ids.tolist() == right.input_ids.tolist()
        assert left.loss_weight.tolist() == right.loss_weight.tolist()


@pytest.mark.skipif("SKYRL_ENGINE_QWEN3_TOKENIZER" not in os.environ, reason="set it to a directory with Qwen3's tokenizer")
def test_qwen3_s_own_template(load, marked, chat):
    tokenizer = load_tokenizer(ModelConfig(path=str(Path(os.environ["SKYRL_ENGINE_QWEN3_TOKENIZER"]))))
    text = marked(load([chat("q", "<think>\nhm\n</think>\n\nfirst", "r", "second")], tokenizer, loss_on="all"), tokenizer)
    assert text == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[[first<|im_end|>]]\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\nsecond<|im_end|>]]\n"
    )
