"""Every shape of row that users of TRL, axolotl, LLaMA-Factory and OpenRLHF have, and those of datasets that are often trained on, as the
samples that each becomes under a chat template; and columns that are reported because nobody reads them.

The names of columns are those of the projects' own documentation in summer 2026: TRL's `dataset_formats.md`, axolotl's `dataset-formats` and
`rlhf.qmd`, LLaMA-Factory's `data/README.md`, and the datasets and command lines of OpenRLHF.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import frozen

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.dataset import TokenizedDataset, load_columns
from skyrl_engine.data.preview import preview
from skyrl_engine.errors import DataError

Turn = tuple[str, str]
Sample = tuple[str | None, Sequence[Turn], str]
"""The role of a sample, the turns before its answer, and its answer."""

USER, GOOD, BAD = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "good"},
    {"role": "assistant", "content": "bad"},
)
SYSTEM = {"role": "system", "content": "be kind"}
ASKED: Sequence[Turn] = (("user", "hi"),)
KIND: Sequence[Turn] = (("system", "be kind"), ("user", "hi"))
FOLLOWED: Sequence[Turn] = (("user", "first"), ("assistant", "one"), ("user", "hi"))
TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": {}}}


@frozen
class Shape:
    """One shape: rows of a project, how they are read, and what they become. `others` are keys of `[data]`."""

    project: str
    rows: Sequence[Mapping[str, Any]]
    samples: Sequence[Sample]
    reading: Any = "samples"
    others: Mapping[str, Any] = {}


def one(project: str, *, before: Sequence[Turn] = ASKED, **row: Any) -> Shape:
    """A row that becomes one sample, whose answer is "good"."""
    return Shape(project, [row], [(None, before, "good")])


def pair(project: str, *, before: Sequence[Turn] = ASKED, **row: Any) -> Shape:
    """A row that becomes a pair, of which "good" is the better answer."""
    return Shape(project, [row], [("chosen", before, "good"), ("rejected", before, "bad")], "preferences")


def make_judged(project: str, wanted: bool, *, before: Sequence[Turn] = ASKED, **row: Any) -> Shape:
    """A row with one answer, "good", that is wanted or is not."""
    return Shape(project, [row], [("chosen" if wanted else "rejected", before, "good")], "preferences")


SHAPES: Mapping[str, Shape] = {
    # TRL
    "conversational": one("TRL", messages=[USER, GOOD]),
    "prompt-completion": one("TRL", prompt="hi", completion="good"),
    "prompt-completion, conversational": one("TRL", prompt=[USER], completion=[GOOD]),
    "preference, explicit prompt": pair("TRL", prompt="hi", chosen="good", rejected="bad"),
    "preference, implicit prompt": pair("TRL", chosen="hi good", rejected="hi bad"),
    "preference, explicit, conversational": pair("TRL", prompt=[USER], chosen=[GOOD], rejected=[BAD]),
    "preference, implicit, conversational": pair("TRL", chosen=[USER, GOOD], rejected=[USER, BAD]),
    "preference with a margin": pair("TRL", prompt="hi", chosen="good", rejected="bad", margin=0.5),
    "unpaired preference": make_judged("TRL", True, prompt="hi", completion="good", label=True),
    "unpaired preference, conversational": make_judged("TRL", False, prompt=[USER], completion=[GOOD], label=False),
    # axolotl, fine-tuning
    "chat_template": one("axolotl", conversations=[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}]),
    "chat_template, masked turns": one(
        "axolotl",
        before=FOLLOWED,
        conversations=[
            {"from": "human", "value": "first"},
            {"from": "gpt", "value": "one", "train": False},
            {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "good", "train": True},
        ],
    ),
    "pygmalion": one("axolotl", conversations=[{"role": "user", "value": "hi"}, {"role": "assistant", "value": "good"}]),
    "alpaca": one("axolotl", before=[("user", "hi\n\nyou")], instruction="hi", input="you", output="good"),
    "gpteacher, alpaca_chat": one("axolotl", before=[("user", "hi\n\nyou")], instruction="hi", input="you", response="good"),
    "alpaca_w_system": one("axolotl", before=KIND, system="be kind", instruction="hi", input="", output="good"),
    "alpaca_w_system.load_open_orca": one("axolotl", before=KIND, system_prompt="be kind", question="hi", response="good"),
    "alpaca_chat.load_qa, jeopardy": one("axolotl", question="hi", answer="good"),
    "metharme": one("axolotl", prompt="hi", generation="good"),
    "user-defined": one("axolotl", input="hi", output="good"),
    # axolotl, preferences
    "chatml.argilla": pair(
        "axolotl", before=KIND, system="be kind", instruction="hi", chosen_response="good", rejected_response="bad"
    ),
    "chatml.icr, bradley_terry.chat_template": pair(
        "axolotl", before=KIND, system="be kind", input="hi", chosen="good", rejected="bad"
    ),
    "chatml.intel": pair("axolotl", before=KIND, system="be kind", question="hi", chosen="good", rejected="bad"),
    "chatml.prompt_pairs": pair("axolotl", before=KIND, system="be kind", prompt="hi", chosen="good", rejected="bad"),
    "chatml.ultra": pair("axolotl", before=KIND, system="be kind", prompt="hi", chosen=[USER, GOOD], rejected=[USER, BAD]),
    "zephyr.nectar": pair(
        "axolotl", prompt="hi", answers=[{"answer": "so", "rank": 2}, {"answer": "good", "rank": 1}, {"answer": "bad", "rank": 3}]
    ),
    "chat_template.default": pair("axolotl", before=KIND, messages=[SYSTEM, USER], chosen=GOOD, rejected=BAD),
    "orpo chat_template.argilla": pair("axolotl", before=KIND, system="be kind", chosen=[USER, GOOD], rejected=[USER, BAD]),
    "kto chatml.argilla": make_judged(
        "axolotl", True, before=KIND, system="be kind", instruction="hi", completion="good", label=True
    ),
    "kto chatml.argilla_chat": make_judged("axolotl", False, completion=[USER, GOOD], label=False),
    "kto chatml.intel": make_judged("axolotl", True, before=KIND, system="be kind", question="hi", completion="good", label=1),
    "kto chatml.prompt_pairs, ultra": make_judged(
        "axolotl", False, before=KIND, system="be kind", prompt="hi", completion="good", label=0
    ),
    # LLaMA-Factory
    "alpaca, with a history": one(
        "LLaMA-Factory",
        before=(("system", "be kind"), *FOLLOWED[:2], ("user", "hi\n\nyou")),
        instruction="hi",
        input="you",
        output="good",
        system="be kind",
        history=[["first", "one"]],
    ),
    "alpaca, preference": pair(
        "LLaMA-Factory", before=[("user", "hi\n\nyou")], instruction="hi", input="you", chosen="good", rejected="bad"
    ),
    "alpaca, kto": make_judged("LLaMA-Factory", True, instruction="hi", input="", output="good", kto_tag=True),
    "sharegpt, preference": pair(
        "LLaMA-Factory",
        before=FOLLOWED,
        conversations=[
            {"from": "human", "value": "first"},
            {"from": "gpt", "value": "one"},
            {"from": "human", "value": "hi"},
        ],
        chosen={"from": "gpt", "value": "good"},
        rejected={"from": "gpt", "value": "bad"},
    ),
    "sharegpt, kto": make_judged(
        "LLaMA-Factory", False, conversations=[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}], kto_tag=False
    ),
    "openai, kto": make_judged("LLaMA-Factory", True, before=KIND, messages=[SYSTEM, USER, GOOD], kto_tag=True),
    "openai, with a label": make_judged(
        "LLaMA-Factory",
        True,
        before=FOLLOWED,
        messages=[
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "one"},
            USER,
            GOOD,
        ],
        label=1,
    ),
    "sharegpt, with a system column": one(
        "LLaMA-Factory",
        before=KIND,
        conversations=[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}],
        system="be kind",
    ),
    # OpenRLHF
    "input and output, as messages": one("OpenRLHF", input=[USER], output=[GOOD]),
    "dialogues with a margin": pair("OpenRLHF", chosen=[USER, GOOD], rejected=[USER, BAD], margin=1.0),
    "prompt of messages, answers as messages": pair("OpenRLHF", before=KIND, prompt=[SYSTEM, USER], chosen=[GOOD], rejected=[BAD]),
    # datasets
    "UltraFeedback": pair(
        "datasets",
        instruction="hi",
        completions=[{"response": "bad", "overall_score": 2}, {"response": "good", "overall_score": 8.5}],
    ),
    "UltraFeedback, binarized": pair("datasets", prompt="hi", chosen=[USER, GOOD], rejected=[USER, BAD], score_chosen=8.0),
    "HH": pair("datasets", chosen="\n\nHuman: hi\n\nAssistant: good", rejected="\n\nHuman: hi\n\nAssistant: bad"),
    "SHP, the first": pair("datasets", history="hi", human_ref_A="good", human_ref_B="bad", labels=1, score_A=9, score_B=2),
    "SHP, the second": pair("datasets", history="hi", human_ref_A="bad", human_ref_B="good", labels=0, score_A=2, score_B=9),
    "HelpSteer": Shape(
        "datasets",
        [
            {"prompt": "hi", "response": "bad", "helpfulness": 1, "correctness": 4, "verbosity": 2},
            {"prompt": "hi", "response": "good", "helpfulness": 3, "correctness": 2, "verbosity": 2},
        ],
        [("chosen", ASKED, "good"), ("rejected", ASKED, "bad")],
        "preferences",
    ),
    "HelpSteer, by another number": Shape(
        "datasets",
        [
            {"prompt": "hi", "response": "good", "helpfulness": 1, "correctness": 4},
            {"prompt": "hi", "response": "bad", "helpfulness": 3, "correctness": 2},
        ],
        [("chosen", ASKED, "good"), ("rejected", ASKED, "bad")],
        "preferences",
        {"rating": "correctness"},
    ),
    "HelpSteer2, preferences": pair("datasets", prompt="hi", response_1="good", response_2="bad", preference_strength=-2),
    "HelpSteer3": pair("datasets", before=KIND, context=[SYSTEM, USER], response1="bad", response2="good", overall_preference=1),
}

Load = Callable[..., tuple[TokenizedDataset, Any]]


@pytest.fixture
def load(make_tokenizer: Callable[..., Any], tmp_path: Path) -> Load:
    """`load(rows, reading, template=..., **data)`: the dataset of these rows, and its tokenizer."""

    def load_shape(
        rows: Sequence[Mapping[str, Any]],
        reading: Any = "samples",
        *,
        tokenizer: str | None = "chatml",
        needed: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> tuple[TokenizedDataset, Any]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        built = make_tokenizer(tokenizer)
        data = DataConfig(train=str(path), cache=str(tmp_path / "cache"), **settings)
        return load_columns(data, built, split="train", reading=reading, needed=needed or {}), built

    return load_shape


def show(dataset: TokenizedDataset, tokenizer: Any) -> list[tuple[str | None, str, str]]:
    """Role, text before the first token with loss, and text with loss, of every sample."""
    return [
        (
            sample.role,
            "".join(token.text for token in sample.tokens if not token.loss).removesuffix("\n"),
            "".join(token.text for token in sample.tokens if token.loss),
        )
        for sample in preview(dataset, tokenizer, samples=len(dataset)).samples
    ]


def chat(turns: Sequence[Turn]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_read_as_it_is(load: Load, name: str) -> None:
    shape = SHAPES[name]
    dataset, tokenizer = load(shape.rows, shape.reading, **shape.others)
    expected = [(role, chat(before).removesuffix("\n"), f"{answer}<|im_end|>") for role, before, answer in shape.samples]
    assert [(role, before.removesuffix("\n"), after) for role, before, after in show(dataset, tokenizer)] == expected
    assert dataset.rendering.kind == "chat"


def test_there_are_as_many_shapes_as_are_promised() -> None:
    assert len(SHAPES) >= 30
    assert {shape.project for shape in SHAPES.values()} == {"TRL", "axolotl", "LLaMA-Factory", "OpenRLHF", "datasets"}


@pytest.mark.parametrize(
    "name", [name for name, shape in SHAPES.items() if all(isinstance(v, str | bool | int | float) for v in shape.rows[0].values())]
)
def test_a_shape_of_texts_is_trained_as_it_stands_without_a_template(load: Load, name: str) -> None:
    """Whatever comes before an answer, the answer alone carries loss; the system message and the question come before it."""
    shape = SHAPES[name]
    for tokenizer, settings in ((None, {}), ("chatml", {"template": "none"})):
        dataset, built = load(shape.rows, shape.reading, tokenizer=tokenizer, **shape.others, **settings)
        assert dataset.rendering.kind == "raw"
        for (role, before, after), (expected, turns, answer) in zip(show(dataset, built), shape.samples, strict=True):
            assert role == expected
            assert after.strip() == f"{answer}<|end|>"
            assert "<|im_start|>" not in before
            assert all(part in before for _, text in turns for part in text.split("\n\n"))


def test_text_and_ready_tokens(load: Load) -> None:
    """TRL's and LLaMA-Factory's `text`, and the tokens of TRL and axolotl, whose attention mask must not leave any out."""
    dataset, tokenizer = load([{"text": "hello there"}])
    assert show(dataset, tokenizer)[0][2].endswith("there<|end|>")
    assert dataset.rendering.kind == "raw"
    row = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 6, 7]}
    dataset, _ = load([row])
    assert dataset.columns.loss_weight.tolist() == [1, 1]
    assert dataset.rendering.kind == "tokens"
    with pytest.raises(DataError, match="column 'attention_mask': it is not 1 at every token"):
        load([{**row, "attention_mask": [0, 1, 1]}])


def test_segments_carry_loss_by_their_label(load: Load) -> None:
    """Axolotl's input_output: nothing is added to the text, and loss falls on the segments whose label is true."""
    row = {
        "segments": [
            {"label": False, "text": "[I] hi "},
            {"label": True, "text": "good"},
            {"label": False, "text": " [I] so "},
            {"label": True, "text": "bad<|end|>"},
        ]
    }
    dataset, tokenizer = load([row])
    (sample,) = preview(dataset, tokenizer).samples
    assert "".join(token.text for token in sample.tokens) == "[I] hi good [I] so bad<|end|>"
    assert "".join(token.text for token in sample.tokens if token.loss) == "goodbad<|end|>"
    with pytest.raises(DataError, match="segment 0 has no text and no label"):
        load([{"segments": [{"text": "a"}]}])


def test_calls_of_tools_of_sharegpt(load: Load) -> None:
    """LLaMA-Factory's `function_call` is a turn of the assistant that calls, `observation` the tool's answer, `tools` a text."""
    row = {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "it"}}'},
            {"from": "observation", "value": "seen"},
            {"from": "gpt", "value": "good"},
        ],
        "tools": json.dumps([TOOL]),
    }
    dataset, tokenizer = load([row], tokenizer="thinking")
    ((_, before, after),) = show(dataset, tokenizer)
    assert '[call]look {"at": "it"}[/call]' in before
    assert "[result]seen[/result]" in before
    assert '"looks"' in before
    assert after.endswith("good<|im_end|>")
    row["conversations"][1]["value"] = '"look"'
    with pytest.raises(DataError, match="message 1 of role 'function_call' is no JSON object with name and arguments"):
        load([row], tokenizer="thinking")


def test_earlier_answers_of_a_history_train_where_all_turns_do(load: Load) -> None:
    """As in LLaMA-Factory, where they always do."""
    row = {"instruction": "hi", "output": "good", "history": [["first", "one"], ["second", "two"]]}
    dataset, tokenizer = load([row], loss_on="all")
    assert [after for *_, after in show(dataset, tokenizer)] == ["one<|im_end|>two<|im_end|>good<|im_end|>"]


def test_answers_that_are_rows_are_paired_prompt_by_prompt(load: Load) -> None:
    """HelpSteer: rows of one prompt follow each other; ties and prompts with one answer leave no pair, and are counted. A row of a pair is
    never held out alone.
    """
    rows = [
        {"prompt": prompt, "response": f"{prompt}{number}", "helpfulness": number}
        for prompt, numbers in (("a", (0, 3)), ("b", (2, 2)), ("c", (1,)), ("d", (4, 0, 1)), ("e", (0, 1)))
        for number in numbers
    ]
    dataset, tokenizer = load(rows, "preferences")
    assert [after.removesuffix("<|im_end|>") for *_, after in show(dataset, tokenizer)] == ["a3", "a0", "d4", "d0", "e1", "e0"]
    assert (dataset.counts.rows, dataset.counts.dropped_ties) == (5, 2)
    held, _ = load(rows, "preferences", eval_fraction=0.4)
    assert len(np.unique(held.columns.unit_ids)) * 2 == len(held)
    # read as samples, every answer is one
    assert len(load(rows)[0]) == len(rows)


def test_no_preference_between_two_answers_leaves_no_pair(load: Load) -> None:
    rows = [{"prompt": "hi", "response1": "a", "response2": "b", "overall_preference": number} for number in (0, -1)]
    dataset, _ = load(rows, "preferences")
    assert (len(dataset), dataset.counts.dropped_ties) == (2, 1)
    with pytest.raises(DataError, match="'labels': 2 is neither 0 nor 1"):
        load([{"history": "hi", "human_ref_A": "a", "human_ref_B": "b", "labels": 2}], "preferences")


@pytest.mark.parametrize("label", ["true", "1", " True ", 1, 1.0, True])
def test_labels_of_every_kind(load: Load, label: Any) -> None:
    """A CSV file has texts, other programs have numbers."""
    dataset, _ = load([{"prompt": "hi", "completion": "good", "label": label}], "preferences")
    assert dataset.columns.sample_values["role"].tolist() == [0]


def test_steps_that_are_judged_one_by_one_are_refused_by_name(load: Load) -> None:
    """TRL's and axolotl's stepwise supervision."""
    row = {"prompt": "hi", "completions": ["a", "b"], "labels": [True, False]}
    for reading in ("samples", "preferences"):
        with pytest.raises(
            DataError, match=r"stepwise supervision.* Set trainer = .reward_model. and reward_model\.preset = .steps."
        ):
            load([row], reading)


@pytest.mark.parametrize(
    ("row", "reading", "unread"),
    [
        ({"prompt": "hi", "chosen": "good", "rejected": "bad", "margin": 0.5}, "preferences", ["margin"]),
        ({"prompt": "hi", "completion": "good", "label": False}, "samples", ["label"]),
        ({"messages": [USER, GOOD], "kto_tag": False}, "samples", ["kto_tag"]),
        ({"messages": [USER, GOOD], "chosen": "a", "rejected": "b"}, "samples", ["chosen", "rejected"]),
        ({"messages": [USER, GOOD], "history": [["a", "b"]], "videos": ["v.mp4"]}, "samples", ["history", "videos"]),
        ({"prompt": "hi", "completion": "good", "response": "other"}, "samples", ["response"]),
        ({"text": "hello", "tools": "[]", "system": "be kind"}, "samples", ["system", "tools"]),
        ({"context": "long", "article": "other", "question": "hi", "answer": "good"}, "samples", ["article"]),
        (
            {"instruction": "hi", "output": "good", "reflection": "so", "corrected": "better"},
            "samples",
            ["corrected", "reflection"],
        ),
        ({"prompt": "hi", "instruction": "ho", "chosen": "good", "rejected": "bad"}, "preferences", ["instruction"]),
        ({"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD]}, "preferences", ["messages"]),
        ({"prompt": "hi", "response": "good", "helpfulness": 3}, "samples", ["helpfulness"]),
        ({"input_ids": [5, 6], "labels": [5, 6], "loss_mask": [0, 1], "prompt": "hi"}, "samples", ["loss_mask"]),
        ({"prompt": "hi", "completion": "good", "id": 3, "source": "x", "images": [], "system": None, "tools": []}, "samples", []),
    ],
)
def test_a_known_column_that_is_not_read_is_told(load: Load, caplog: Any, row: Any, reading: Any, unread: list[str]) -> None:
    """Once per dataset, from the cache too; columns of no format and columns that hold nothing are passed over."""
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "skyrl_engine"):
            load([row], reading)
        messages = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
        assert len(messages) == bool(unread)
        assert not unread or ", ".join(map(repr, unread)) in messages[0]


def test_a_column_of_some_rows_is_told_with_their_number(load: Load, caplog: Any) -> None:
    rows = [{"prompt": "hi", "completion": "good"}, {"prompt": "hi", "completion": "good", "margin": 1}]
    with caplog.at_level(logging.WARNING, "skyrl_engine"):
        load(rows)
    assert any("'margin' (1 of 2 rows)" in record.getMessage() for record in caplog.records)


def test_a_margin_reaches_the_loss_that_reads_it(load: Load, caplog: Any) -> None:
    row = {"instruction": "hi", "chosen": "good", "rejected": "bad", "margin": 0.5}
    with caplog.at_level(logging.WARNING, "skyrl_engine"):
        dataset, _ = load([row], "rewards", needed={"margin": "loss bradley_terry needs"})
    assert dataset.columns.columns["margin"].tolist() == [0.5, 0.5]
    assert not caplog.records


@pytest.mark.parametrize(
    ("row", "reading", "cause"),
    [
        (
            {"system": "be kind", "messages": [{"role": "system", "content": "be cruel"}, USER, GOOD]},
            "samples",
            "begin with another system message",
        ),
        ({"prompt": "hi", "completion": "good", "history": "before"}, "samples", "a list of pairs of texts is needed"),
        ({"messages": [USER, GOOD], "chosen": GOOD, "rejected": BAD}, "preferences", "its last message is an answer"),
        ({"messages": [GOOD, USER], "label": True}, "preferences", "its last message is no answer"),
        ({"prompt": [USER], "completion": [GOOD]}, "none", "holds messages, which a chat template writes"),
        ({"messages": [USER, GOOD]}, "none", 'and data.template is "none"'),
    ],
)
def test_rows_that_contradict_themselves_are_refused(load: Load, row: Any, reading: Any, cause: str) -> None:
    settings = {"template": "none"} if reading == "none" else {}
    with pytest.raises(DataError, match=cause):
        load([row], "samples" if reading == "none" else reading, **settings)
