"""`[teacher]` with rows of data: divergences over the whole vocabulary, and a teacher's scores as a column, checked from outside."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from skyrl_engine.cli import app
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts import Divergence
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.proof.plain_model import divergence
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.prepare import prepare

WORDS = ["one two three four five six seven eight"]
ROWS = [
    {"prompt_ids": [3, 4 + number % 3], "response_ids": [5 + (number + place) % 5 for place in range(2 + number % 4)]}
    for number in range(12)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a larger teacher, one with logits for more tokens, and one of another tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for name, settings in {
        "student": {"initializer_range": 0.05},
        "teacher": {"initializer_range": 0.3, "hidden_size": 48},
        "wider": {"vocab_size": 64},
    }.items():
        write_model(folder / name, tokenizer=write_tokenizer(folder / name, WORDS), **settings)
    write_model(folder / "other", tokenizer=write_tokenizer(folder / "other", ["quite other words than those"]))
    return folder


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return ROWS


def distill(models: Path, *more: str, teacher: str = "teacher", output: str = "run") -> list[dict[str, float]]:
    """The metrics of every step."""
    arguments = [
        *("distill", "--model", str(models / "student"), "--teacher", str(models / teacher), "--data", "rows.jsonl"),
        *("--batch-size", "12", "--output", output, "--quiet", "run.device=cpu", "data.cache=./cache", *more),
    ]
    assert app.main(arguments) == 0
    return [record["metrics"] for record in read_metrics(Path(output) / "metrics.jsonl") if record["kind"] == "step"]


def whole_logprobs(path: Path, row: dict[str, Any]) -> torch.Tensor:
    """[n, v] about the response's tokens, in float64, of transformers' own model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    ids = row["prompt_ids"] + row["response_ids"]
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, len(row["prompt_ids"]) - 1 : -1]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("forward", ["training.micro_batch_rows=5"]),
        ("reverse", ["collator.use=packed", "training.micro_batch_tokens=20"]),
        ("jensen_shannon", ["collator.use=packed", "training.micro_batch_tokens=20", "model.logits_per_chunk=60"]),
    ],
)
def test_the_loss_is_the_divergence_of_whole_distributions(
    models: Path, rows: list[dict[str, Any]], kind: Any, more: list[str]
) -> None:
    """By definition on whole logits, a mean over tokens; float32 sums in another order: 1e-5. Ten steps bring the student nearer."""
    steps = distill(models, f"loss.divergence={kind}", "loss.temperature=2.0", "--steps", "10", "--learning-rate", "1e-2", *more)
    logits = [[whole_logprobs(models / name, row) for row in rows] for name in ("student", "teacher")]
    student, teacher = (torch.cat(each) for each in logits)
    assert steps[0]["loss"] == pytest.approx(
        divergence(Divergence(kind, temperature=2.0), student, teacher).mean().item(), rel=1e-5
    )
    assert steps[0]["divergence"] == pytest.approx(steps[0]["loss"], rel=1e-6)
    assert steps[0]["top_1_agreement"] == pytest.approx((student.argmax(-1) == teacher.argmax(-1)).double().mean().item())
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    assert steps[-1]["top_1_agreement"] > steps[0]["top_1_agreement"]


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen_shannon"])
def test_a_student_that_is_its_teacher_has_divergence_and_gradient_0(models: Path, kind: str) -> None:
    (step,) = distill(models, f"loss.divergence={kind}", "--steps", "1", teacher="student")
    assert (step["loss"], step["grad_norm"], step["top_1_agreement"]) == (0.0, 0.0, 1.0)


def test_a_teachers_scores_are_a_column_over_the_steps_own_plan(models: Path, rows: list[dict[str, Any]]) -> None:
    """`teacher_kl` with k1 is the mean of log q - log p; a student that is its teacher has 0 exactly. Held-out rows are scored too."""
    (step,) = distill(models, "--loss", "teacher_kl", "loss.estimator=k1", "--steps", "1")
    difference = count = 0.0
    for row in rows:
        student, teacher = (whole_logprobs(models / name, row).log_softmax(-1) for name in ("student", "teacher"))
        for place, token in enumerate(row["response_ids"]):
            difference += float(student[place, token] - teacher[place, token])
            count += 1
    assert step["loss"] == pytest.approx(difference / count, rel=1e-5)
    held_out = ["data.eval_fraction=0.25", "evaluation.every=1"]
    (step,) = distill(models, "--loss", "teacher_kl", "--steps", "1", *held_out, teacher="student", output="again")
    assert step["loss"] == 0.0
    (evaluated,) = [record["metrics"] for record in read_metrics(Path("again/metrics.jsonl")) if record["kind"] == "evaluation"]
    assert evaluated["loss"] == 0.0, "a gradient of 0 leaves the weights as they were"


@pytest.mark.nightly
@pytest.mark.usefixtures("rows")
def test_a_resumed_run_has_the_same_bits(models: Path) -> None:
    keys = ["--learning-rate", "1e-2", "--batch-size", "4"]
    distill(models, "--steps", "4", *keys, output="whole")
    distill(models, "--steps", "2", *keys, output="cut")
    distill(models, "--steps", "4", *keys, "checkpoint.resume=true", output="cut")
    whole, cut = (load_file(Path(each) / "model/model.safetensors") for each in ("whole", "cut"))
    assert {name: each.tobytes() for name, each in whole.items()} == {name: each.tobytes() for name, each in cut.items()}


@pytest.mark.usefixtures("rows")
def test_what_cannot_work_is_refused_while_planning(models: Path) -> None:
    def require_refusal(words: str, *, teacher: str | None = "teacher", loss: str = "divergence", **tables: Any) -> None:
        options = {
            "model": {"path": str(models / "student")},
            "data": {"train": "rows.jsonl", "cache": "cache"},
            "training": {"steps": 1, "batch_size": 4},
            "loss": {"use": loss},
            **({} if teacher is None else {"teacher": {"path": str(models / teacher)}}),
            **tables,
        }
        with pytest.raises(UnsupportedError, match=words):
            prepare(resolve(from_dict(options, "test")))

    require_refusal("compares the model with a teacher, and there is no teacher", teacher=None)
    require_refusal("nothing would be learned from it", loss="cross_entropy")
    require_refusal("has another tokenizer than the trained model: the token .* is number", teacher="other")
    require_refusal(
        r"has logits for 64 tokens, and the trained model for \d+: the first token that only one of them knows is number \d+",
        teacher="wider",
    )
