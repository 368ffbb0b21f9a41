"""Every type of dataset in axolotl's documentation: read as it is, or refused with the names to give; the table of the page says which.

Columns are those of axolotl's `docs/dataset-formats` and `docs/rlhf.qmd`; of its types for other templates (`llama3.argilla`) the first stands
for all, as their columns are the same.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import frozen

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.dataset import load_columns
from skyrl_engine.data.preview import preview
from skyrl_engine.errors import DataError

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "bring-your-data.md"
USER, GOOD, BAD, SYSTEM = (
    {"role": role, "content": text}
    for role, text in zip(("user", "assistant", "assistant", "system"), ("hi", "good", "bad", "be kind"), strict=True)
)
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}]


@frozen
class Type:
    """A type: one row of it, and what comes before its answer, "good". Without the names that are `given` it is refused; None: in any case."""

    name: str
    row: Mapping[str, Any]
    before: Sequence[str] = ("hi",)
    given: str | None = ""
    reading: Literal["samples", "preferences"] = "samples"
    note: str = ""


def pair(name: str, *before: str, **row: Any) -> Type:
    return Type(name, row, before or ("hi",), reading="preferences")


TYPES = (
    Type("chat_template, sharegpt", {"conversations": SHAREGPT}),
    Type("chat_template with `field_messages: chat`", {"chat": [USER, GOOD]}, given="data.map.messages=chat"),
    Type("pygmalion", {"conversations": [{"role": "user", "value": "hi"}, {"role": "assistant", "value": "good"}]}),
    Type("completion", {"text": "hi good"}, before=()),
    Type("input_output", {"segments": [{"label": False, "text": "hi "}, {"label": True, "text": "good"}]}),
    Type("no type", {"input_ids": [5, 6], "attention_mask": [1, 1], "labels": [-100, 6]}, before=()),
    Type("alpaca", {"instruction": "hi", "input": "you", "output": "good"}, ("hi\n\nyou",)),
    Type("alpaca_w_system", {"system": "be kind", "instruction": "hi", "input": "", "output": "good"}, ("be kind", "hi")),
    Type("alpaca_w_system.load_open_orca", {"system_prompt": "be kind", "question": "hi", "response": "good"}, ("be kind", "hi")),
    Type(
        "gpteacher, alpaca_chat, alpaca_chat.load_concise",
        {"instruction": "hi", "input": "you", "response": "good"},
        ("hi\n\nyou",),
    ),
    Type("alpaca_chat.load_qa", {"question": "hi", "answer": "good"}),
    Type("alpaca_chat.load_camel_ai", {"message_1": "hi", "message_2": "good"}),
    Type("jeopardy", {"question": "hi", "category": "greetings", "answer": "good"}, note="without the category"),
    Type("oasst", {"INSTRUCTION": "hi", "RESPONSE": "good"}),
    Type(
        "reflection",
        {"instruction": "hi", "input": "", "output": "good", "reflection": "so", "corrected": "better"},
        note="trains on `output`, with a warning; `data.map.output=corrected` trains on the other",
    ),
    Type(
        "explainchoice, concisechoice",
        {"question": "hi", "choices": ["good", "bad"], "solution": "good", "explanation": "so"},
        given="data.map.prompt=question data.map.completion=solution",
        note="without the choices",
    ),
    Type("summarizetldr", {"article": "hi", "summary": "good"}),
    Type("context_qa", {"article": "long", "question": "hi", "answer": "good"}, ("long\n\nhi",)),
    Type("context_qa.load_v2", {"context": "long", "question": "hi", "answer": "good"}, ("long\n\nhi",)),
    Type(
        "context_qa.load_404", {"article": "long", "unanswerable_question": "hi"}, given=None, note="rows have no answer: store one"
    ),
    Type("creative_acr.load_answer", {"instruction": "hi", "revision": "good"}, given="data.map.output=revision"),
    Type(
        "creative_acr.load_critique",
        {"scores": "3", "critiques": "so", "instruction": "hi", "answer": "good"},
        given="data.map.output=answer",
        note="critiques need another prompt",
    ),
    Type(
        "creative_acr.load_revise",
        {"scores": "3", "critiques": "so", "instruction": "hi", "answer": "bad", "revision": "good"},
        given="data.map.output=revision",
    ),
    Type("metharme", {"prompt": "hi", "generation": "good"}),
    Type(
        "a user-defined type: `field_instruction`, `field_output`",
        {"ask": "hi", "say": "good"},
        given="data.map.prompt=ask data.map.completion=say",
    ),
    Type(
        "stepwise_supervised",
        {"prompt": "hi", "completions": ["a"], "labels": [True]},
        given=None,
        note="`reward_model.preset=steps` of trainer `reward_model` trains on single steps",
    ),
    pair("chatml.argilla", "be kind", "hi", system="be kind", instruction="hi", chosen_response="good", rejected_response="bad"),
    pair("chatml.argilla_chat, chat_template.argilla_chat", chosen=[USER, GOOD], rejected=[USER, BAD]),
    pair("chatml.icr", "be kind", "hi", system="be kind", input="hi", chosen="good", rejected="bad"),
    pair("chatml.intel", "be kind", "hi", system="be kind", question="hi", chosen="good", rejected="bad"),
    pair(
        "chatml.prompt_pairs, user_defined.default", "be kind", "hi", system="be kind", prompt="hi", chosen="good", rejected="bad"
    ),
    pair(
        "chatml.ultra, orpo chat_template.argilla",
        "be kind",
        "hi",
        system="be kind",
        prompt="hi",
        chosen=[USER, GOOD],
        rejected=[USER, BAD],
    ),
    pair("zephyr.nectar", prompt="hi", answers=[{"answer": "good", "rank": 1}, {"answer": "bad", "rank": 2}]),
    pair("chat_template.default", "be kind", "hi", messages=[SYSTEM, USER], chosen=GOOD, rejected=BAD),
    pair("kto chatml.argilla", "be kind", "hi", system="be kind", instruction="hi", completion="good", label=True),
    Type(
        "kto chatml.argilla_chat",
        {"chosen": [USER], "completion": [GOOD], "label": True},
        given="data.map.prompt=chosen",
        reading="preferences",
    ),
    pair("kto llama3.argilla_chat", completion=[USER, GOOD], label=True),
    pair("kto chatml.intel", "be kind", "hi", system="be kind", question="hi", completion="good", label=True),
    pair(
        "kto chatml.prompt_pairs, chatml.ultra, user_defined.default",
        "be kind",
        "hi",
        system="be kind",
        prompt="hi",
        completion="good",
        label=True,
    ),
)


def describe(type_: Type) -> str:
    """Return the type's line in the page's table."""
    columns = ", ".join(f"`{column}`" for column in type_.row)
    how = "refused" if type_.given is None else f"`{type_.given}`" if type_.given else "as it is"
    return f"| {type_.name} | {columns} | {how}{f'; {type_.note}' if type_.note else ''} |"


@pytest.fixture
def load(make_tokenizer: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    def load_type(type_: Type, names: Mapping[str, str]) -> list[tuple[str, str]]:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(type_.row) + "\n")
        tokenizer = make_tokenizer("chatml")
        data = DataConfig(train=str(path), cache=str(tmp_path / "cache"), map=dict(names))
        dataset = load_columns(data, tokenizer, split="train", reading=type_.reading, needed={})
        return [
            (
                "".join(token.text for token in sample.tokens if not token.loss),
                "".join(token.text for token in sample.tokens if token.loss),
            )
            for sample in preview(dataset, tokenizer, samples=len(dataset)).samples
        ]

    return load_type


@pytest.mark.parametrize("type_", TYPES, ids=lambda type_: type_.name)
def test_a_type_is_read_or_its_error_names_what_to_give(load: Callable[..., Any], type_: Type) -> None:
    names: dict[str, str] = {}
    if type_.given != "":
        with pytest.raises(DataError) as caught:
            load(type_, names)
        if type_.given is None:
            return
        assert type_.given in caught.value.remedy
        names = dict(re.findall(r"data\.map\.(\w+)=(\w+)", type_.given))
    before, after = load(type_, names)[0]
    if {"input_ids", "text"} & set(type_.row):  # all of it carries loss but the first token, which nothing predicts
        assert after
        return
    assert after.removesuffix("<|im_end|>").removesuffix("<|end|>").strip() == "good"
    turns = [text for _, text in re.findall(r"<\|im_start\|>(system|user|assistant)\n(.+?)<\|im_end\|>", before, re.DOTALL)]
    assert turns == list(type_.before) if turns else "".join(type_.before).strip() == before.strip()


def test_the_page_lists_every_type_as_it_is_here() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("## Types of axolotl")[2].partition("\n## ")[0]
    assert [line for line in table.splitlines() if line.startswith("| ")][1:] == [describe(type_) for type_ in TYPES]
