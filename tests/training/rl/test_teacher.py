"""`[teacher]`: a frozen model that scores what the student samples, and what is learned from its scores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rl_runs import Rl, Seen, write_world
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from skyrl_engine.config import load, resolve
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.rollout.checking import check_journal
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.rl.prepare import prepare
from skyrl_engine.training.rl.run import run_rl

PRESET = "on_policy_distill"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the tokenizer of the trained one."""
    return write_world(tmp_path_factory.mktemp("teacher"), intermediate_size=48) / "model"


def test_the_teacher_scores_the_students_own_tokens(rl: Rl, seen: Seen, teacher: Path) -> None:
    """Advantages are the differences of the two models' log-probabilities, the teacher's as transformers computes them; metric and all."""
    (metrics,) = (
        record["metrics"]
        for record in read_metrics(
            run_rl(rl("run", "rl.steps=1", f"teacher.path={teacher}", preset=PRESET)).directory / "metrics.jsonl"
        )
        if record["kind"] == "step"
    )
    columns = seen.plans[1].columns
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    expected = []
    for start, end, first, last in zip(
        columns.token_offsets[:-1], columns.token_offsets[1:], columns.action_offsets[:-1], columns.action_offsets[1:], strict=True
    ):
        ids = torch.from_numpy(columns.input_ids[start:end].astype("int64"))
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        actions = int(last - first)
        expected += [float(logprobs[place - 1, ids[place]]) for place in range(len(ids) - actions, len(ids))]
    arrays = columns.columns
    scored = columns.loss_weight != 0
    np.testing.assert_allclose(arrays["teacher_logprobs"][scored], np.asarray(expected)[scored], atol=1e-4)
    differences = arrays["teacher_logprobs"][scored].astype(np.float64) - arrays["old_logprobs"][scored].astype(np.float64)
    np.testing.assert_allclose(arrays["advantages"][scored], differences, rtol=1e-6)
    assert metrics["teacher/divergence"] == pytest.approx(-differences.mean(), rel=1e-6)
    assert metrics["policy/ratio_max"] == 1.0


def test_a_student_that_is_its_teacher_has_nothing_to_learn(rl: Rl, seen: Seen, world: Path) -> None:
    run_rl(rl("run", "rl.steps=1", f"teacher.path={world / 'model'}", preset=PRESET))
    assert not seen.plans[1].columns.columns["advantages"].any()


def test_whole_distributions_are_compared_at_the_students_own_tokens(rl: Rl, seen: Seen, world: Path, teacher: Path) -> None:
    """The loss `divergence` on sampled rows, at the run's temperature, is KL by definition on transformers' logits; nothing else is read."""
    keys = ("rl.steps=1", f"teacher.path={teacher}", "loss.use=divergence", "loss.divergence=reverse", "rl.temperature=0.8")
    directory = run_rl(rl("run", *keys, preset=PRESET)).directory
    (metrics,) = (record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step")
    columns = seen.plans[1].columns
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in (world / "model", teacher)]
    total, count = 0.0, 0
    for sample in range(len(columns)):
        ids = torch.from_numpy(columns.input_ids[slice(*columns.token_offsets[sample : sample + 2])].astype("int64"))
        carries = torch.from_numpy(columns.loss_weight[slice(*columns.action_offsets[sample : sample + 2])] != 0)
        with torch.no_grad():
            q, p = (model(ids[None]).logits[0, -len(carries) - 1 : -1].div(0.8).log_softmax(-1) for model in models)
        total += float((q.exp() * (q - p)).sum(-1)[carries].sum())
        count += int(carries.sum())
    assert metrics["divergence"] == pytest.approx(total / count, rel=1e-4)
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-4)
    assert 0 <= metrics["top_1_agreement"] <= 1


@pytest.mark.nightly
def test_a_resumed_run_has_the_same_bits(rl: Rl, teacher: Path) -> None:
    keys = (f"teacher.path={teacher}", "loss.use=teacher_kl")
    whole = run_rl(rl("whole", *keys, preset=PRESET)).directory
    run_rl(rl("cut", "rl.steps=1", *keys, preset=PRESET))
    cut = run_rl(rl("cut", *keys, preset=PRESET), resume=True).directory
    saved = [load_file(each / "model" / "model.safetensors") for each in (whole, cut)]
    assert {name: each.tobytes() for name, each in saved[0].items()} == {name: each.tobytes() for name, each in saved[1].items()}


@pytest.mark.nightly
def test_an_environment_may_give_the_teachers_log_probabilities_itself(
    rl: Rl, seen: Seen, tables_of: Callable[..., dict[str, Any]]
) -> None:
    """Then the ranks hold no teacher. The numbers reach the advantages token by token, and come back from the journal."""
    directory = run_rl(rl("run", "rl.steps=1", preset=PRESET, environment={"teaches": True})).directory
    live = seen.plans[1].columns
    columns, scored = live.columns, live.loss_weight != 0
    tokens = np.concatenate(
        [live.input_ids[end - actions : end] for end, actions in zip(live.token_offsets[1:], live.lengths.actions, strict=True)]
    )
    assert columns["teacher_logprobs"][scored].tolist() == (-(1 + tokens[scored] % 5) / 4).tolist()
    assert not columns["teacher_logprobs"][~scored].any()
    differences = columns["teacher_logprobs"][scored].astype(np.float64) - columns["old_logprobs"][scored].astype(np.float64)
    np.testing.assert_allclose(columns["advantages"][scored], differences, rtol=1e-6)
    assert check_journal(directory / "rollouts").wrong == ()
    tables = tables_of("again", preset=PRESET)
    del tables["environments"]
    tables["rl"] |= {"rollouts": str(directory), "steps": 1}
    run_rl(resolve(load(tables, ())))
    again = seen.plans[1].columns
    assert again.input_ids.tolist() == live.input_ids.tolist()
    assert again.columns["teacher_logprobs"].tolist() == columns["teacher_logprobs"].tolist()


def test_what_cannot_work_is_refused_while_planning(rl: Rl, teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="there is no teacher"):
        prepare(rl("run", preset=PRESET))
    with pytest.raises(UnsupportedError, match="nothing would be learned from it"):
        prepare(rl("run", f"teacher.path={teacher}"))
    with pytest.raises(ModelError, match="the teacher cannot be used"):
        prepare(rl("run", f"teacher.path={tmp_path / 'nowhere'}", preset=PRESET))
    tokenizer = write_tokenizer(tmp_path / "other", ["other words than those"])
    write_model(tmp_path / "other", tokenizer=tokenizer)
    with pytest.raises(UnsupportedError, match=r"the teacher .* has another tokenizer than the trained model: the token"):
        prepare(rl("run", f"teacher.path={tmp_path / 'other'}", preset=PRESET))
