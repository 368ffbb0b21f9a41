"""Formats: what is detected, what each becomes, and what each mistake is answered with."""

import numpy as np
import pytest

from skyrl_engine.data.sources.formats import detect
from skyrl_engine.data.sources.rows import Row
from skyrl_engine.errors import DataError


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"messages": []}, "messages"),
        ({"conversations": []}, "messages"),
        ({"prompt": "", "prompt_id": 1, "messages": []}, "messages"),
        ({"prompt": "", "completion": ""}, "prompt_completion"),
        ({"instruction": "", "input": "", "output": "", "text": ""}, "alpaca"),
        ({"text": "", "id": 1}, "text"),
        ({"input_ids": [], "labels": []}, "tokens"),
        ({"input_ids": [], "num_actions": 1, "messages": []}, "tokens"),
    ],
)
def test_detection_by_columns(columns, expected):
    assert detect("auto", Row(0, "here", columns)) == expected


def test_unknown_columns_are_named_with_what_is_needed_and_a_suggestion():
    with pytest.raises(DataError) as caught:
        detect("auto", Row(0, "here", {"mesages": [], "id": 1}))
    assert "'mesages', 'id'" in caught.value.cause
    assert caught.value.remedy == "Name its columns: data.map.messages=mesages"
    assert any(
        detail.startswith("format alpaca needs instruction and output, or instruction and response")
        for detail in caught.value.details
    )


def test_an_asked_format_whose_column_is_missing():
    with pytest.raises(DataError, match=r"sample 0 \(here\) has no column 'completion'.* it has 'prompt', 'completions'"):
        detect("prompt_completion", Row(0, "here", {"prompt": "", "completions": ""}))


def test_a_later_row_without_the_column_is_named(load, make_tokenizer, chat):
    with pytest.raises(DataError, match=r"sample 1 \(.*line 2\) has no column 'messages'"):
        load([chat("a", "b"), {"text": "c"}], make_tokenizer())


def test_share_gpt_conversations(load, make_tokenizer, marked):
    tokenizer = make_tokenizer()
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    assert marked(load([{"conversations": turns}], tokenizer), tokenizer) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[yo<|im_end|>]]\n"
    )


def test_prompt_and_completion_as_text_get_the_tokenizer_s_ends(load, make_tokenizer, marked):
    tokenizer = make_tokenizer(None, adds_bos=True)
    assert marked(load([{"prompt": "2+2=", "completion": "4"}], tokenizer), tokenizer) == "<|bos|>2+2=[[4<|end|>]]"


def test_ends_that_are_already_written_are_not_doubled(load, make_tokenizer, marked):
    tokenizer = make_tokenizer(None, adds_bos=True)
    assert marked(load([{"prompt": "<|bos|>a", "completion": "b<|end|>"}], tokenizer), tokenizer) == "<|bos|>a[[b<|end|>]]"


def test_a_token_across_the_boundary_carries_loss_and_is_counted(load, make_tokenizer, marked):
    tokenizer = make_tokenizer(None)
    assert len(tokenizer("hello")["input_ids"]) == 1
    dataset = load([{"prompt": "x hel", "completion": "lo"}, {"prompt": "x", "completion": " hello"}], tokenizer)
    assert dataset.counts.boundary_tokens == 1
    assert marked(dataset, tokenizer, 0) == "x [[hello<|end|>]]"
    assert marked(dataset, tokenizer, 1) == "x[[ hello<|end|>]]"


def test_prompt_and_completion_as_messages_train_on_the_completion_alone(load, make_tokenizer, marked, chat):
    tokenizer = make_tokenizer()
    row = {"prompt": chat("a", "b", "c")["messages"], "completion": [{"role": "assistant", "content": "d"}]}
    text = marked(load([row], tokenizer, loss_on="all"), tokenizer)
    assert text.count("[[") == 1
    assert text.endswith("<|im_start|>assistant\n[[d<|im_end|>]]\n")


def test_alpaca_with_and_without_a_template(load, make_tokenizer, marked):
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    plain, templated = make_tokenizer(None), make_tokenizer()
    assert marked(load([row], plain), plain) == "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n[[3<|end|>]]"
    assert (
        marked(load([row], templated), templated)
        == "<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n<|im_start|>assistant\n[[3<|im_end|>]]\n"
    )
    assert "Input" not in marked(load([{**row, "input": ""}], plain), plain)


def test_text_carries_loss_on_every_token_but_the_first(load, make_tokenizer):
    plain, with_bos = make_tokenizer(None), make_tokenizer(None, adds_bos=True)
    for tokenizer in (plain, with_bos):
        columns = load([{"text": "the answer is 42"}], tokenizer).columns
        assert columns.loss_weight.all()
        assert len(columns.loss_weight) == len(columns.input_ids) - 1
        assert columns.unscored_first_tokens == 0


def test_ready_tokens(load, make_tokenizer):
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, -100]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1], "num_actions": 3},
        {"input_ids": [5, 6, 7, 8], "num_actions": 1},
    ]
    columns = load(rows, make_tokenizer(None)).columns
    assert np.diff(columns.action_offsets).tolist() == [2, 2, 3, 1]
    assert columns.loss_weight.tolist() == [1, 0, 1, 1, 1, 0, 1, 1]
    assert columns.input_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2, 3], "num_actions": 2, "loss_mask": [1, 1, 1]}, "'loss_mask': it has 3 entries for 2 response tokens"),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1, 1]}, "'loss_mask': it has 4 entries for 3 tokens"),
        ({"input_ids": [1, 2, 3], "num_actions": 4}, "4 response tokens do not fit 3 tokens"),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 2, 1]}, "values other than 0 and 1"),
        ({"input_ids": [1, 2.5], "num_actions": 1}, "'input_ids': a flat list of integers is needed"),
        ({"input_ids": [1, -2], "num_actions": 1}, "the token id -2 is negative"),
        ({"input_ids": [1, 2**32 + 2], "num_actions": 1}, "'input_ids': an integer needs more than 32 bits"),
        ({"input_ids": [1, 2], "labels": [-100, 2**32 + 2]}, "'labels': an integer needs more than 32 bits"),
        ({"input_ids": [], "num_actions": 0}, "there is no token"),
        ({"input_ids": [1, 2], "labels": [-100]}, "it has 1 entries for 2 tokens"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "label 2 at position 0 is not the token 1"),
    ],
)
def test_ready_tokens_that_do_not_fit_are_named(load, make_tokenizer, row, message):
    with pytest.raises(DataError, match=r"sample 1 \(.*rows.jsonl line 2\)") as caught:
        load([{"input_ids": [1, 2], "num_actions": 1, "loss_mask": [1], "labels": None}, row], make_tokenizer(None))
    assert message in caught.value.cause


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "the list of messages is empty"),
        ({"messages": {"role": "user"}}, "a list of messages is needed, not dict"),
        ({"messages": "hello"}, "the text is not JSON"),
        ({"messages": ["hello"]}, "message 0 is str, not an object"),
        ({"messages": [{"content": "x"}]}, "message 0 has no role; it has 'content'"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 0 has int as content"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message to learn from, only user"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "neither text nor image"),
        ({"prompt": "x", "completion": [1]}, "'completion': message 0 is int, not an object"),
        ({"prompt": "x", "completion": 1}, "'completion': a string is needed, not int"),
        ({"text": None}, "a string is needed, not nothing"),
        ({"text": "cut emoji \ud83d"}, r"half a character ('\ud83d' at place 10 of its text)"),
        ({"messages": [{"role": "assistant", "content": "\ud83d"}]}, "half a character"),
        ({"instruction": "x", "output": 1}, "a string is needed, not int"),
    ],
)
def test_rows_that_do_not_fit_their_format_are_named(load, make_tokenizer, row, message):
    with pytest.raises(DataError) as caught:
        load([row], make_tokenizer())
    assert "sample 0 (" in caught.value.cause
    assert message in caught.value.cause


def test_images_that_do_not_match_their_parts_are_refused(load, make_tokenizer):
    messages = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "x"}]
    with pytest.raises(DataError, match="has 0 images for more image parts"):
        load([{"messages": messages}], make_tokenizer())
    with pytest.raises(DataError, match="2 images for 1 image parts"):
        load([{"messages": messages, "images": ["a", "b"]}], make_tokenizer())


def test_a_template_for_text_alone_refuses_images(load, make_tokenizer):
    messages = [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}, {"role": "assistant", "content": "x"}]
    tokenizer = make_tokenizer()
    with pytest.raises(DataError, match="the chat template refuses images"):
        load([{"messages": messages}], tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="does not know image parts"):
        load([{"messages": messages}], tokenizer)


def test_prompt_and_response_are_a_prompt_and_its_completion(load, make_tokenizer, marked):
    tokenizer = make_tokenizer("chatml")
    as_completion = marked(load([{"prompt": "a", "completion": "b"}], tokenizer), tokenizer)
    dataset = load([{"prompt": "a", "response": "b"}], tokenizer)
    assert (dataset.format, marked(dataset, tokenizer)) == ("prompt_completion", as_completion)
    dataset = load([{"prompt": "a", "response": "b"}], tokenizer, format="prompt_completion")
    assert marked(dataset, tokenizer) == as_completion
    # what another format describes already keeps its meaning
    assert load([{"prompt": "a", "response": "b", "text": "c"}], tokenizer).format == "text"
    messages = [{"role": "assistant", "content": "b"}]
    row = {"prompt": [{"role": "user", "content": "a"}], "response": messages}
    assert load([row], tokenizer).format == "prompt_completion"


def test_columns_that_no_format_knows_are_answered_with_how_to_name_them(load, make_tokenizer):
    with pytest.raises(DataError, match=r"data\.map\.prompt=frage data\.map\.completion=antwort"):
        load([{"frage": "a", "antwort": "b"}], make_tokenizer("chatml"))
