"""Process reward models: right and wrong steps of an answer, as TRL's PRMTrainer trains them, in transformers' own token classifier."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedTokenizerBase

from skyrl_engine.config import ResolvedConfig, load, resolve
from skyrl_engine.errors import ColumnError, ConfigError, DataError, ModelError, UnsupportedError
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.testing.templates import TEMPLATES
from skyrl_engine.training.reward_model.prepare import prepare
from skyrl_engine.training.reward_model.trainer import run_reward_model

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
ROWS: list[dict[str, Any]] = [
    {"prompt": "2+2*3?", "completions": ["2*3=6", "2+6=8"], "labels": [True, True]},
    {"prompt": "1+1*5?", "completions": ["1+1=2", "2*5=10", "so it is 10"], "labels": [False, True, False]},
    {"prompt": "7-4?", "completions": ["7-4=3"], "labels": [1]},
    {"prompt": "9-3-2?", "completions": ["9-3=5", "5-2=3"], "labels": [0, 1]},
]
IGNORED = -100


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head that is not zero, so that the first gradient reaches all layers."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = write_tokenizer(folder, [json.dumps(row) for row in ROWS])
    write_model(folder, "llama", value_head=True, tokenizer=tokenizer, max_position_embeddings=128, **SIZES)
    return folder


def configure(model: Path, folder: Path, *keys: str, rows: list[dict[str, Any]] = ROWS) -> ResolvedConfig:
    tables = {
        "trainer": "reward_model",
        "model": {"path": str(model)},
        "reward_model": {"preset": "steps"},
        "data": {"train": str(write_rows(folder, rows)), "cache": str(folder / "cache")},
        "training": {"steps": 1, "batch_size": len(rows), "shuffle": False},
        "optimizer": {"use": "sgd", "learning_rate": 0.5, "max_grad_norm": "none"},
        "run": {"seed": 5, "device": "cpu", "directory": str(folder / "run")},
    }
    return resolve(load(tables, keys))


def tokenize_as_trl(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], separator: str) -> tuple[list[int], list[int]]:
    """Ids and labels as PRMTrainer.tokenize_row makes them: each step and the separator by itself, a label at the last token."""
    ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    labels = [IGNORED] * len(ids)
    between = tokenizer.encode(separator, add_special_tokens=False)
    for step, label in zip(row["completions"], row["labels"], strict=True):
        own = tokenizer(step, add_special_tokens=False)["input_ids"] + between
        ids = ids + own
        labels = labels + [IGNORED] * (len(own) - 1) + [int(label)]
    return ids, labels


def loss_of_transformers(classifier: Any, tokenizer: PreTrainedTokenizerBase, separator: str) -> torch.Tensor:
    """The mean over labelled tokens of all rows, one row at a time: no padding."""
    losses = []
    for row in ROWS:
        ids, labels = tokenize_as_trl(tokenizer, row, separator)
        logits = classifier(torch.tensor([ids])).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(labels), ignore_index=IGNORED, reduction="sum"))
    return torch.stack(losses).sum() / sum(len(row["labels"]) for row in ROWS)


def classifier_over(model: Path) -> Any:
    """A token classifier with two labels in float64, whose logits are 0 and the value of this model's head."""
    classifier: Any = AutoModelForTokenClassification.from_pretrained(
        model, num_labels=2, ignore_mismatched_sizes=True, dtype=torch.float64
    ).eval()
    with torch.no_grad():
        classifier.score.weight.zero_()
        classifier.score.weight[1] = load_file(model / "model.safetensors")["score.weight"][0].double()
        classifier.score.bias.zero_()
    return classifier


@pytest.mark.parametrize(
    "layout", [("collator.use=padded", "training.micro_batch_rows=1"), ("collator.use=packed", "training.micro_batch_tokens=48")]
)
@pytest.mark.parametrize("separator", ["\n", " so: "])
def test_a_step_of_training_is_that_of_a_token_classifier(
    model: Path, tmp_path: Path, layout: tuple[str, ...], separator: str
) -> None:
    """Loss and every weight after one step of plain descent, to 1e-6 of a float64 model of transformers on TRL's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = classifier_over(model)
    loss = loss_of_transformers(classifier, tokenizer, separator)
    loss.backward()
    run = run_reward_model(configure(model, tmp_path, *layout, f"reward_model.step_separator={json.dumps(separator)}"))
    (step,) = [record["metrics"] for record in read_metrics(run.directory / "metrics.jsonl") if record["kind"] == "step"]
    assert step["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert step["loss_tokens"] == 8
    assert step["steps/right"] == pytest.approx(5 / 8)
    files = sorted(RunDirectory(run.directory).model.glob("*.safetensors"))
    trained = {name: weight for file in files for name, weight in load_file(file).items()}
    assert len(trained) > 10
    for name, parameter in classifier.named_parameters():
        if name == "score.bias":
            continue
        expected = (parameter - 0.5 * parameter.grad).detach()
        if name == "score.weight":
            expected = expected[1:]
        torch.testing.assert_close(trained[name].double(), expected, rtol=0, atol=1e-6)
    assert trained["score.weight"].shape == (1, 16)


@pytest.fixture(scope="module", params=[0, 1])
def two_labels(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A token classifier with two labels, as TRL's PRMTrainer writes it, and the number of its right label."""
    folder = tmp_path_factory.mktemp("two")
    classifier: Any = AutoModelForTokenClassification.from_pretrained(model, num_labels=2, ignore_mismatched_sizes=True)
    torch.manual_seed(request.param)
    with torch.no_grad():
        classifier.score.weight.normal_(std=0.3)
        classifier.score.bias.normal_(std=0.3)
    classifier.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return request.param, folder


def test_a_classifier_with_two_labels_is_trained_and_written(two_labels: tuple[int, Path], tmp_path: Path) -> None:
    """A step of descent on the head's difference d: the layers are transformers', and d' = d - rate * gradient, to 1e-6 of float64.

    Embeddings have steps of up to 7, of which float32 keeps seven digits.
    """
    right, folder = two_labels
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classifier: Any = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64).eval()
    losses = []
    for row in ROWS:
        ids, labels = tokenize_as_trl(tokenizer, row, "\n")
        due = torch.tensor([label if label == IGNORED or right == 1 else 1 - label for label in labels])
        losses.append(
            torch.nn.functional.cross_entropy(classifier(torch.tensor([ids])).logits[0], due, ignore_index=IGNORED, reduction="sum")
        )
    loss = torch.stack(losses).sum() / sum(len(row["labels"]) for row in ROWS)
    loss.backward()
    run = run_reward_model(configure(folder, tmp_path, f"model.right_label={right}"))
    (step,) = [record["metrics"] for record in read_metrics(run.directory / "metrics.jsonl") if record["kind"] == "step"]
    assert step["loss"] == pytest.approx(loss.item(), abs=1e-6)
    exported: Any = AutoModelForTokenClassification.from_pretrained(RunDirectory(run.directory).model).eval()
    assert exported.config.id2label[right] == "right"
    trained = dict(exported.named_parameters())
    for name, parameter in classifier.named_parameters():
        expected, got = (parameter - 0.5 * parameter.grad).detach(), trained[name].detach().double()
        if name.startswith("score"):
            expected = parameter[right] - parameter[1 - right] - 0.5 * parameter.grad[right]
            got = got[right] - got[1 - right]
        torch.testing.assert_close(got, expected.detach(), rtol=1e-6, atol=1e-6)


def test_two_labels_are_asked_for_by_name(two_labels: tuple[int, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"shape \[2, 16\].*model.right_label"):
        run_reward_model(configure(two_labels[1], tmp_path))
    with pytest.raises(ConfigError, match=r"model.right_label: says which of two labels"):
        prepare(configure(two_labels[1], tmp_path, "model.right_label=1", "reward_model.labels=answers"))


def test_an_export_is_read_by_transformers_at_every_step(model: Path, tmp_path: Path) -> None:
    """The value after a step is the logit of a token classifier with one label, and the log-odds that the step is right."""
    run = run_reward_model(
        configure(model, tmp_path, "training.steps=3", "evaluation.at_end=true", f"data.eval={tmp_path / 'steps.jsonl'}")
    )
    exported = RunDirectory(run.directory).model
    classifier = AutoModelForTokenClassification.from_pretrained(exported, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    losses, hits = [], []
    for row in ROWS:
        ids, labels = tokenize_as_trl(tokenizer, row, "\n")
        with torch.no_grad():
            values = classifier(torch.tensor([ids])).logits[0, :, 0]
        for value, label in zip(values.tolist(), labels, strict=True):
            if label != IGNORED:
                losses.append(math.log1p(math.exp(-value if label else value)))
                hits.append((value > 0) == bool(label))
    (evaluation,) = [
        record["metrics"] for record in read_metrics(run.directory / "metrics.jsonl") if record["kind"] == "evaluation"
    ]
    assert evaluation["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert evaluation["steps/accuracy"] == pytest.approx(np.mean(hits))


def test_a_chat_template_writes_the_prompt_alone(tmp_path: Path) -> None:
    tokenizer = TEMPLATES["chatml"].tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    write_model(tmp_path / "model", tokenizer=tokenizer, **SIZES, max_position_embeddings=128)
    train = prepare(configure(tmp_path / "model", tmp_path)).train
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "2+2*3?"}], tokenize=False, add_generation_prompt=True)
    expected = tokenizer(prompt + "2*3=6", add_special_tokens=False)["input_ids"]
    assert train.columns.input_ids[: len(expected)].tolist() == expected
    plain = prepare(configure(tmp_path / "model", tmp_path, "data.template=none")).train
    ids, _ = tokenize_as_trl(tokenizer, ROWS[0], "\n")
    assert plain.columns.input_ids[: len(ids)].tolist() == ids


def test_a_cut_answer_keeps_the_steps_that_are_whole(model: Path, tmp_path: Path) -> None:
    whole = prepare(configure(model, tmp_path)).train.columns
    rows = sorted((int(length) for length in np.diff(whole.token_offsets)), reverse=True)
    cut = prepare(configure(model, tmp_path, f"data.max_length={rows[0] - 1}", "data.overlong=truncate")).train.columns
    assert int(cut.loss_weight.sum()) == int(whole.loss_weight.sum()) - 1
    assert int(np.diff(cut.token_offsets).max()) == rows[0] - 1


@pytest.mark.parametrize(
    ("row", "error", "words"),
    [
        ({"labels": [True]}, DataError, "there are 2 steps, and 1 labels"),
        ({"labels": [True, None]}, DataError, "neither true nor false"),
        ({"labels": [True, 2]}, DataError, "a label is 2, neither true nor false"),
        ({"completions": []}, DataError, "a list of texts is needed, none of them empty, not an empty list"),
        ({"completions": ["a", ""]}, DataError, "not one whose step 1 is ''"),
        ({"completions": "a"}, DataError, "a list of texts is needed"),
        ({"completions": None, "labels": None, "completion": "a"}, DataError, "a list of texts is needed"),
    ],
)
def test_rows_without_a_label_for_each_step_are_refused(
    model: Path, tmp_path: Path, row: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        prepare(configure(model, tmp_path, rows=[{**ROWS[0], **row}]))


def test_losses_and_data_of_the_other_kind_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    with pytest.raises(ColumnError, match="right and wrong steps are to be learned, and the dataset has the columns"):
        prepare(configure(model, tmp_path, rows=pairs))
    with pytest.raises(UnsupportedError, match=r"does not tell right from wrong steps.*step_cross_entropy"):
        prepare(configure(model, tmp_path, "loss.use=bradley_terry", "reducer.use=sequence_mean"))
    with pytest.raises(DataError, match="stepwise supervision"):
        prepare(configure(model, tmp_path, "reward_model.preset=bradley_terry"))
    with pytest.raises(ConfigError, match=r"reward_model\.step_separator: is not read where reward_model\.labels"):
        configure(model, tmp_path, "reward_model.preset=bradley_terry", "reward_model.step_separator=x")
