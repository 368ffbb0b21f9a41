"""Keys of a message about its own loss: `weight` as OpenAI stores it, and the booleans of other trainers."""

import numpy as np
import pytest

from skyrl_engine.data.preview import preview
from skyrl_engine.errors import DataError

TURNS = ("hi", "yo", "bye", "ok then", "more", "fine")


def make_conversation(chat, *keys_of_replies):
    """Three questions and replies, with these keys on the replies."""
    row = chat(*TURNS)
    for message, keys in zip(row["messages"][1::2], keys_of_replies, strict=True):
        message.update(keys)
    return row


def replies(text):
    return [reply.partition("]]")[0].partition("<|im_end|>")[0].partition("<|eot|>")[0].strip() for reply in text.split("[[")[1:]]


@pytest.mark.parametrize("template", ["chatml", "headers", "thinking", "unmarked", "instructions", "tagged"])
@pytest.mark.parametrize(
    ("loss_on", "keys", "expected"),
    [
        ("all", ({"weight": 0}, {}, {}), ["ok then", "fine"]),
        ("all", ({}, {"weight": 0}, {}), ["yo", "fine"]),
        ("all", ({}, {}, {"weight": 0.0}), ["yo", "ok then"]),
        ("all", ({"train": False}, {"training": False}, {"loss": True}), ["fine"]),
        ("all", ({"weight": 1}, {"weight": 0, "train": False}, {"weight": None}), ["yo", "fine"]),
        # the word of a message counts before data.loss_on
        ("last", ({"weight": 1}, {}, {}), ["yo", "fine"]),
        ("last", ({"weight": 1}, {}, {"weight": 0}), ["yo"]),
        ("last", ({}, {"train": True}, {"weight": 0}), ["ok then"]),
    ],
)
def test_turns_train_as_their_messages_say(load, make_tokenizer, marked, chat, *, template, loss_on, keys, expected):
    tokenizer = make_tokenizer(template)
    dataset = load([make_conversation(chat, *keys)], tokenizer, loss_on=loss_on)
    found = [reply.removeprefix("<think>\n\n</think>\n\n") for reply in replies(marked(dataset, tokenizer))]
    assert found == expected


@pytest.mark.parametrize("template", ["chatml", "headers", "thinking", "unmarked", "instructions", "tagged"])
def test_a_weight_of_a_message_is_that_of_its_tokens(load, make_tokenizer, chat, template):
    """Turns of other weights carry their own, also where the template's tags alone say where turns are."""
    dataset = load(
        [make_conversation(chat, {"weight": 0.5}, {"weight": 0}, {"weight": 2})], make_tokenizer(template), loss_on="all"
    )
    weights = dataset.columns.loss_weight
    assert weights.dtype == np.float32
    found = weights[np.flatnonzero(np.diff(weights, prepend=0))]
    assert [weight for weight in found.tolist() if weight] == [0.5, 2.0]
    alone = load([make_conversation(chat, {}, {}, {"weight": 0.25})], make_tokenizer(template))
    assert set(alone.columns.loss_weight.tolist()) - {0.0} == {0.25}


def test_a_conversation_without_any_such_key_is_what_it_was(load, make_tokenizer, marked, chat):
    tokenizer = make_tokenizer("chatml")
    plain = marked(load([chat(*TURNS)], tokenizer, loss_on="all"), tokenizer)
    assert marked(load([make_conversation(chat, {"weight": 1}, {"train": True}, {})], tokenizer, loss_on="all"), tokenizer) == plain


def test_a_sample_without_loss_left_is_dropped_and_counted(load, make_tokenizer, chat):
    tokenizer = make_tokenizer("tagged")
    nothing = make_conversation(chat, *[{"weight": 0}] * 3)
    dataset = load([nothing, chat("hi", "yo")], tokenizer, loss_on="all")
    assert (dataset.counts.samples, dataset.counts.dropped_without_loss, dataset.counts.excluded_turns) == (1, 1, 3)
    assert preview(dataset, tokenizer).counts.excluded_turns == 3
    with pytest.raises(DataError, match="1 had no token that carries loss"):
        load([nothing], tokenizer, loss_on="all")


def test_weight_zero_on_the_only_last_turn_leaves_no_loss_under_loss_on_last(load, make_tokenizer, chat):
    dataset = load([make_conversation(chat, {}, {}, {"weight": 0}), chat("hi", "yo")], make_tokenizer("chatml"))
    assert (dataset.counts.samples, dataset.counts.dropped_without_loss) == (1, 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weight": float("nan")}, "message 1 has weight nan"),
        ({"weight": "0"}, "message 1 has weight '0'"),
        ({"weight": True}, "message 1 has weight True"),
        ({"weight": -1}, "message 1 has weight -1"),
        ({"train": 0}, "message 1 has train 0"),
        ({"training": "no"}, "message 1 has training 'no'"),
        ({"weight": 0, "train": True}, "message 1 contradicts itself: weight 0, train true"),
        ({"train": False, "training": True}, "message 1 contradicts itself: train false, training true"),
        ({"train_detail": [{"begin_offset": 0}]}, "message 1 has 'train_detail'"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_sample_and_field(load, make_tokenizer, chat, keys, message):
    with pytest.raises(DataError, match=rf"sample 0 \(.* line 1\), column 'messages': {message}"):
        load([make_conversation(chat, keys, {}, {})], make_tokenizer("chatml"))


def test_loss_falls_on_assistant_messages_alone(load, make_tokenizer, marked, chat):
    """Weight 0 on a question says nothing new; weight 1 asks for what no run does."""
    tokenizer = make_tokenizer("chatml")
    row = chat("hi", "yo")
    row["messages"][0]["weight"] = 0
    assert replies(marked(load([row], tokenizer), tokenizer)) == ["yo"]
    row["messages"][0]["weight"] = 1
    with pytest.raises(DataError, match=r"message 0 of role 'user' asks for loss \(weight 1\)"):
        load([row], tokenizer)


def test_a_prompt_of_messages_carries_no_loss(load, make_tokenizer):
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": True}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "c"}]}
    with pytest.raises(DataError, match="column 'prompt': message 1 asks for loss"):
        load([row], make_tokenizer("chatml"))
