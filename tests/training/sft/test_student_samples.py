"""`[sampling]`: some steps of trainer sft train on the student's own answers, as GKD does, checked from outside."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from by_day import rarely
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from skyrl_engine.cli import app
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts import Divergence
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.errors import ConfigError, EngineError, RolloutError, UnsupportedError
from skyrl_engine.proof.plain_model import divergence
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.prepare import prepare
from skyrl_engine.training.sft.student_samples import (
    SampledAnswers,
    StudentSampler,
    is_sampled,
    measure_prompts,
    replace_answers,
)
from skyrl_engine.training.sft.trainer import plan_sft

ROWS = [
    {
        "prompt_ids": [3, 4 + number % 3, 5][: 2 + number % 2],
        "response_ids": [5 + (number + place) % 5 for place in range(2 + number % 4)],
    }
    for number in range(12)
]
STILL: Final = ("--learning-rate", "1e-30")
"""A learning rate that moves no weight, so that every step begins from the same ones."""


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows("rows.jsonl", ROWS)


def write_rows(file: str, rows: list[dict[str, Any]]) -> None:
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(models: Path, *more: str, data: str = "rows.jsonl", output: str = "run") -> list[str]:
    return [
        *("distill", "--model", str(models / "student"), "--teacher", str(models / "teacher"), "--data", data),
        *("--batch-size", "4", "--output", output, "--quiet", "run.device=cpu", "data.cache=./cache", *more),
    ]


def read_steps(output: str) -> list[dict[str, float]]:
    return [record["metrics"] for record in read_metrics(Path(output) / "metrics.jsonl") if record["kind"] == "step"]


def distill(models: Path, *more: str, data: str = "rows.jsonl", output: str = "run") -> list[dict[str, float]]:
    """The metrics of every step."""
    assert app.main(arguments(models, *more, data=data, output=output)) == 0
    return read_steps(output)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> dict[int, SampledAnswers]:
    """The student's answers by step."""
    kept: dict[int, SampledAnswers] = {}
    original = StudentSampler.answer

    def answer(self: StudentSampler, columns: SampleColumns, step: int) -> SampledAnswers:
        kept[step] = original(self, columns, step)
        return kept[step]

    monkeypatch.setattr(StudentSampler, "answer", answer)
    return kept


def as_rows(columns: SampleColumns) -> list[dict[str, Any]]:
    rows = []
    for sample in range(len(columns)):
        ids = columns.input_ids[columns.token_offsets[sample] : columns.token_offsets[sample + 1]].tolist()
        actions = int(columns.action_offsets[sample + 1] - columns.action_offsets[sample])
        rows.append({"prompt_ids": ids[: len(ids) - actions], "response_ids": ids[len(ids) - actions :]})
    return rows


def test_a_draw_has_the_share_as_its_probability_and_0_and_1_are_certain() -> None:
    """2,000 draws of probability 0.3 lie within 4 standard deviations, 0.041; another seed draws other steps."""
    drawn = np.array([is_sampled(0, step, 0.3) for step in range(1, 2001)])
    assert abs(drawn.mean() - 0.3) < 4 * (0.3 * 0.7 / 2000) ** 0.5
    assert not any(is_sampled(seed, step, 0.0) for seed in range(3) for step in range(1, 200))
    assert all(is_sampled(seed, step, 1.0) for seed in range(3) for step in range(1, 200))
    assert [is_sampled(1, step, 0.3) for step in range(1, 2001)] != drawn.tolist()
    assert all(is_sampled(0, step, 0.6) for step in range(1, 2001) if drawn[step - 1]), (
        "a larger share keeps the steps of a smaller one"
    )


@given(
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.sampled_from([0, 1]), max_size=6), st.integers(0, 3)), min_size=1, max_size=5)
)
def test_answers_stand_after_what_is_in_front_of_the_last_stretch_with_loss(samples: list[tuple[int, list[int], int]]) -> None:
    """By a loop over lists, of samples with a prompt, loss weights, and the length of another answer."""
    tokens, weights, answers = [], [], []
    for number, (prompt, mask, answer) in enumerate(samples):
        tokens.append([10 * number + place for place in range(prompt + len(mask))])
        weights.append(mask)
        answers.append([900 + number] * answer)
    columns = SampleColumns.from_lists(
        input_ids=tokens, loss_mask=weights, sample_ids=[7 + number for number in range(len(samples))]
    )
    prompts = measure_prompts(columns)
    logprobs = [np.full(len(answer), -0.5, dtype=np.float32) for answer in answers]
    replaced = replace_answers(columns, prompts, [np.array(answer, dtype=np.int32) for answer in answers], logprobs)
    assert replaced.sample_ids.tolist() == columns.sample_ids.tolist()
    for sample, (prompt, mask, _) in enumerate(samples):
        if 1 in mask:
            last = len(mask) - 1 - mask[::-1].index(1)
            while last > 0 and mask[last - 1]:
                last -= 1
            expected = tokens[sample][: prompt + last] + answers[sample]
            weight = [1] * len(answers[sample])
            assert prompts[sample] == prompt + last
        else:
            expected, weight = tokens[sample], [0] * len(mask)
            assert prompts[sample] == -1
        begin, end = replaced.token_offsets[sample : sample + 2]
        assert replaced.input_ids[begin:end].tolist() == expected
        begin, end = replaced.action_offsets[sample : sample + 2]
        assert replaced.loss_weight[begin:end].tolist() == weight
        assert replaced.columns["rollout_logprobs"][begin:end].tolist() == [-0.5 * each for each in weight]


@pytest.mark.parametrize(
    "more", [("training.micro_batch_rows=3",), rarely(("collator.use=packed", "training.micro_batch_tokens=40"))]
)
def test_each_step_equals_the_step_of_its_side_alone(
    models: Path, sampled: dict[int, SampledAnswers], more: tuple[str, ...]
) -> None:
    """Loss and norm of the gradient have the bits of a run on rows alone, and of a run on rows that hold the sampled answers. By definition,
    in float64 on transformers' own models, the loss of a sampled step is the mean divergence at its answers' tokens: float32 sums, 1e-5.
    """
    steps = distill(models, *STILL, "--steps", "6", "--sample-share", "0.5", "--max-tokens", "5", *more)
    drawn = [is_sampled(0, step, 0.5) for step in range(1, 7)]
    assert 0 < sum(drawn) < 6, "both sides are there"
    assert list(sampled) == [step for step, is_drawn in enumerate(drawn, 1) if is_drawn]
    assert [step["sampling/step"] for step in steps] == drawn
    assert [step["sampling/steps"] for step in steps] == np.cumsum(drawn).tolist()
    alone = distill(models, *STILL, "--steps", "6", *more, output="alone")
    for number, (step, of_rows) in enumerate(zip(steps, alone, strict=True), 1):
        assert step["epoch"] == of_rows["epoch"], "a sampled step takes the prompts of its rows, which the epoch then passed"
        if not drawn[number - 1]:
            assert (step["loss"], step["grad_norm"]) == (of_rows["loss"], of_rows["grad_norm"])
            continue
        answers = as_rows(sampled[number].columns)
        write_rows("answers.jsonl", answers)
        (of_answers,) = distill(
            models, *STILL, "--steps", "1", "training.shuffle=false", *more, data="answers.jsonl", output=f"answers-{number}"
        )
        assert (step["loss"], step["grad_norm"]) == (of_answers["loss"], of_answers["grad_norm"])
        assert step["loss"] == pytest.approx(mean_divergence(models, answers), rel=1e-5)
        assert step["sampling/mean_tokens"] == np.mean([len(row["response_ids"]) for row in answers])
        assert step["policy/gap_mean"] < 1e-5, "the sampler holds the weights that are trained"


def mean_divergence(models: Path, rows: list[dict[str, Any]]) -> float:
    student, teacher = (torch.cat([whole_logits(models / name, row) for row in rows]) for name in ("student", "teacher"))
    return float(divergence(Divergence("forward"), student, teacher).mean())


def whole_logits(path: Path, row: dict[str, Any]) -> torch.Tensor:
    """[n, v] about the response's tokens, in float64, of transformers' own model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    ids = row["prompt_ids"] + row["response_ids"]
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, len(row["prompt_ids"]) - 1 : -1]


def test_a_teachers_column_is_scored_over_the_sampled_answers(models: Path, sampled: dict[int, SampledAnswers]) -> None:
    """`teacher_kl` with k1 is the mean of log p - log q of the sampled tokens: by definition in float64."""
    (step,) = distill(
        models, *STILL, "--steps", "1", "--sample-share", "1", "--max-tokens", "4", "--loss", "teacher_kl", "loss.estimator=k1"
    )
    differences = []
    for row in as_rows(sampled[1].columns):
        student, teacher = (whole_logits(models / name, row).log_softmax(-1) for name in ("student", "teacher"))
        differences += [float(student[place, token] - teacher[place, token]) for place, token in enumerate(row["response_ids"])]
    assert step["loss"] == pytest.approx(np.mean(differences), rel=1e-5)


def test_answers_follow_the_weights_and_bring_the_student_to_its_teacher(models: Path, sampled: dict[int, SampledAnswers]) -> None:
    """Later answers are sampled from later weights, which the gap to the model shows; the divergence on the student's own texts falls,
    though they reach texts that it has not learned.
    """
    steps = distill(
        models, "--steps", "60", "--sample-share", "0.75", "--max-tokens", "6", "--learning-rate", "5e-3", "--batch-size", "12"
    )
    of_samples = [step for step in steps if step["sampling/step"]]
    assert max(step["policy/gap_mean"] for step in of_samples) < 1e-4
    assert np.mean([step["divergence"] for step in of_samples[-10:]]) < 0.75 * np.mean(
        [step["divergence"] for step in of_samples[:5]]
    )
    assert len({answers.columns.input_ids.tobytes() for answers in sampled.values()}) == len(sampled)


KILLED: Final = """
import os
import signal
import sys

from skyrl_engine.cli.app import main
from skyrl_engine.training.sft.student_samples import StudentSampler

original = StudentSampler.answer


def answer(self, columns, step):
    answers = original(self, columns, step)
    if step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    return answers


StudentSampler.answer = answer
raise SystemExit(main(sys.argv[2:]))
"""
"""Runs the command `argv[2:]`, and kills its own process once the answers of step `argv[1]` are sampled."""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_run_that_was_killed_while_sampling_ends_with_the_bytes_of_one_that_was_not(models: Path) -> None:
    """Killed in a sampled step between two checkpoints, after a row step and a sampled one; steps before it are made again from the seed."""
    drawn = [step for step in range(1, 13) if is_sampled(0, step, 0.5)]
    killed = next(step for step in drawn if step > 4 and step % 3 != 1)
    keys = ["--steps", "12", "--sample-share", "0.5", "--max-tokens", "5", "--learning-rate", "1e-2", "checkpoint.every=3"]
    whole = distill(models, *keys, output="whole")
    command = [sys.executable, "-c", KILLED, str(killed), *arguments(models, *keys, output="cut")]
    assert (
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False).returncode
        == -signal.SIGKILL
    )
    assert not (Path("cut") / "model").exists()
    cut = distill(models, *keys, "checkpoint.resume=true", output="cut")
    own = ("loss", "grad_norm", "sampling/step", "sampling/steps", "epoch")
    assert [[step[name] for name in own] for step in cut] == [[step[name] for name in own] for step in whole]
    first, second = (load_file(Path(each) / "model/model.safetensors") for each in ("whole", "cut"))
    assert {name: each.tobytes() for name, each in first.items()} == {name: each.tobytes() for name, each in second.items()}


def test_a_sampler_with_other_weights_stops_the_run(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers whose log-probabilities are not the model's, two steps in a row."""
    original = StudentSampler.answer

    def answer(self: StudentSampler, columns: SampleColumns, step: int) -> SampledAnswers:
        answers = original(self, columns, step)
        shifted = {name: values - 1 for name, values in answers.columns.columns.items()}
        return SampledAnswers(answers.columns.with_columns(shifted), answers.count, answers.truncated)

    monkeypatch.setattr(StudentSampler, "answer", answer)
    assert app.main(arguments(models, "--steps", "3", "--sample-share", "1", "--max-tokens", "4")) == RolloutError.exit_code
    assert len(read_steps("run")) == 1


def configure(models: Path, loss: str = "divergence", **tables: Any) -> Any:
    options = {
        "model": {"path": str(models / "student")},
        "data": {"train": "rows.jsonl", "cache": "cache"},
        "training": {"steps": 4, "batch_size": 4},
        "teacher": {"path": str(models / "teacher")},
        "loss": {"use": loss},
        "sampling": {"share": 0.5, "max_tokens": 4},
        **tables,
    }
    return resolve(from_dict(options, "test"))


def test_a_generator_belongs_to_a_run_that_samples_alone(models: Path) -> None:
    assert "generator" in configure(models).plugins
    none = configure(models, sampling={})
    assert "generator" not in none.plugins
    assert resolve(from_dict(configure(models).as_dict(), "again")).as_dict() == configure(models).as_dict()
    assert resolve(from_dict(none.as_dict(), "again")).as_dict() == none.as_dict()
    with pytest.raises(ConfigError, match=r"\[generator\] selects a generator.*uses none(?s:.)*or set sampling.share"):
        configure(models, sampling={}, generator={"use": "hf"})
    with pytest.raises(ConfigError, match=r"sampling.max_tokens(?s:.)*sampling.share is 0, so that nothing is sampled"):
        configure(models, sampling={"max_tokens": 5})
    plan = plan_sft(configure(models))
    drawn = sum(is_sampled(0, step, 0.5) for step in range(1, 5))
    assert plan.sampled == f"{drawn} of 4 train on the student's own answers, of up to 4 tokens"


def test_what_cannot_work_is_refused_while_planning(models: Path) -> None:
    def require_refusal(error: type[EngineError], words: str, **tables: Any) -> None:
        with pytest.raises(error, match=words):
            prepare(configure(models, **tables))

    require_refusal(UnsupportedError, "cross_entropy.* does not compare with a teacher: it would teach the student its own answers",
                    loss="cross_entropy")  # fmt: skip
    require_refusal(UnsupportedError, "reads the column 'teacher_logprobs' of the rows", loss="top_k_divergence")
    positions = json.loads((models / "student/config.json").read_text())["max_position_embeddings"]
    require_refusal(
        ConfigError, "after the longest prompt of 3 tokens a sample has room for", sampling={"share": 0.5, "max_tokens": positions}
    )
    require_refusal(
        EngineError,
        "takes 23 tokens where a packed row holds 12",
        training={"steps": 1, "batch_size": 4, "micro_batch_tokens": 12},
        collator={"use": "packed"},
        sampling={"share": 0.1, "max_tokens": 20},
    )
    require_refusal(
        UnsupportedError, "holds keys and values of 5 tokens, and prompts and sampling.max_tokens make samples of up to 7",
        generator={"use": "hf", "cache_tokens": 5},
    )  # fmt: skip
