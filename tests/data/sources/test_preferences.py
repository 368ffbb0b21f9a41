"""Rows of preferences in every shape that is in use, as the two samples that they become; and rows that say nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.dataset import TokenizedDataset, load_columns
from skyrl_engine.data.preview import preview
from skyrl_engine.errors import DataError

ASK = {"role": "user", "content": "hi"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
HH = "\n\nHuman: hi\n\nAssistant: yes\n\nHuman: more?\n\nAssistant:"

Load = Callable[..., tuple[TokenizedDataset, Any]]


@pytest.fixture
def load(make_tokenizer: Callable[..., Any], tmp_path: Path) -> Load:
    """`load(rows, template=..., **data)`: the dataset of these rows as preferences, and its tokenizer."""

    def load_pairs(*rows: dict[str, Any], template: str | None = "chatml", **settings: Any) -> tuple[TokenizedDataset, Any]:
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = make_tokenizer(template)
        data = DataConfig(train=str(path), cache=str(tmp_path / "cache"), **settings)
        return load_columns(data, tokenizer, split="train", reading="preferences"), tokenizer

    return load_pairs


def show(dataset: TokenizedDataset, tokenizer: Any) -> list[tuple[str | None, str, str]]:
    """Role, text without loss and text with loss of every sample."""
    return [
        (
            sample.role,
            "".join(token.text for token in sample.tokens if not token.loss),
            "".join(token.text for token in sample.tokens if token.loss),
        )
        for sample in preview(dataset, tokenizer, samples=len(dataset)).samples
    ]


CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ROWS: dict[str, tuple[dict[str, Any], str | None, tuple[str, str], tuple[str, str]]] = {
    "explicit text": ({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, None, ("2 + 2 =",) * 2, (" 4", " 5")),
    "implicit text": ({"chosen": "the sum is 14", "rejected": "the sum is 15"}, None, ("the sum is 1",) * 2, ("4", "5")),
    "explicit messages": ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, "chatml", (CHAT, CHAT), ("good", "bad")),
    "implicit messages": ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "chatml", (CHAT, CHAT), ("good", "bad")),
    "prompt repeated": ({"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "chatml", (CHAT, CHAT), ("good", "bad")),
    "UltraFeedback": (
        {"prompt": "hi", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "messages": [ASK, GOOD], "score_chosen": 8.0},
        "chatml",
        (CHAT, CHAT),
        ("good", "bad"),
    ),
    "a question and messages": ({"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]}, "chatml", (CHAT, CHAT), ("good", "bad")),
    "HH, plain": ({"chosen": f"{HH} good", "rejected": f"{HH} bad"}, None, (HH, HH), (" good", " bad")),
    "HH, as a chat": (
        {"chosen": "\n\nHuman: hi\n\nAssistant: good", "rejected": "\n\nHuman: hi\n\nAssistant: bad"},
        "chatml",
        (CHAT, CHAT),
        ("good", "bad"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_two_samples_of_one_unit(load: Load, name: str) -> None:
    """Loss falls on both answers, to the token that ends them, and on nothing of the prompt."""
    row, template, prompts, answers = ROWS[name]
    dataset, tokenizer = load(row, row | {"other": 1}, template=template)
    assert dataset.columns.unit_ids.tolist() == [0, 0, 1, 1]
    assert dataset.columns.sample_values["role"].tolist() == [0, 1, 0, 1]
    assert dataset.columns.sample_values["row"].tolist() == [0, 0, 1, 1]
    end = "<|im_end|>" if template else tokenizer.eos_token
    for (role, before, after), wanted, prompt, answer in zip(
        show(dataset, tokenizer)[:2], ("chosen", "rejected"), prompts, answers, strict=True
    ):
        assert role == wanted
        assert before.rstrip("\n").endswith(prompt.rstrip("\n"))
        assert after == answer + end


def make_rated_row(*scores: Any, **others: Any) -> dict[str, Any]:
    """A raw row of UltraFeedback: `scores` are the answers' overall_score, finer ones the other way round."""
    answers = [
        {
            "model": f"m{place}",
            "response": f"answer {place}",
            "overall_score": score,
            "fine-grained_score": 9 - place,
            "annotations": {},
        }
        for place, score in enumerate(scores)
    ]
    return {"instruction": "hi", "completions": answers, "source": "x", **others}


def test_of_rated_answers_the_best_stands_against_the_worst(load: Load) -> None:
    """The first of several best or worst counts; rows without a difference are left out and counted; a row is a unit, named by its number."""
    rows = [make_rated_row(5.0, 8, 2, 8), make_rated_row(6, 6, 6, 6), make_rated_row(1, 1, 7.5, 3, instruction=None, prompt="hi")]
    dataset, tokenizer = load(*rows)
    assert dataset.format == "ratings"
    seen = show(dataset, tokenizer)
    assert [role for role, *_ in seen] == ["chosen", "rejected"] * 2
    assert all(before.rstrip("\n").endswith(CHAT.rstrip("\n")) for _, before, _ in seen)
    assert [after for *_, after in seen] == [f"answer {place}<|im_end|>" for place in (1, 2, 2, 0)]
    assert dataset.columns.unit_ids.tolist() == [0, 0, 2, 2]
    assert (dataset.counts.rows, dataset.counts.dropped_ties, dataset.counts.dropped) == (3, 1, 1)
    finer, _ = load(*rows, rating="fine-grained_score")
    assert [after for *_, after in show(finer, tokenizer)[:2]] == ["answer 0<|im_end|>", "answer 3<|im_end|>"]
    plain, tokenizer = load(rows[0], template=None)
    assert all(before.rstrip("\n").endswith("hi") for _, before, _ in show(plain, tokenizer))


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (make_rated_row(5), "two rated answers or more are needed"),
        (make_rated_row(5, "N/A"), "answer 1 has no number 'overall_score': 'N/A' stands there"),
        (make_rated_row(5, None), "answer 1 has no number 'overall_score'; it has 'model', 'response'"),
        (make_rated_row(5, 3, instruction=["hi"]), "column 'instruction': a string is needed"),
        (
            make_rated_row(5, 3) | {"completions": [{"response": " ", "overall_score": 1}, {"response": "b", "overall_score": 2}]},
            "answer 0 has no text",
        ),
    ],
)
def test_rated_answers_that_say_nothing_are_refused(load: Load, row: dict[str, Any], cause: str) -> None:
    with pytest.raises(DataError, match=cause):
        load(row)


def test_single_answers_have_a_role_and_no_partner(load: Load) -> None:
    dataset, _ = load(
        {"prompt": "2 + 2 =", "completion": " 4", "label": True},
        {"prompt": "2 + 2 =", "completion": " 5", "label": False},
        template=None,
    )
    assert dataset.format == "unpaired_preference"
    assert dataset.columns.sample_values["role"].tolist() == [0, 1]
    assert dataset.columns.unit_ids.tolist() == [0, 1]


def test_every_turn_of_an_answer_carries_loss(load: Load) -> None:
    """Dialogues that part early go on differently: the last answer alone would be judged after two prompts."""
    more = {"role": "user", "content": "more"}
    dataset, tokenizer = load({"chosen": [ASK, GOOD, more, GOOD], "rejected": [ASK, BAD, more, GOOD]})
    assert [after for *_, after in show(dataset, tokenizer)] == ["good<|im_end|>good<|im_end|>", "bad<|im_end|>good<|im_end|>"]


def test_all_tokens_after_the_prompt_carry_loss_where_that_is_asked_for(load: Load) -> None:
    more = {"role": "user", "content": "more"}
    dataset, tokenizer = load({"chosen": [ASK, GOOD, more, GOOD], "rejected": [ASK, BAD]}, loss_on="completion")
    good, bad = (after for *_, after in show(dataset, tokenizer))
    assert good == "good<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ngood<|im_end|>\n"
    assert bad == "bad<|im_end|>\n"


def test_no_pair_is_dropped_by_half(load: Load) -> None:
    """`max_samples` counts rows; a half that is too long takes the other with it."""
    long = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5" * 40}
    short = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    dataset, _ = load(short, long, short, short, template=None, max_length=30, overlong="drop", max_samples=3)
    assert dataset.columns.sample_values["row"].tolist() == [0, 0, 2, 2]
    assert (dataset.counts.rows, dataset.counts.dropped_overlong, dataset.counts.dropped_with_unit) == (3, 1, 1)


def test_truncation_leaves_both_halves_the_same_prompt_and_the_same_room(load: Load) -> None:
    row = {"prompt": "2 + 2 =", "chosen": " 4" * 40, "rejected": " 5" * 50}
    dataset, _ = load(row, template=None, max_length=30, overlong="truncate")
    assert np.diff(dataset.columns.token_offsets).tolist() == [30, 30]
    assert len(set(np.diff(dataset.columns.action_offsets).tolist())) == 1
    prompt = 30 - int(np.diff(dataset.columns.action_offsets)[0])
    assert dataset.columns.input_ids[:prompt].tolist() == dataset.columns.input_ids[30 : 30 + prompt].tolist()


def test_pairs_that_truncation_makes_equal_are_left_out_and_counted(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    """The pair whose answers part before the cut stays; a pair of which the cut leaves no answer is over-long as before."""
    part_late = {"prompt": "2 + 2 =", "chosen": " 4" * 40 + " 1", "rejected": " 4" * 40 + " 5"}
    part_early = {"prompt": "2 + 2 =", "chosen": " 4" * 40, "rejected": " 5" * 40}
    no_answer = {"prompt": "2" * 40, "chosen": " 4", "rejected": " 5"}
    for template in (None, "chatml"):
        caplog.clear()
        with caplog.at_level("WARNING", logger="skyrl_engine"):
            dataset, _ = load(part_late, part_early, part_late, no_answer, template=template, max_length=30, overlong="truncate")
        assert dataset.columns.sample_values["row"].tolist() == [1, 1]
        counts = dataset.counts
        assert (counts.rows, counts.samples, counts.dropped_equal, counts.dropped_overlong, counts.truncated) == (4, 2, 4, 2, 2)
        assert counts.dropped == 6
        assert "2 pairs of" in caplog.text
        assert "cut to data.max_length = 30 tokens, their two answers are equal" in caplog.text
    with pytest.raises(DataError, match="2 are of pairs whose answers are equal once cut"):
        load(part_late, template=None, max_length=30, overlong="truncate")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no rejected answer": ({"prompt": "a", "chosen": "b", "rejected": None}, "column 'rejected': there is no rejected answer"),
    "an empty answer": ({"prompt": "a", "chosen": " ", "rejected": "c"}, "column 'chosen': the answer is empty"),
    "an empty list": ({"chosen": [ASK, GOOD], "rejected": []}, "column 'rejected': the rejected answer is empty"),
    "an empty message": (
        {"chosen": [ASK, GOOD], "rejected": [ASK, {"role": "assistant", "content": ""}]},
        "column 'rejected': the answer is empty",
    ),
    "equal texts": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "column 'rejected': it is equal to the chosen answer"),
    "equal messages": ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "column 'rejected': it is equal to the chosen answer"),
    "different prompts": (
        {"chosen": [ASK, GOOD], "rejected": [{"role": "user", "content": "ho"}, BAD]},
        "column 'rejected': message 0 differs from the chosen half's, and is no answer: the prompts are different",
    ),
    "nothing in common": ({"chosen": "one", "rejected": "two"}, "column 'rejected': it has no beginning in common"),
    "a prompt alone": ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "column 'rejected': there is no rejected answer"),
    "two kinds": (
        {"prompt": "a", "chosen": "b", "rejected": [BAD]},
        "column 'rejected': it is list while the chosen answer is str",
    ),
    "a label that is no boolean": ({"prompt": "a", "completion": "b", "label": 2}, "column 'label': 2 is neither true nor false"),
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_say_nothing_are_refused_by_name(load: Load, name: str) -> None:
    row, words = WRONG[name]
    right = {"prompt": "a", "completion": "b", "label": True} if "label" in row else {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError) as error:
        load(right, row)
    assert "sample 1 (" in str(error.value)
    assert words in str(error.value)


def test_other_rows_are_refused_with_what_is_needed(load: Load) -> None:
    with pytest.raises(DataError, match="no format of preferences has the columns") as error:
        load({"prompt": "a", "completion": "b"})
    assert "format preference needs chosen or chosen_response and rejected or rejected_response" in error.value.details
