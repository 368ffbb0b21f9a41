"""Runs of reward models from configuration to run directory: what carries loss, held-out pairs, exports for transformers, exact resumes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import rarely
from pair_runs import Configure, Ending
from safetensors.numpy import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import ConfigError, DataError, PluginBrokenError, UnsupportedError
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.export import export_checkpoint
from skyrl_engine.training.reward_model.prepare import prepare
from skyrl_engine.training.reward_model.trainer import plan_reward_model, run_reward_model

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
NO_RUN = {"training": {"steps": 1}}


def steps(directory: Path, kind: str = "step") -> list[dict[str, float]]:
    return [record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == kind]


def scores_of(model: Path, resolved: ResolvedConfig) -> tuple[torch.Tensor, float]:
    """The scores of the held-out texts by transformers, in one batch padded on the right, chosen and rejected in turn, and pairs in order."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval()
    assert classifier.config.num_labels == 1
    evaluation = prepare(resolved).evaluation
    assert evaluation is not None
    columns = evaluation.columns
    texts = [
        columns.input_ids[start : end - 1].tolist()
        for start, end in zip(columns.token_offsets[:-1], columns.token_offsets[1:], strict=True)
    ]
    padded = tokenizer.pad({"input_ids": texts}, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        scores = classifier(**padded).logits[:, 0]
    return scores, float((scores[::2] > scores[1::2]).float().mean())


def test_a_reward_model_learns_and_transformers_gives_its_scores(configure: Configure) -> None:
    """The head starts at zero, so the first loss is log 2. The last evaluation's means are those of the exported model in transformers."""
    resolved = configure(training={"steps": 12}, evaluation={"at_start": True})
    done = run_reward_model(resolved)
    first, *_, last = steps(done.directory)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["loss_tokens"] == 8
    assert last["rewards/accuracies"] == 1.0
    before, after = steps(done.directory, "evaluation")
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-6)
    scores, accuracy = scores_of(RunDirectory(done.directory).model, resolved)
    assert scores.std() > 0.1
    assert after["rewards/accuracies"] == accuracy
    assert accuracy > 0.9
    assert after["rewards/chosen"] == pytest.approx(scores[::2].mean().item(), abs=1e-5)
    assert after["rewards/rejected"] == pytest.approx(scores[1::2].mean().item(), abs=1e-5)
    assert after["rewards/min"] == pytest.approx(scores.min().item(), abs=1e-5)
    loss = torch.nn.functional.softplus(scores[1::2] - scores[::2]).mean()
    assert after["loss"] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize(
    "family",
    ["llama", *map(rarely, ("gemma", "qwen2", "gemma2"))],
)
def test_an_export_of_other_families_scores_alike_and_is_trained_on(
    configure: Configure, pairs: Path, tmp_path: Path, family: str
) -> None:
    """Their language-model head is not tied, and the export lacks it: a further run reads the rest, and begins where the first one ended."""
    texts = [row.split('"')[3] for row in (pairs / "train.jsonl").read_text().splitlines()]
    tokenizer = write_tokenizer(tmp_path / family, texts)
    write_model(tmp_path / family, family, tokenizer=tokenizer, max_position_embeddings=64, **SIZES, tie_word_embeddings=False)
    resolved = configure("first", model={"path": str(tmp_path / family)}, training={"steps": 3})
    done = run_reward_model(resolved)
    model = RunDirectory(done.directory).model
    weights = load_file(model / "model.safetensors")
    assert "score.weight" in weights
    assert not any(name.startswith(("lm_head", "score.bias")) for name in weights)
    (after,) = steps(done.directory, "evaluation")
    scores, _ = scores_of(model, resolved)
    assert after["rewards/chosen"] == pytest.approx(scores[::2].mean().item(), abs=1e-5)
    further = run_reward_model(
        configure("further", model={"path": str(model)}, training={"steps": 1}, evaluation={"at_start": True})
    )
    assert steps(further.directory, "evaluation")[0]["loss"] == pytest.approx(after["loss"], abs=1e-6)


def test_adapters_are_merged_into_the_export(configure: Configure, tmp_path: Path) -> None:
    resolved = configure(model={"lora": {"rank": 4}}, training={"steps": 3}, optimizer={"learning_rate": 5e-2})
    done = run_reward_model(resolved)
    (after,) = steps(done.directory, "evaluation")
    scores, _ = scores_of(RunDirectory(done.directory).model, resolved)
    assert after["rewards/chosen"] == pytest.approx(scores[::2].mean().item(), abs=1e-4)
    export_checkpoint(done.directory, tmp_path / "exported")
    again, _ = scores_of(tmp_path / "exported", resolved)
    torch.testing.assert_close(again, scores, rtol=0, atol=1e-6)


def test_an_exported_checkpoint_is_the_model_of_the_run(configure: Configure, tmp_path: Path) -> None:
    done = run_reward_model(configure(training={"steps": 2}))
    export_checkpoint(done.directory, tmp_path / "exported")
    ours = load_file(RunDirectory(done.directory).model / "model.safetensors")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in exported.items()} == {
        name: tensor.tobytes() for name, tensor in ours.items()
    }
    assert (tmp_path / "exported" / "config.json").read_bytes() == (RunDirectory(done.directory).model / "config.json").read_bytes()


def test_one_token_behind_the_text_carries_loss(configure: Configure) -> None:
    columns = prepare(configure(**NO_RUN)).train.columns
    assert np.diff(columns.action_offsets).tolist() == [1] * 20
    assert columns.loss_weight.tolist() == [1] * 20
    tokenizer = AutoTokenizer.from_pretrained(configure(**NO_RUN).config.model.path)
    ends = columns.token_offsets[1:]
    assert set(columns.input_ids[ends - 1].tolist()) == {tokenizer.pad_token_id}
    assert set(columns.input_ids[ends - 2].tolist()) == {tokenizer.eos_token_id}


def test_truncation_leaves_room_for_the_token_behind(configure: Configure) -> None:
    whole = np.diff(prepare(configure(**NO_RUN)).train.columns.token_offsets)
    longest = int(whole.max()) - 1
    cut = prepare(configure(data={"max_length": longest, "overlong": "truncate"}, **NO_RUN)).train
    lengths = np.diff(cut.columns.token_offsets)
    assert lengths.max() == longest
    assert cut.counts.truncated == int((whole > longest).sum())
    assert np.diff(cut.columns.action_offsets).tolist() == [1] * len(lengths)
    with pytest.raises(DataError, match=r"tokens and one for the reward, more than data\.max_length"):
        prepare(configure(data={"max_length": longest}, **NO_RUN))


def test_margins_are_read_from_the_rows(configure: Configure, tmp_path: Path, pairs: Path) -> None:
    """With a head of zeros the loss of a pair is log(1 + exp(margin))."""
    rows = (pairs / "train.jsonl").read_text().splitlines()[:4]
    with_margin = [row.replace("}", f', "margin": {number / 2}}}') for number, row in enumerate(rows)]
    (tmp_path / "margins.jsonl").write_text("\n".join(with_margin) + "\n")
    data = {"train": str(tmp_path / "margins.jsonl"), "eval": None}
    (only,) = steps(run_reward_model(configure(data=data, loss={"margins": True}, **NO_RUN)).directory)
    assert only["loss"] == pytest.approx(np.mean([math.log1p(math.exp(number / 2)) for number in range(4)]), abs=1e-6)
    with pytest.raises(DataError, match="has no column 'margin', which loss 'bradley_terry'"):
        plan_reward_model(configure(loss={"margins": True}, **NO_RUN))


def test_a_run_that_was_ended_resumes_to_the_same_bits(configure: Configure) -> None:
    settings: dict[str, Any] = {"checkpoint": {"every": 2}, "training": {"steps": 4}}
    whole = run_reward_model(configure("whole", **settings)).directory
    with pytest.raises(PluginBrokenError):
        run_reward_model(configure("cut", **settings), observers=[Ending()])
    cut = run_reward_model(configure("cut", **settings), resume=True).directory
    saved = [load_file(RunDirectory(each).model / "model.safetensors") for each in (cut, whole)]
    assert {name: each.tobytes() for name, each in saved[0].items()} == {name: each.tobytes() for name, each in saved[1].items()}


@pytest.mark.proof
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
@pytest.mark.usefixtures("without_ray")
def test_two_ranks_learn_as_one(configure: Configure, backend: str) -> None:
    """Losses and gradient norms of three steps are those of one rank, up to float32 sums in another order; so is what is exported."""
    one = configure("one", training={"steps": 3})
    two = configure("two", training={"steps": 3}, backend={"use": backend}, run={"launch": "ray", "ranks": 2})
    alone, both = (run_reward_model(each).directory for each in (one, two))
    for name in ("loss", "grad_norm", "rewards/margins"):
        np.testing.assert_allclose(
            [each[name] for each in steps(both)], [each[name] for each in steps(alone)], rtol=1e-3, atol=1e-6
        )
    scores = [scores_of(RunDirectory(each).model, one)[0] for each in (alone, both)]
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-3, atol=1e-4)


def test_what_cannot_work_is_refused_while_planning(configure: Configure, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.classifier"):
        plan_reward_model(configure(reward_model={"preset": "none"}))
    with pytest.raises(UnsupportedError, match="reads 'logprobs' of the model"):
        plan_reward_model(configure(loss={"use": "simpo"}))
    with pytest.raises(DataError, match=r"loss .bradley_terry. .* compares the two answers of a pair"):
        plan_reward_model(configure(data={"train": str(pairs / "single.jsonl"), "eval": None}))
    with pytest.raises(ConfigError, match=r"needs model\.value_head = true"):
        configure(model={"value_head": False})
    tokenizer = AutoTokenizer.from_pretrained(pairs / "model")
    write_model(tmp_path / "cohere", "cohere", tokenizer=tokenizer, bos_token_id=0, **SIZES)
    tokenizer.save_pretrained(tmp_path / "cohere")
    with pytest.raises(UnsupportedError, match="has no sequence classifier for"):
        plan_reward_model(configure(model={"path": str(tmp_path / "cohere")}))
    plan = plan_reward_model(configure())
    assert plan.train["loss_tokens"] == plan.train["samples"] == 20
