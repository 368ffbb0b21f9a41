"""A preview's contents."""

import numpy as np
import pytest

from skyrl_engine.data.preview import ColumnPreview, padding_share, preview


def test_tokens_with_their_loss(load, make_tokenizer, chat):
    tokenizer = make_tokenizer()
    shown = preview(load([chat("hi", "yo"), chat("a", "b"), chat("c", "d")], tokenizer), tokenizer, samples=2)
    assert [sample.row for sample in shown.samples] == [0, 1]
    tokens = shown.samples[0].tokens
    assert "".join(token.text for token in tokens) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    assert "".join(token.text for token in tokens if token.loss) == "yo<|im_end|>"
    assert shown.samples[0].response_tokens == len(tokenizer("yo<|im_end|>\n")["input_ids"])
    assert shown.format == "messages"
    assert shown.counts.samples == 3


def test_lengths_and_padding(load, make_tokenizer):
    rows = [{"input_ids": list(range(1, length + 1)), "num_actions": 1} for length in (2, 9, 3, 8, 10)]
    tokenizer = make_tokenizer(None)
    shown = preview(load(rows, tokenizer), tokenizer, samples=0, batch_size=2, bins=3)
    assert [(entry.low, entry.high, entry.samples) for entry in shown.histogram] == [(2, 4, 2), (5, 7, 0), (8, 10, 3)]
    assert (shown.shortest, shown.median, shown.longest) == (2, 8, 10)
    assert shown.padding_share == pytest.approx(1 - 32 / (2 * 9 + 2 * 8 + 10))
    assert shown.padding_share_sorted == pytest.approx(1 - 32 / (2 * 3 + 2 * 9 + 10))


@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [1, 100]])
def test_histogram_bins_hold_every_sample(load, make_tokenizer, lengths):
    rows = [{"input_ids": [1] * (length + 1), "num_actions": 1} for length in lengths]
    tokenizer = make_tokenizer(None)
    bins = preview(load(rows, tokenizer), tokenizer).histogram
    assert sum(entry.samples for entry in bins) == len(lengths)
    assert (bins[0].low, bins[-1].high) == (min(lengths) + 1, max(lengths) + 1)
    assert len(bins) <= 10


def test_padding_share_of_nothing_and_of_equal_lengths():
    assert padding_share(np.zeros(0, dtype=np.int64), 4) == 0
    assert padding_share(np.full(6, 7), 4) == 0


def test_groups_and_the_range_of_every_column(load, make_tokenizer):
    rows = [
        {"prompt_ids": [1], "response_ids": [2, 3], "loss_mask": [1, 0], "advantages": [0.5, 99], "group_ids": "a"},
        {"prompt_ids": [1], "response_ids": [2, 3], "advantages": [-1, 2], "group_ids": "a"},
    ]
    tokenizer = make_tokenizer(None)
    seen = preview(load(rows, tokenizer, columns=("advantages",)), tokenizer)
    assert seen.columns == (ColumnPreview("advantages", -1, 0.5, 2),), "of tokens that carry loss"
    assert seen.groups == 1
    assert preview(load([{"text": "hello there"}], tokenizer), tokenizer).groups is None


@pytest.mark.parametrize("text", ["🙂", "a🙂b", "日本語", "é", "👩‍👩‍👧 ok", "🇩🇪"])
def test_characters_of_several_tokens_are_shown_whole(load, make_tokenizer, text):
    """The byte-level tokenizer of these tests gives every byte of them a token."""
    tokenizer = make_tokenizer(None)
    seen = preview(load([{"prompt": "say:", "completion": text}], tokenizer), tokenizer)
    (sample,) = seen.samples
    assert "".join(token.text for token in sample.tokens) == f"say:{text}<|end|>"
    assert "".join(token.text for token in sample.tokens if token.loss) == f"{text}<|end|>"
    assert [token.id for token in sample.tokens] == tokenizer(f"say:{text}<|end|>")["input_ids"]


def test_half_a_character_is_shown_by_its_tokens(load, make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    ids = tokenizer("a🙂")["input_ids"]
    dataset = load([{"input_ids": [*ids[:-1], *tokenizer("b")["input_ids"]], "num_actions": 2}], tokenizer)
    (sample,) = preview(dataset, tokenizer).samples
    assert [token.text for token in sample.tokens] == ["a", *(f"<token {id_}>" for id_ in ids[1:-1]), "b"]
