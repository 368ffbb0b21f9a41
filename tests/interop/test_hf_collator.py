"""Collators of this engine as `data_collator`: every token and label once, documents apart, the gradient that transformers' own collators give.

Where a collator of transformers means the same, gradients agree to 1e-6 of the whole gradient, float32.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_rows import ROWS, load_llama

from skyrl_engine.errors import ConfigError, DataError, EngineError, UnsupportedError
from skyrl_engine.interop import hf_collator, hf_loss
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

MINE = """
from skyrl_engine import hookimpl
from skyrl_engine_collators.padded.collator import PaddedCollator

class Rows:
    @hookimpl
    def skyrl_engine_make_collator(self, config, context):
        return PaddedCollator(pad_token_id=context.pad_token_id)

rows = Rows()
"""


LONGEST_FIRST = sorted(ROWS, key=lambda row: -len(row["input_ids"]))
"""In the order in which `packed` lays them out, where one row holds all of them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_llama(tmp_path_factory.mktemp("model"))


def read_gradient(model: Any, batch: Any) -> torch.Tensor:
    model.zero_grad()
    model(**batch).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours - theirs).norm() / theirs.norm()) <= 1e-6


def test_padded_rows_have_the_gradient_of_transformers_collator(model: Any, tmp_path: Path) -> None:
    """Ours pads on the left, theirs on the right; theirs trains every token but the padding."""
    from transformers import DataCollatorForLanguageModeling

    tokenizer = write_tokenizer(tmp_path, ["a few words"])
    # their collator takes a token for padding by its id
    rows = [{"input_ids": [5 if token == tokenizer.pad_token_id else token for token in row["input_ids"]]} for row in ROWS]
    theirs = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    assert_close(read_gradient(model, hf_collator(every_token=True)(rows)), read_gradient(model, {**theirs, "use_cache": False}))


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_microbatch": 12}])
def test_packed_rows_have_the_gradient_of_transformers_collator(model: Any, options: dict[str, int]) -> None:
    """In one row, or in several with padding at their ends."""
    from transformers import DataCollatorWithFlattening

    ours = hf_collator("packed", options=options)(ROWS)
    assert ours["input_ids"].shape[0] == (1 if not options else 3)
    assert_close(read_gradient(model, ours), read_gradient(model, {**DataCollatorWithFlattening()(ROWS), "use_cache": False}))


def test_varlen_arguments_are_those_of_transformers_collator() -> None:
    from transformers import DataCollatorWithFlattening

    ours = hf_collator("packed", varlen=True)(LONGEST_FIRST)
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(LONGEST_FIRST)
    assert ours.keys() - theirs.keys() == {"use_cache"}
    for name, due in theirs.items():
        if isinstance(due, torch.Tensor):
            # theirs are lists of one dimension for boundaries, and of two for tokens
            assert ours[name].dtype == due.dtype
            assert ours[name].tolist() == due.tolist()
        else:
            assert ours[name] == due
    cut = hf_collator("packed", options={"max_tokens_per_microbatch": 12}, varlen=True)(ROWS)
    bounds = cut["cu_seq_lens_q"].tolist()
    assert {0, 12, 24, 36} <= set(bounds)
    positions = cut["position_ids"].flatten()
    assert all(positions[start] == 0 for start in bounds[:-1])
    assert cut["max_length_k"] == int(np.diff(bounds).max()) == max(len(row["input_ids"]) for row in ROWS)


@pytest.mark.parametrize("name", ["padded", "packed"])
def test_trainer_takes_the_step_of_all_rows_however_it_accumulates(model: Any, name: str, tmp_path: Path) -> None:
    from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

    def step(collator: Any, rows: int, steps: int, function: Any = None) -> torch.Tensor:
        found: list[torch.Tensor] = []

        class Read(TrainerCallback):  # type: ignore[misc] # transformers has no types
            def on_pre_optimizer_step(self, *_given: Any, **_named: Any) -> None:
                found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))

        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=steps,
            max_steps=1,
            learning_rate=0.0,
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(
            model, arguments, train_dataset=ROWS, data_collator=collator, callbacks=[Read()], compute_loss_func=function
        ).train()
        return found[0]

    whole = step(DataCollatorWithFlattening(), 6, 1)
    assert_close(step(hf_collator(name), 2, 3), whole)
    assert_close(step(hf_collator(name), 3, 2, hf_loss()), whole)


@pytest.mark.parametrize("name", ["padded", "packed"])
@given(data=st.data())
def test_every_document_is_there_once_with_its_labels(name: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    limit = data.draw(st.sampled_from([None, 7, 11]))
    options = {} if name == "padded" or limit is None else {"max_tokens_per_microbatch": limit}
    labels = [data.draw(st.lists(st.sampled_from([-100, 3, 90]), min_size=length, max_size=length)) for length in lengths]
    ids = np.split(np.arange(1, sum(lengths) + 1), np.cumsum(lengths)[:-1])
    rows = [{"input_ids": own.tolist(), "labels": of} for own, of in zip(ids, labels, strict=True)]
    batch = hf_collator(name, options=options)(rows)
    flat = {key: batch[key].flatten().tolist() for key in ("input_ids", "labels", "position_ids")}
    for row in rows:
        start, length = flat["input_ids"].index(row["input_ids"][0]), len(row["input_ids"])
        here = slice(start, start + length)
        assert flat["input_ids"][here] == row["input_ids"]
        assert flat["labels"][here] == [-100, *row["labels"][1:]]
        assert flat["position_ids"][here] == list(range(length))
    assert sum(flat["input_ids"]) == sum(range(sum(lengths) + 1))
    assert sum(label != -100 for label in flat["labels"]) == sum(label != -100 for own in labels for label in own[1:])
    if name == "padded":
        assert batch["attention_mask"].sum(1).tolist() == lengths


def test_documents_do_not_see_each_other_and_the_cache_is_why_that_is_said(model: Any) -> None:
    """With transformers 5.24, a cache joins the documents of a packed row, and a model uses one unless told otherwise."""
    first, *others = LONGEST_FIRST
    changed = {"input_ids": [(token + 1) % 128 for token in first["input_ids"]], "labels": first["labels"]}
    place = len(first["input_ids"])

    def score(row: Any, **further: Any) -> torch.Tensor:
        batch = {**hf_collator("packed")([row, *others]), **further}
        with torch.no_grad():
            return model(**batch).logits[0, place:]

    assert torch.equal(score(first), score(changed))
    assert not torch.allclose(score(first, use_cache=True), score(changed, use_cache=True))


def test_a_model_is_tried_with_documents(model: Any, tmp_path: Path) -> None:
    """OPT counts positions from a mask and lets documents of a packed row see each other."""
    from transformers import AutoModelForCausalLM

    for name in ("padded", "packed"):
        hf_collator(name).check_model(model)
    write_model(tmp_path, "opt", word_embed_proj_dim=48, ffn_dim=96)
    opt = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    hf_collator().check_model(opt)
    with pytest.raises(
        UnsupportedError, match=r"OPTForCausalLM scores a document in rows of collator 'packed'.* otherwise than alone"
    ):
        hf_collator("packed").check_model(opt)
    assert opt.training

    class NoPositions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def get_input_embeddings(self) -> Any:
            return self.inner.get_input_embeddings()

        def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask)

    with pytest.raises(UnsupportedError, match=r"NoPositions does not take what .*position_ids"):
        hf_collator().check_model(NoPositions())


def test_masks_padding_and_documents_of_a_row_are_read() -> None:
    labelled = hf_collator()([{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}])
    for row in (
        {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]},
        {"input_ids": torch.tensor([5, 6, 7, 8]), "assistant_masks": np.array([False, False, True, True])},
        {"input_ids": [5, 6, 7, 8], "labels": [5, -100, 7, 8], "completion_mask": [0, 1, 1, 1]},
        {"input_ids": [0, 5, 6, 7, 8, 0], "labels": [-100, -100, -100, 7, 8, -100], "attention_mask": [0, 1, 1, 1, 1, 0]},
    ):
        batch = hf_collator()([row])
        assert {name: value.tolist() for name, value in batch.items()} == {name: value.tolist() for name, value in labelled.items()}
    joined = hf_collator("packed", every_token=True)([{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}])
    assert joined["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert joined["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    assert hf_collator(every_token=True)([{"input_ids": [5, 6, 7], "seq_lengths": [1, 2]}])["input_ids"].tolist() == [
        [0, 5],
        [6, 7],
    ]
    assert hf_collator(every_token=True, ignore=("text",))([{"input_ids": [5, 6], "text": "of it"}])["labels"].tolist() == [
        [-100, 6]
    ]


def test_workers_get_the_same_collator_and_plugins_may_be_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    for collator in (
        hf_collator("./mine.py:rows", pad_token_id=9),
        hf_collator("packed", varlen=True, options={"policy": "concat"}),
    ):
        here, there = collator(ROWS), pickle.loads(pickle.dumps(collator))(ROWS)
        assert here.keys() == there.keys()
        assert all(torch.equal(torch.as_tensor(here[name]), torch.as_tensor(there[name])) for name in here)
    assert hf_collator("./mine.py:rows", pad_token_id=9)(ROWS)["input_ids"][0, 0] == 9


@pytest.mark.parametrize(
    ("keywords", "kind", "words"),
    [
        ({"collator": "tree"}, UnsupportedError, r"lays a common prefix out once.* Choose the collator padded or packed"),
        ({"varlen": True}, UnsupportedError, "varlen arguments say where the documents of packed rows begin"),
        ({"pad_token_id": None}, DataError, "pad_token_id is None"),
        ({"options": {"policy": "ffd"}}, ConfigError, "policy"),
        ({"collator": "nothing"}, EngineError, "nothing"),
    ],
)
def test_collators_that_a_forward_cannot_express_are_refused(keywords: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        hf_collator(**keywords)


GOOD = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no row"),
        ([GOOD, [1, 2]], "row 1 is of type list"),
        ([GOOD, {"labels": [1]}], "row 1 has no input_ids"),
        ([{"input_ids": [], "labels": []}], "row 0 has no input_ids"),
        ([{"input_ids": [1, 2]}], r"row 0 has neither labels nor one of .*remove_unused_columns = False"),
        ([{**GOOD, "pixel_values": [0.5]}], r"row 0 has the key 'pixel_values'.*ignore=\('pixel_values',\)"),
        ([GOOD, {**GOOD, "completion_mask": [0, 1, 1]}], "row 1 has the keys .*row 0 has input_ids, labels"),
        ([{**GOOD, "labels": [1, 2]}], "row 0: 2 labels for 3 tokens"),
        ([{**GOOD, "labels": [1, 2, -1]}], "row 0 has the label -1"),
        ([{**GOOD, "labels": None}], "row 0: labels are no list of integers: None"),
        ([{**GOOD, "input_ids": [1, 2.5, 3]}], "row 0: input_ids are no list of integers"),
        ([{**GOOD, "input_ids": [[1, 2], [3]]}], "row 0: input_ids are no list of integers"),
        ([{**GOOD, "input_ids": [1, -2, 3]}], "negative token id -2"),
        ([{**GOOD, "completion_mask": [0, 2, 1]}], "row 0: completion_mask has the number 2"),
        ([{**GOOD, "attention_mask": [1, 0, 1]}], "row 0: attention_mask leaves a gap between tokens"),
        ([{**GOOD, "attention_mask": [0, 0, 0]}], "row 0: attention_mask leaves nothing"),
        ([{**GOOD, "seq_lengths": [2, 2]}], r"row 0: seq_lengths \[2, 2\] for 3 tokens"),
        ([{**GOOD, "seq_lengths": [3, 0]}], r"row 0: seq_lengths \[3, 0\] for 3 tokens"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_row_and_key(rows: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        hf_collator()(rows)
