"""A teacher with another tokenizer: the losses `uld` and `gold`, against loops over transformers' own models in float64."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import rarely
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from skyrl_engine.cli import app
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling.alignment import TextTokenizer, translate
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.prepare import prepare

STUDENT_TEXTS = ["the cat sat on the mat", "a dog ran over the hill", "naïve café"]
TEACHER_TEXTS = ["cats and dogs sit on hills", "the mat is over there", "running hills"]
ALPHABET = ["abcdefghijklmnopqrstuvwxyz", "☕ é ï"]
ROWS = [
    {"prompt": "the cat", "completion": " sat on the hills"},
    {"prompt": "a dog ran", "completion": " over there and the cats sat"},
    {"prompt": "cats and", "completion": " dogs on mats, naïve café ☕"},
    {"prompt": "the", "completion": " hill"},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, and a larger teacher whose tokenizer has other tokens, in another number."""
    folder = tmp_path_factory.mktemp("models")
    for name, texts, size, settings in (
        ("student", STUDENT_TEXTS, 300, {"initializer_range": 0.1}),
        ("teacher", TEACHER_TEXTS, 330, {"initializer_range": 0.3, "hidden_size": 48}),
    ):
        tokenizer = write_tokenizer(folder / name, [*texts, *ALPHABET], size=size)
        # the inverse of what writes tokens, as every released model has it
        tokenizer.backend_tokenizer.decoder = ByteLevel()
        tokenizer.save_pretrained(folder / name)
        write_model(folder / name, tokenizer=tokenizer, **settings)
    return folder


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def distill(models: Path, loss: str, *more: str, teacher: str = "teacher", output: str = "run") -> list[dict[str, float]]:
    """The metrics of every step."""
    arguments = [
        *(
            "distill",
            "--model",
            str(models / "student"),
            "--teacher",
            str(models / teacher),
            "--data",
            "rows.jsonl",
            "--loss",
            loss,
        ),
        *("--batch-size", "4", "--output", output, "--quiet", "run.device=cpu", "data.cache=./cache", *more),
    ]
    assert app.main(arguments) == 0
    return [record["metrics"] for record in read_metrics(Path(output) / "metrics.jsonl") if record["kind"] == "step"]


class Definition:
    """The losses as loops: one row at a time, whole logits, boundaries by decoding prefixes."""

    def __init__(self, models: Path, teacher: str = "teacher") -> None:
        paths = (models / "student", models / teacher)
        self.tokenizers = [AutoTokenizer.from_pretrained(path) for path in paths]
        self.models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in paths]

    def ids(self, row: dict[str, str]) -> tuple[list[int], list[int], int]:
        """The tokens of both, each with its own end, and the number of the student's that are the prompt."""
        student, teacher = self.tokenizers
        prompt = student(row["prompt"], add_special_tokens=False).input_ids
        ours = student(row["prompt"] + row["completion"], add_special_tokens=False).input_ids
        assert ours[: len(prompt)] == prompt
        theirs = teacher(row["prompt"] + row["completion"], add_special_tokens=False).input_ids
        return [*ours, student.eos_token_id], [*theirs, teacher.eos_token_id], len(prompt)

    def groups(self, ours: list[int], theirs: list[int]) -> list[tuple[range, range]]:
        """Stretches of tokens between texts that both make."""
        texts = []
        for tokenizer, ids in zip(self.tokenizers, (ours, theirs), strict=True):
            # the last token is the end of the text, whatever it is called
            texts.append([tokenizer.decode(ids[:count]).encode() for count in range(len(ids))] + [b"END"])
        pairs = [(0, 0)]
        for count, text in enumerate(texts[0]):
            if "\N{REPLACEMENT CHARACTER}".encode() not in text and text in texts[1] and count:
                pairs.append((count, texts[1].index(text)))
        return [(range(a, b), range(c, d)) for (a, c), (b, d) in pairwise(pairs)]

    def loss(self, kind: str, **options: Any) -> tuple[torch.Tensor, int, int]:
        """The mean over scored tokens; and how many tokens there are, and of them in groups."""
        total, scored, aligned = torch.zeros((), dtype=torch.float64), 0, 0
        for row in ROWS:
            ours, theirs, prompt = self.ids(row)
            student = self.models[0](torch.tensor([ours])).logits[0].softmax(-1)
            with torch.no_grad():
                teacher = self.models[1](torch.tensor([theirs])).logits[0].softmax(-1)
            scored += len(ours) - prompt
            for own, other in self.groups(ours, theirs):
                is_written = self.tokenizers[1].unk_token_id not in [theirs[place] for place in other]
                if own[0] < prompt or other[0] < 1 or not is_written:
                    continue
                aligned += len(own)
                q, p = student[own[-1] - 1], teacher[other[-1] - 1]
                for place in own[:-1]:
                    q = q * student[place - 1, ours[place]]
                for place in other[:-1]:
                    p = p * teacher[place - 1, theirs[place]]
                total = total + (self.uld(q, p) if kind == "uld" else self.gold(q, p, **options))
        return total / scored, aligned, scored

    def uld(self, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        q, p = q.sort(descending=True).values, p.sort(descending=True).values
        size = max(len(q), len(p))
        return sum(((q[k] if k < len(q) else 0) - (p[k] if k < len(p) else 0)).abs() for k in range(size))  # type: ignore[return-value]

    def gold(self, q: torch.Tensor, p: torch.Tensor, beta: float = 0.5, weights: tuple[float, float] | None = None) -> torch.Tensor:
        ours, theirs = (tokenizer.get_vocab() for tokenizer in self.tokenizers)
        shared = [(ours[token], number) for token, number in theirs.items() if token in ours]
        least = torch.tensor(1e-8, dtype=torch.float64)
        matched = torch.zeros((), dtype=torch.float64)
        for own, other in shared:
            a, b = torch.maximum(q[own], least), torch.maximum(p[other], least)
            m = beta * b + (1 - beta) * a
            if beta == 0:
                matched = matched + b * (b / a).log()
            elif beta == 1:
                matched = matched + a * (a / b).log()
            else:
                matched = matched + beta * b * (b / m).log() + (1 - beta) * a * (a / m).log()
        rest_q = q[[k for k in range(len(q)) if k not in {own for own, _ in shared}]]
        rest_p = p[[k for k in range(len(p)) if k not in {other for _, other in shared}]]
        share = len(shared) / len(p)
        weight, other_weight = weights or (share, 1 - share)
        return weight * matched + other_weight * self.uld(rest_q, rest_p)


CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("uld", {}, []),
    ("gold", {}, []),
    ("gold", {"beta": 0.0}, ["loss.beta=0.0"]),
    ("gold", {"beta": 1.0, "weights": (0.7, 0.2)}, ["loss.beta=1.0", "loss.matched_weight=0.7", "loss.unmatched_weight=0.2"]),
]


@pytest.mark.parametrize(("kind", "options", "keys"), CASES)
@pytest.mark.parametrize("more", [("training.micro_batch_rows=3",), ("collator.use=packed", "model.logits_per_chunk=900")])
def test_value_and_gradient_are_those_of_the_definition(
    models: Path, kind: str, options: dict[str, Any], keys: list[str], more: tuple[str, ...]
) -> None:
    """Groups of several tokens on either side are among them. float32 against float64: 1e-5 of the loss, 1e-4 of the gradient's norm."""
    require_definition(models, kind, options, *keys, *more)


DIVIDED = {
    "tp2": "tensor_parallel",
    "cp2": "context_parallel",
    "pp2": "pipeline_parallel",
}


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if each == "one" else pytest.mark.nightly) for each in ("one", *DIVIDED)]
)
@pytest.mark.parametrize("kind", ["uld", rarely("gold")])
def test_divided_heads_are_compared_alike(models: Path, kind: str, layout: str) -> None:
    """On megatron: sorted probabilities are of all ranks' parts of the vocabulary, and groups of tokens may lie on two ranks."""
    ranks = () if layout == "one" else ("run.launch=ray", "run.ranks=2", f"backend.{DIVIDED[layout]}=2")
    require_definition(models, kind, {}, "collator.use=packed", "model.logits_per_chunk=900", "backend.use=megatron", *ranks)


@pytest.mark.nightly
@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("kind", ["uld", "gold"])
def test_context_parallel_ranks_compare_alike(models: Path, kind: str) -> None:
    ranks = ("run.launch=ray", "run.ranks=2", "backend.context_parallel=2")
    require_definition(models, kind, {}, "collator.use=packed", "model.logits_per_chunk=900", *ranks)


def require_definition(models: Path, kind: str, options: dict[str, Any], *more: str) -> None:
    """Require loss, gradient norm and shares of a step."""
    (step,) = distill(models, kind, "--steps", "1", "--learning-rate", "1e-30", *more)
    definition = Definition(models)
    loss, aligned, scored = definition.loss(kind, **options)
    loss.backward()
    squares = [parameter.grad.square().sum() for parameter in definition.models[0].parameters() if parameter.grad is not None]
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step["divergence"] == pytest.approx(loss.item(), rel=1e-5)
    assert step["grad_norm"] == pytest.approx(torch.stack(squares).sum().sqrt().item(), rel=1e-4)
    assert step["teacher/aligned_share"] == pytest.approx(aligned / scored)


def test_the_groups_of_the_rows_are_of_every_kind(models: Path) -> None:
    """One token for one, one for several, several for one, and several for several: what the definition is compared at."""
    definition = Definition(models)
    sizes = set()
    for row in ROWS:
        ours, theirs, _ = definition.ids(row)
        sizes |= {(min(len(own), 2), min(len(other), 2)) for own, other in definition.groups(ours, theirs)}
    assert sizes == {(1, 1), (1, 2), (2, 1), (2, 2)}


@pytest.mark.parametrize("more", [rarely(("run.launch=ray", "run.ranks=2")), ("backend.use=deepspeed", "backend.zero_stage=3")])
def test_other_ranks_and_backends_have_the_same_loss_and_gradient(models: Path, more: tuple[str, ...]) -> None:
    """Two ranks, each with the texts of its own samples, and a backend that gathers both heads; float32 sums in another order: 1e-5."""
    keys = ["--steps", "2", "--learning-rate", "1e-3"]
    steps, others = distill(models, "gold", *keys, output="one"), distill(models, "gold", *keys, *more, output="other")
    for name in ("loss", "grad_norm", "teacher/aligned_share"):
        assert [step[name] for step in others] == pytest.approx([step[name] for step in steps], rel=1e-5)


@pytest.mark.parametrize("kind", ["uld", "gold"])
def test_a_student_that_is_its_teacher_has_no_distance_and_others_come_nearer(models: Path, kind: str) -> None:
    (same,) = distill(models, kind, "--steps", "1", teacher="student", output="same")
    assert same["teacher/aligned_share"] > 0.95, "all but what the tokenizer cannot write"
    # rounding, since the teacher's rows are laid out anew; the gradient of an absolute difference does not grow small with it
    assert (same["loss"], 0.0 if kind == "uld" else same["grad_norm"]) == pytest.approx((0.0, 0.0), abs=2e-5)
    steps = distill(models, kind, "--steps", "30", "--learning-rate", "1e-2", output="far")
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]


def test_the_student_may_sample_the_answers(models: Path) -> None:
    """With the mixture of rows and samples, in tokens that the tokenizer itself would not choose."""
    steps = distill(models, "gold", "--steps", "4", "--sample-share", "1", "--max-tokens", "6", "--learning-rate", "1e-3")
    assert all(np.isfinite(step["loss"]) for step in steps)
    assert all(step["teacher/aligned_share"] > 0 for step in steps)


def test_a_teacher_with_another_tokenizer_judges_rollouts(models: Path) -> None:
    """The command of the guide, in trainer rl: the collator is chosen among those of whole samples."""
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "one two"}) + "\n")
    command = ["distill", "--model", str(models / "student"), "--teacher", str(models / "teacher"), "--prompts", "prompts.jsonl"]
    command += ["--loss", "gold", "--groups", "1", "--group-size", "2", "--max-tokens", "4", "--steps", "2", "--output", "rollouts"]
    keys = ["rl.max_prompt_tokens=32", "run.device=cpu"]
    assert app.main([*command, "--advantage", "grpo", *keys]) == 0
    steps = [each["metrics"] for each in read_metrics(Path("rollouts/metrics.jsonl")) if each["kind"] == "step"]
    assert all(step["teacher/aligned_share"] > 0 for step in steps)
    assert app.main([*command, "--advantage", "grpo", "--collator", "tree", "--dry-run", *keys]) == 2


@pytest.fixture(scope="module")
def tokenizers(models: Path) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    student, teacher = (AutoTokenizer.from_pretrained(models / name) for name in ("student", "teacher"))
    return student, teacher


@given(data=st.data())
def test_groups_are_the_same_text_in_order_whatever_was_sampled(tokenizers: tuple[Any, Any], data: st.DataObject) -> None:
    """Any tokens, in any order: groups follow each other, and each is one text for both."""
    student, teacher = tokenizers
    plain = st.integers(0, len(student) - 1).filter(lambda number: number not in student.all_special_ids)
    ids = data.draw(st.lists(plain | st.just(student.eos_token_id), min_size=1, max_size=12))
    others, groups = translate(ids, TextTokenizer.of(student), TextTokenizer.of(teacher))
    for group, after in pairwise(groups):
        assert group.student[1] <= after.student[0]
        assert group.teacher[1] <= after.teacher[0]
    for group in groups:
        assert group.student[0] < group.student[1]
        assert group.teacher[0] < group.teacher[1]
        assert student.decode(ids[slice(*group.student)]) == teacher.decode(others[slice(*group.teacher)])
    if student.eos_token_id in ids:
        assert teacher.eos_token_id in others


def test_what_cannot_work_is_refused_while_planning(models: Path) -> None:
    def require_refusal(words: str, **tables: Any) -> None:
        options = {
            "model": {"path": str(models / "student")},
            "data": {"train": "rows.jsonl", "cache": "cache"},
            "training": {"steps": 1, "batch_size": 4},
            "teacher": {"path": str(models / "teacher")},
            **tables,
        }
        with pytest.raises(UnsupportedError, match=words):
            prepare(resolve(from_dict(options, "test")))

    require_refusal("has another tokenizer than the trained model", loss={"use": "divergence"})
    both = {"use": "uld", "terms": [{"use": "divergence", "coef": 0.5}]}
    require_refusal(
        "aligns the teacher's own tokens with the student's, and another part of the run reads divergence:forward", loss=both
    )
    column = {"use": "gold", "terms": [{"use": "teacher_kl", "coef": 0.5}]}
    require_refusal("aligns .* and another part of the run reads teacher_logprobs, of equal tokens", loss=column)
