"""Preferences about images: rewards, loss and gradient by definition on transformers' own model, and rows that hold their images."""

import base64
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import now
from pair_runs import Configure, runs_over
from safetensors.numpy import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from skyrl_engine.errors import DataError, ImageError, UnsupportedError
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.preference.prepare import prepare
from skyrl_engine.training.preference.trainer import run_preference
from skyrl_engine.training.sft.trainer import run_sft

ASKED = [("a.png",), ("b.png", "c.png"), (), ("c.png",), ("a.png",), ("b.png",)]
ANSWERS = [("a cat", "a dog"), ("it is a tree", "it is a dog"), ("a dog", "a cat"), ("a tree", "it is a cat")]
BETA = 0.3


def pair_of(number: int, *, place: str = "path", folder: Path | None = None) -> dict[str, Any]:
    """A question about images, with a right and a wrong answer; the images are paths in parts, in a column, or bytes in the row."""
    names = ASKED[number % len(ASKED)]
    images: list[Any] = list(names)
    if place == "bytes":
        assert folder is not None
        images = ["data:image/png;base64," + base64.b64encode((folder / name).read_bytes()).decode() for name in names]
    parts = [*({"type": "image"} if place == "column" else {"type": "image", "image": image} for image in images)]
    chosen, rejected = ANSWERS[number % len(ANSWERS)]
    return {
        "prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it"}]}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
        **({"images": images} if place == "column" else {}),
    }


@pytest.fixture(scope="module")
def image_pairs(seeing: Path) -> Path:
    for place in ("path", "column", "bytes"):
        rows = [pair_of(number, place=place, folder=seeing) for number in range(12)]
        (seeing / f"pairs-{place}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    single = [
        {"prompt": row["prompt"], "completion": row[half], "label": half == "chosen"}
        for row in (pair_of(number) for number in range(12))
        for half in ("chosen", "rejected")
    ]
    (seeing / "single.jsonl").write_text("".join(json.dumps(row) + "\n" for row in single))
    return seeing


@pytest.fixture
def configure(image_pairs: Path, tmp_path: Path) -> Configure:
    made = runs_over(image_pairs, "preference", tmp_path)

    def make(name: str = "run", **changes: Any) -> Any:
        data = {"train": str(image_pairs / "pairs-path.jsonl"), "eval": None, **changes.pop("data", {})}
        loss = changes.pop("loss", {"use": "dpo", "beta": BETA})
        return made(name, data=data, loss=loss, **changes)

    return make


def steps(directory: Path, kind: str = "step") -> list[dict[str, float]]:
    return [record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == kind]


def weights(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model" / "model.safetensors")


class Definition:
    """DPO in float64: each half alone through transformers' own model, with images as its own processor prepares them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.processor = AutoImageProcessor.from_pretrained(folder / "model", use_fast=False)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        self.model = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64).eval()

    def logprob(self, row: dict[str, Any], half: str) -> torch.Tensor:
        """The sum over the answer's tokens."""
        from PIL import Image

        names = [part["image"] for part in row["prompt"][0]["content"] if part["type"] == "image"]
        before = self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        text = before + row[half][0]["content"] + "<|im_end|>"
        ids, prompt = [self.tokenizer(each, add_special_tokens=False).input_ids for each in (text, before)]
        inputs: dict[str, Any] = {}
        image_token = self.model.config.image_token_id
        if names:
            inputs = dict(self.processor([Image.open(self.folder / name) for name in names], return_tensors="pt"))
            merge = self.processor.merge_size**2
            repeats = iter([int(grid.prod()) // merge for grid in inputs["image_grid_thw"]])
            counts = [next(repeats) if token == image_token else 1 for token in ids]
            grown = len(prompt) + sum(counts) - len(ids)
            ids = [token for token, count in zip(ids, counts, strict=True) for _ in range(count)]
            inputs["mm_token_type_ids"] = torch.tensor([[int(token == image_token) for token in ids]])
        else:
            grown = len(prompt)
        logits = self.model(input_ids=torch.tensor([ids]), **inputs).logits[0, :-1].log_softmax(-1)
        labels = torch.tensor(ids[1:])
        return logits.gather(-1, labels[:, None])[grown - 1 :].sum()


@pytest.mark.parametrize("collator", now(["padded", "packed"], "packed"))
def test_rewards_loss_and_gradient_are_those_of_the_definition(
    configure: Configure, image_pairs: Path, tmp_path: Path, collator: str
) -> None:
    """After three steps, against the model before them: a reward is beta times the difference of log-probabilities, each half by itself.

    All pairs are one mini-batch. float32 differs from float64 by 1e-4 of rewards, which are differences of sums near each other.
    """
    size = {"micro_batch_rows": 4} if collator == "padded" else {"micro_batch_rows": None, "micro_batch_tokens": 160}
    whole = {"batch_size": 24, "shuffle": False, **size}
    tables: dict[str, Any] = {"collator": {"use": collator}, "optimizer": {"learning_rate": 1e-3}}
    first = run_preference(configure("first", training={**whole, "steps": 3}, **tables)).directory
    begun = steps(first)[0]
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert begun[name] == 0.0, "reference and policy are scored over one plan"
    assert begun["loss"] == pytest.approx(math.log(2), abs=1e-6)
    still = {**tables, "optimizer": {"learning_rate": 1e-30}, "reference": {"path": str(image_pairs / "model")}}
    trained = run_preference(
        configure("again", model={"path": str(first / "model")}, training={**whole, "steps": 1}, **still)
    ).directory
    (step,) = steps(trained)
    policy, reference = Definition(image_pairs, first / "model"), Definition(image_pairs, image_pairs / "model")
    rewards: dict[str, list[torch.Tensor]] = {"chosen": [], "rejected": []}
    for row in map(json.loads, (image_pairs / "pairs-path.jsonl").read_text().splitlines()):
        for half, values in rewards.items():
            with torch.no_grad():
                base = reference.logprob(row, half)
            values.append(BETA * (policy.logprob(row, half) - base))
    chosen, rejected = (torch.stack(values) for values in rewards.values())
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    loss.backward()
    chosen, rejected, loss = chosen.detach(), rejected.detach(), loss.detach()
    norm = math.sqrt(
        sum(float(parameter.grad.square().sum()) for parameter in policy.model.parameters() if parameter.grad is not None)
    )
    assert abs(float(chosen.mean() - rejected.mean())) > 1e-3, "three steps moved the model"
    assert step["rewards/chosen"] == pytest.approx(float(chosen.mean()), rel=1e-3, abs=1e-5)
    assert step["rewards/rejected"] == pytest.approx(float(rejected.mean()), rel=1e-3, abs=1e-5)
    assert step["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_an_image_changes_what_is_learned(configure: Configure, image_pairs: Path) -> None:
    """The vision tower learns: a gradient reaches it, as the weights after a step show."""
    done = run_preference(configure(training={"steps": 2, "micro_batch_rows": 2}))
    before, after = load_file(image_pairs / "model" / "model.safetensors"), weights(done.directory)
    moved = [name for name in after if "visual" in name and not np.array_equal(before[name], after[name])]
    assert moved


@pytest.mark.parametrize("place", now(["column", "bytes"], "column"))
def test_images_may_lie_in_a_column_or_in_the_row(configure: Configure, image_pairs: Path, place: str) -> None:
    """The same bits of every step, whatever holds the images; the second half of a pair reads its row's images as well."""
    training = {"steps": 3, "micro_batch_rows": 3}
    expected = run_preference(configure("expected", training=training)).directory
    other = run_preference(
        configure("other", training=training, data={"train": str(image_pairs / f"pairs-{place}.jsonl")})
    ).directory
    own = ("loss", "grad_norm", "rewards/margins")
    assert [[step[name] for name in own] for step in steps(other)] == [[step[name] for name in own] for step in steps(expected)]


@pytest.mark.nightly
def test_precomputed_scores_of_the_reference_are_those_of_the_run(configure: Configure) -> None:
    """The reference reads the images itself; another cut of micro-batches differs by rounding."""
    training = {"steps": 3, "micro_batch_rows": 4}
    plain = run_preference(configure("plain", training=training)).directory
    kept = run_preference(configure("kept", training=training, reference={"precompute": True})).directory
    for one, other in zip(steps(plain), steps(kept), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.parametrize("precompute", now([False, True], True))
def test_ktos_baseline_keeps_the_images_of_its_prompts(configure: Configure, image_pairs: Path, precompute: bool) -> None:
    """Mismatched answers follow the prompt's own images: a model that equals its reference has a baseline and rewards of 0."""
    resolved = configure(
        data={"train": str(image_pairs / "single.jsonl")},
        loss={"use": "kto"},
        training={"steps": 2, "micro_batch_rows": 4},
        reference={"precompute": precompute},
    )
    first, second = steps(run_preference(resolved).directory)
    assert first["rewards/chosen"] == pytest.approx(0.0, abs=1e-5)
    assert math.isfinite(second["loss"])


def test_a_frozen_model_that_takes_no_images_is_refused(configure: Configure, image_pairs: Path, tmp_path: Path) -> None:
    """One that takes them scores image rows, as a reference above, and as a teacher: a student that is its teacher has divergence 0."""
    blind = tmp_path / "blind"
    write_model(blind, tokenizer=AutoTokenizer.from_pretrained(image_pairs / "model"), vocab_size=128)
    shutil.copy(image_pairs / "model" / "chat_template.jinja", blind)
    AutoTokenizer.from_pretrained(image_pairs / "model").save_pretrained(blind)
    with pytest.raises(UnsupportedError, match=r"the rows hold images, and the reference .* takes none"):
        prepare(configure(reference={"path": str(blind)}))
    rows = {"data": {"train": str(image_pairs / "train.jsonl")}, "loss": {"use": "divergence"}, "trainer": "sft"}
    with pytest.raises(UnsupportedError, match=r"the rows hold images, and the teacher .* takes none"):
        run_sft(configure("blind-teacher", **rows, teacher={"path": str(blind)}))
    seen = run_sft(configure("seen", **rows, teacher={"path": str(image_pairs / "model")}, training={"steps": 1}))
    assert (steps(seen.directory)[0]["loss"], steps(seen.directory)[0]["grad_norm"]) == (0.0, 0.0)


def test_an_image_in_an_answer_is_refused_and_a_bad_one_ends_both_halves(
    configure: Configure, image_pairs: Path, tmp_path: Path
) -> None:
    answered = pair_of(0)
    answered["rejected"][0]["content"] = [{"type": "image", "image": "b.png"}, {"type": "text", "text": "a dog"}]
    (image_pairs / "answered.jsonl").write_text(json.dumps(answered) + "\n")
    with pytest.raises(
        DataError, match="'rejected': its answer holds an image, and the images of a preference are those of its prompt"
    ):
        prepare(configure(data={"train": str(image_pairs / "answered.jsonl")}))
    absent = pair_of(0)
    absent["prompt"][0]["content"][0]["image"] = "nowhere.png"
    (image_pairs / "absent.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (absent, pair_of(1), pair_of(2))))
    with pytest.raises(ImageError, match=r"nowhere\.png"):
        prepare(configure(data={"train": str(image_pairs / "absent.jsonl")}))
    kept = prepare(configure(data={"train": str(image_pairs / "absent.jsonl"), "bad_images": "drop"}, training={"batch_size": 4}))
    assert len(kept.run.train.columns) == 4
