"""The token at which the answers of a preference begin: TRL's, derived here from what its trainers do, on rows of every shape and tokenizers of
several kinds.

`nox -s peers` compares with TRL itself (tests/proof/preferences_of_trl.py).
"""

import json
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.dataset import TokenizedDataset, load_columns
from skyrl_engine.data.text.plain import PlainText
from skyrl_engine.data.text.tokenization import SampleTokenizer
from skyrl_engine.errors import DataError

CORPUS = [
    "Sky is blue and the sky is green",
    "The sum is 14, the sum is 15, unbelievable and unbelievably",
    "今天天气很好，今天天气很坏，明天会下雨吗？",
    "今日は天気がいいです。明日は雨が降りますか。",
    "วันนี้อากาศดีมาก พรุ่งนี้ฝนจะตก",
    "user: hi\nassistant: good\n",
] * 8
UNMARKED = """\
{%- for m in messages -%}{{ m.role + ': ' + m.content + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}"""
"""A template whose generation prompt ends without the space that replies begin with, as messages here do."""
GLUED = """\
{%- for m in messages -%}{{ m.role + ': ' + m.content }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""
"""A template whose generation prompt ends in a space, with which an answer's first token merges."""
SPECIAL = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """A tokenizer as sentencepiece makes them: spaces are a sign of their own, and the best way to cut a text may change far back."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.UnigramTrainer(vocab_size=220, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """A tokenizer of Llama 2's kind: merges go across words, and a beginning-of-text token comes before every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=260, special_tokens=[*SPECIAL, "<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {"byte-level": byte_level, "unigram": unigram, "sentencepiece": sentencepiece_bpe}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=KINDS[request.param](), bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )


def split_by_trl(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """Prompt, chosen and rejected ids of TRL 1.16: `extract_prompt`, then `DPOTrainer._prepare_dataset`."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if prompt is None:
        shorter = min(len(chosen), len(rejected))
        end = next((place for place in range(shorter) if chosen[place] != rejected[place]), None)
        if end is None:
            end = shorter - 1
        elif chosen[end - 1] == " ":
            end -= 1
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    if isinstance(prompt, str):
        alone = tokenizer(prompt)["input_ids"]
        wholes = [tokenizer(f"{prompt}{answer}</s>")["input_ids"] for answer in (chosen, rejected)]
    else:
        rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        alone = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        texts = [tokenizer.apply_chat_template(prompt + answer, tokenize=False) for answer in (chosen, rejected)]
        wholes = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    length = min(count_shared(alone, whole) for whole in wholes)
    return alone[:length], wholes[0][length:], wholes[1][length:]


def count_shared(one: list[int], other: list[int]) -> int:
    """The number of tokens with which both begin."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def load(folder: Path, tokenizer: Any, *rows: dict[str, Any]) -> TokenizedDataset:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_columns(DataConfig(train=str(path), cache=str(folder / "cache")), tokenizer, split="train", reading="preferences")


def halves_of(dataset: TokenizedDataset, pair: int = 0) -> list[tuple[list[int], list[int]]]:
    """The prompt and the answer of both halves, in tokens."""
    columns, halves = dataset.columns, []
    for sample in (2 * pair, 2 * pair + 1):
        ids = columns.input_ids[columns.token_offsets[sample] : columns.token_offsets[sample + 1]].tolist()
        answer = int(columns.action_offsets[sample + 1] - columns.action_offsets[sample])
        halves.append((ids[: len(ids) - answer], ids[len(ids) - answer :]))
    return halves


TEXTS: dict[str, dict[str, Any]] = {
    "a prompt that ends in a newline": {"chosen": "The sum is\n14", "rejected": "The sum is\n15 and"},
    "newlines at the end of the prompt": {"chosen": "Sky is green\n\nand", "rejected": "Sky is green\n\nblue"},
    "words": {"chosen": "The sky is blue", "rejected": "The sky is green"},
    "a part of a word": {"chosen": "It is unbelievable", "rejected": "It is unbelievably"},
    "numbers": {"chosen": "The sum is 14", "rejected": "The sum is 15"},
    "two spaces": {"chosen": "The sum is  14", "rejected": "The sum is  25"},
    "Chinese": {"chosen": "今天天气很好", "rejected": "今天天气很坏"},
    "Japanese": {"chosen": "今日は天気がいいです。", "rejected": "今日は雨が降ります。"},
    "Thai": {"chosen": "วันนี้อากาศดีมาก", "rejected": "วันนี้ฝนจะตก"},
    "emoji": {"chosen": "Sky is 😀", "rejected": "Sky is 😁 and"},
    "the chosen text begins the rejected one": {"chosen": "The sum is", "rejected": "The sum is 14"},
    "the rejected text begins the chosen one": {"chosen": "今天天气很好，明天", "rejected": "今天天气很好"},
    "explicit, one answer merges": {"prompt": "Sky is ", "chosen": "blue", "rejected": "Zoë"},
    "explicit, both answers merge": {"prompt": "Sky is ", "chosen": "blue", "rejected": "green"},
    "explicit, answers begin with a space": {"prompt": "Sky is", "chosen": " blue", "rejected": " green"},
    "explicit, within a word": {"prompt": "It is unbeliev", "chosen": "able", "rejected": "ers"},
    "explicit, Chinese": {"prompt": "今天天气", "chosen": "很好", "rejected": "下雨"},
    "explicit, a newline": {"prompt": "user: hi\n", "chosen": "good", "rejected": "\nbad"},
    "explicit, one answer begins the other": {"prompt": "The sum is", "chosen": " 1", "rejected": " 14"},
}
ASK = [{"role": "user", "content": "The sum?"}]
MESSAGES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (template, {"prompt": ASK, **{half: [{"role": "assistant", "content": text}] for half, text in answers.items()}})
    for name, template, answers in (
        ("an answer merges with the generation prompt", GLUED, {"chosen": "blue", "rejected": "Zoë"}),
        ("nothing merges", UNMARKED, {"chosen": "blue", "rejected": "Zoë"}),
    )
}


@pytest.mark.parametrize("name", TEXTS)
def test_answers_of_texts_begin_where_trl_lets_them(tokenizer: Any, tmp_path: Path, name: str) -> None:
    """Both halves have one prompt, and every token after it is an answer's."""
    prompt, *answers = split_by_trl(tokenizer, TEXTS[name])
    halves = halves_of(load(tmp_path, tokenizer, TEXTS[name]))
    lost = 1 if not prompt else 0  # nothing comes before the first token: it is not scored
    assert [prompt_ids for prompt_ids, _ in halves] == [prompt or answer[:1] for answer in answers]
    assert [answer for _, answer in halves] == [answer[lost:] for answer in answers]


@pytest.mark.parametrize("name", MESSAGES)
def test_answers_of_messages_begin_where_trl_lets_them(tokenizer: Any, tmp_path: Path, name: str) -> None:
    template, row = MESSAGES[name]
    tokenizer.chat_template = template
    try:
        prompt, *answers = split_by_trl(tokenizer, row)
        assert halves_of(load(tmp_path, tokenizer, row)) == [(prompt, answer) for answer in answers]
    finally:
        tokenizer.chat_template = None


def test_an_answer_that_merges_takes_the_other_half_with_it(tmp_path: Path) -> None:
    """A token holds the space and `blue`, and none the space and `Zoë`: the space belongs to both answers, not to one of them."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>", pad_token="</s>")
    (one, chosen), (other, rejected) = halves_of(load(tmp_path, tokenizer, TEXTS["explicit, one answer merges"]))
    assert one == other == tokenizer("Sky is", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(chosen) == " blue</s>"
    assert tokenizer.decode(rejected) == " Zoë</s>"


ALPHABET = "Sky is blue 14\n今天天气很好坏วันนี้"


@pytest.mark.parametrize("has_offsets", [True, False])
def test_a_span_has_loss_exactly_if_it_has_characters(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, has_offsets: bool) -> None:
    """An empty one inside a token trained that token; without offsets, one whose end merged with what follows could train none."""
    monkeypatch.setattr(type(tokenizer), "is_fast", property(lambda _: has_offsets))
    texts = [
        PlainText(text, spans=(span,))
        for text in ("Sky is", "is is is")
        for span in combinations_with_replacement(range(len(text) + 1), 2)
    ]
    samples = SampleTokenizer(tokenizer, loss_on="last")((0, "row", text) for text in texts)
    for text, sample in zip(texts, samples, strict=True):
        assert text.spans is not None
        ((start, end),) = text.spans
        assert sample.loss.any() == (start < end)
        assert sample.boundary_tokens <= (start < end)


@settings(deadline=None)
@given(prompt=st.text(ALPHABET), answers=st.tuples(*[st.text(ALPHABET, min_size=1)] * 2))
def test_any_prompt_and_answers_begin_where_trl_lets_them(tokenizer: Any, prompt: str, answers: tuple[str, str]) -> None:
    halves = [(0, half, PlainText(prompt + text, len(prompt))) for half, text in zip(("chosen", "rejected"), answers, strict=True)]
    samples = SampleTokenizer(tokenizer, loss_on="last", preferences=True)(halves)
    # unknown characters on both sides of a prompt's end become one unknown token, which TRL takes for the prompt's
    assume(not any(tokenizer.unk_token_id in sample.input_ids.tolist() for sample in samples))
    expected, *_ = split_by_trl(tokenizer, {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    for sample in samples:
        start = len(expected)
        assert sample.input_ids[:start].tolist() == expected
        assert not sample.loss[:start].any()
        assert sample.loss[start:].all()


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"chosen": "blue", "rejected": "green"}, "no beginning in common"),
        ({"chosen": " blue", "rejected": " green"}, "no beginning in common"),
        ({"chosen": "今天天气很好", "rejected": "今天天气很好"}, "it is equal to the chosen answer"),
        ({"chosen": "Sky is\n", "rejected": "Sky is\nblue"}, "column 'chosen': the answer is empty"),
        ({"chosen": "Sky is blue", "rejected": ""}, "column 'rejected': the answer is empty"),
        ({"prompt": "Sky is", "chosen": " blue", "rejected": ""}, "column 'rejected': the answer is empty"),
    ],
)
def test_texts_without_a_prompt_or_an_answer_are_refused(tokenizer: Any, tmp_path: Path, row: dict[str, Any], cause: str) -> None:
    with pytest.raises(DataError, match=cause):
        load(tmp_path, tokenizer, row)


def test_answers_that_the_tokenizer_makes_equal_are_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.normalizer = normalizers.Lowercase()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")
    with pytest.raises(DataError, match="its tokens are equal to the chosen answer's"):
        load(tmp_path, tokenizer, {"prompt": "Sky is", "chosen": " Blue", "rejected": " blue"})


def test_dialogues_of_hh_have_one_prompt_whatever_white_space_they_have(tokenizer: Any, tmp_path: Path) -> None:
    row = {"chosen": "\n\nHuman: hi\n\nAssistant: good", "rejected": "\n\nHuman: hi \n\nAssistant: bad"}
    (one, _), (other, _) = halves_of(load(tmp_path, tokenizer, row))
    assert one == other
    assert len(one) > 1


def test_samples_say_which_have_one_prompt(tokenizer: Any, tmp_path: Path) -> None:
    """By its text, not by its tokens: an answer that merges with its end has other tokens before it."""
    rows = [
        {"prompt": prompt, "completion": answer, "label": True}
        for prompt, answer in (("Sky is ", "blue"), ("The sum is ", "14"), ("Sky is ", "Zoë"), ("The sum is", " 14"))
    ]
    columns = load(tmp_path, tokenizer, *rows).columns
    assert np.asarray(columns.sample_values["prompt_number"]).tolist() == [0, 1, 0, 2]
