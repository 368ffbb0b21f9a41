"""Suffixes of tokenizers that put a space in front of every text: the tokens are those of the whole dialogue, rendered and encoded at once.

SentencePiece's tokenizers, Llama 2's among them, write `▁` where a text begins. What follows a turn is no beginning, although it is encoded
apart. Three such tokenizers are made here, by `tokenizers`, as models ship them.
"""

import string
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.rollout.chat_renderer import ChatRenderer

PLAIN = """\
{%- for m in messages -%}{{ m.role + ': ' + m.content + '\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}"""
LLAMA_2 = """\
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' </s>' }}{% endif -%}
{%- endfor -%}"""
TEXTS = ["user: 2 + 2 =", "assistant: 4 and so on", "user: again", "[INST] a question [/INST] an answer", "1 2 3 . , ! ?"]
"""None has a newline, which so stays a token of its own, as it is in Llama 2."""

QUESTION, ANSWER = {"role": "user", "content": "2 + 2 ="}, {"role": "user", "content": "again, and a longer one"}
REPLIES = ("4", "and so on", "4.", "an answer, a question!")


def make_tokenizer(kind: str, template: str) -> Any:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    if kind == "normalizer":
        # Llama 2's own: https://huggingface.co/docs/tokenizers, `Prepend` and `Replace`
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        pre = pre_tokenizers.Split(Regex(r"▁[^▁]*|\n"), "isolated")
    else:
        pre = pre_tokenizers.Metaspace(prepend_scheme=kind)
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    alphabet = [*string.digits, *string.ascii_letters, *string.punctuation, "▁", "\n"]
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=150, special_tokens=special, initial_alphabet=alphabet))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


KINDS = ("first", "always", "normalizer")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [PLAIN, LLAMA_2], ids=["plain", "llama 2"])
def test_a_suffix_has_the_tokens_of_the_whole_dialogue(kind: str, template: str) -> None:
    tokenizer = make_tokenizer(kind, template)
    renderer = ChatRenderer(tokenizer)
    renderer.validate_template()
    suffix = renderer.suffix([ANSWER], None).tolist()
    for reply in REPLIES:
        dialogue = [QUESTION, {"role": "assistant", "content": reply}, ANSWER]
        text = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        before = tokenizer(text.partition(reply)[0] + reply, add_special_tokens=False)["input_ids"]
        assert whole == [*before, *suffix], (reply, tokenizer.convert_ids_to_tokens(whole), tokenizer.convert_ids_to_tokens(suffix))
    assert tokenizer.convert_ids_to_tokens(suffix)[0] in ("\n", "▁")


@pytest.mark.parametrize("kind", KINDS)
def test_these_tokenizers_gain_a_space_on_their_own(kind: str) -> None:
    """Without which the test above would hold of any renderer."""
    tokenizer = make_tokenizer(kind, PLAIN)
    alone, behind = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("\nuser:", "4\nuser:"))
    assert tokenizer.convert_ids_to_tokens(alone)[0].startswith("▁")
    four = tokenizer("4", add_special_tokens=False)["input_ids"]
    assert behind[: len(four)] == four
    assert not tokenizer.convert_ids_to_tokens(behind)[len(four)].startswith("▁")


def make_joining_tokenizer() -> Any:
    """A tokenizer that joins a newline with every letter, digit or mark before it."""
    joined = [*string.ascii_letters, *string.digits, *string.punctuation]
    pieces = ["<unk>", "▁", "\n", *joined, *(f"{letter}\n" for letter in joined)]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[(letter, "\n") for letter in joined],
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    made.chat_template = PLAIN
    return made


def test_a_suffix_without_tokens_of_its_own_is_refused_by_name() -> None:
    renderer = ChatRenderer(make_joining_tokenizer())
    with pytest.raises(UnsupportedError, match=r"puts a space before texts and joins that with .* Set rl.history"):
        renderer.validate_template()
    ChatRenderer(make_joining_tokenizer(), history="template").validate_template()


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_turn_is_left_out_where_it_was_sampled(kind: str) -> None:
    tokenizer = make_tokenizer(kind, LLAMA_2)
    renderer = ChatRenderer(tokenizer)
    whole, rest = renderer.suffix([ANSWER], None).tolist(), renderer.suffix([ANSWER], tokenizer.eos_token_id).tolist()
    assert whole[: -len(rest)] in ([tokenizer.convert_tokens_to_ids("▁"), tokenizer.eos_token_id], [tokenizer.eos_token_id])
    assert whole[-len(rest) :] == rest
    assert rest[0] == tokenizer.bos_token_id
    np.testing.assert_array_equal(renderer.closing()[1], [])  # type: ignore[index]
