"""Runs over several datasets report the loss of each and its share of the samples, and train as over one file with the same rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.values.source_names import SOURCE, make_distinct
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.prepare import prepare
from skyrl_engine.training.sft.trainer import run_sft

Configure = Callable[..., ResolvedConfig]

RANKS = {"launch": "ray", "ranks": 2}
SPLITS: dict[str, dict[str, Any]] = {
    "padded": {"training": {"micro_batch_rows": 3}},
    "packed": {"collator": {"use": "packed"}, "training": {"micro_batch_rows": None, "micro_batch_tokens": 40}},
    "two_ranks": {"training": {"micro_batch_rows": 2}, "run": RANKS},
    "sequence_mean": {"training": {"micro_batch_rows": 3}, "reducer": {"use": "sequence_mean"}},
}


@pytest.fixture(scope="module")
def files(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of `train.jsonl` in a file, and in two of different length; and a model that computes the same in training as elsewhere."""
    folder = tmp_path_factory.mktemp("sources")
    rows = (material / "train.jsonl").read_text().splitlines(keepends=True)
    for name, own in (("chat", rows[:16]), ("sums", rows[16:]), ("all", rows)):
        (folder / f"{name}.jsonl").write_text("".join(own))
    tokenizer = prepare_tokenizer(material)
    write_model(folder / "model", tokenizer=tokenizer, hidden_size=16, intermediate_size=32)
    tokenizer.save_pretrained(folder / "model")
    return folder


def prepare_tokenizer(material: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(material / "model")


def steps_of(directory: Path, kind: str = "step") -> list[dict[str, float]]:
    return [record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == kind]


def token_losses(resolved: ResolvedConfig, model: Path) -> list[tuple[int, np.ndarray]]:
    """The source of every sample, and the losses of its tokens that carry loss, as transformers computes them."""
    columns = prepare(resolved).train.columns
    scorer = AutoModelForCausalLM.from_pretrained(model).eval()
    losses = []
    for sample in range(len(columns)):
        ids = torch.from_numpy(columns.input_ids[slice(*columns.token_offsets[sample : sample + 2])].astype("int64"))
        carries = columns.loss_weight[slice(*columns.action_offsets[sample : sample + 2])] != 0
        with torch.no_grad():
            logprobs = scorer(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        losses.append((int(columns.sample_values[SOURCE][sample]), -logprobs.numpy()[-len(carries) :][carries]))
    return losses


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("split", SPLITS)
def test_the_loss_of_a_source_is_the_mean_over_its_own_tokens(configure: Configure, files: Path, split: str) -> None:
    """By the reducer's weights: of all its tokens alike with `token_mean`, of its samples alike with `sequence_mean`."""
    settings = SPLITS[split]
    keys = {
        **settings,
        "model": {"path": str(files / "model")},
        "data": {"train": [str(files / "chat.jsonl"), str(files / "sums.jsonl")], "eval": None},
        "training": {**settings["training"], "steps": 1, "batch_size": 23},
        "optimizer": {"warmup_steps": 0},
    }
    resolved = configure(**keys)
    (step,) = steps_of(run_sft(resolved).directory)
    losses = token_losses(resolved, files / "model")
    for number, name in enumerate(("chat", "sums")):
        own = [values for source, values in losses if source == number]
        expected = np.mean([values.mean() for values in own]) if split == "sequence_mean" else np.concatenate(own).mean()
        assert step[f"loss/{name}"] == pytest.approx(expected, rel=1e-5)
        assert step[f"sample_share/{name}"] == len(own) / 23
    assert step["loss/chat"] != pytest.approx(step["loss/sums"], rel=1e-3), "each has its own"
    weights = [len(values) for _, values in losses] if split != "sequence_mean" else [1 for _ in losses]
    share = sum(weight for weight, (source, _) in zip(weights, losses, strict=True) if source == 0) / sum(weights)
    assert share * step["loss/chat"] + (1 - share) * step["loss/sums"] == pytest.approx(step["loss"], rel=1e-5)


def test_two_files_train_as_one_with_their_rows_to_the_last_bit(configure: Configure, files: Path) -> None:
    """Also with dropout, and in evaluations, which report each dataset of theirs."""
    two = {"train": [str(files / "chat.jsonl"), str(files / "sums.jsonl")]}
    evaluated = {"eval": [str(files / "sums.jsonl"), str(files / "chat.jsonl")]}
    runs = [
        run_sft(configure(name, data={**data, **evaluated}, training={"steps": 4})).directory
        for name, data in (("one", {"train": str(files / "all.jsonl")}), ("two", two))
    ]
    one, several = map(steps_of, runs)
    for plain, step in zip(one, several, strict=True):
        more = {name: step.pop(name) for name in list(step) if name.startswith(("loss/", "sample_share/", "token_share/"))}
        assert {name: value for name, value in step.items() if name != "tokens_per_second"} == {
            name: value for name, value in plain.items() if name != "tokens_per_second"
        }
        assert more["sample_share/chat"] + more["sample_share/sums"] == 1
    (alone,) = steps_of(
        run_sft(configure("alone", data={**two, "eval": str(files / "chat.jsonl")}, training={"steps": 4})).directory, "evaluation"
    )
    (both,) = steps_of(runs[1], "evaluation")
    assert both["loss/chat"] == pytest.approx(alone["loss"], rel=1e-6)
    assert "loss/chat" not in alone


def test_names_that_come_twice_have_numbers() -> None:
    assert make_distinct(["train", "chat", "train"]) == ("train_1", "chat", "train_2")
    assert make_distinct(["a", "a_1", "a"]) == ("a_2", "a_1", "a_3")
