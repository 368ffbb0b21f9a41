"""Reducers chosen and configured on the command line: what is trained with, and what is refused before a rank starts."""

import json
from pathlib import Path

import pytest

from skyrl_engine.cli.demo.recipe import Exchange, write_exchanges
from skyrl_engine.cli.demo.tiny import make_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model directory, a dataset of 6 exchanges of different lengths, and rollouts with and without group ids."""
    folder = tmp_path_factory.mktemp("inputs")
    exchanges = [Exchange(f"Say {number}", "x" * number) for number in range(1, 7)]
    make_model(folder / "model", exchanges)
    write_exchanges(folder / "data.jsonl", exchanges)
    rollouts = [{"prompt_ids": [3, 4], "response_ids": [5] * (1 + number)} for number in range(6)]
    write_lines(folder / "rollouts.jsonl", rollouts)
    write_lines(folder / "grouped.jsonl", [{**rollout, "group_ids": number // 2} for number, rollout in enumerate(rollouts)])
    return folder


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def sft(command, inputs):
    """Train one step on all 6 samples of `data`, in micro-batches of 2, with further arguments."""

    def run(data: str, *arguments: str):
        line = (
            "--model",
            inputs / "model",
            "--data",
            inputs / data,
            "--steps",
            "1",
            "--batch-size",
            "6",
            "--micro-batch-rows",
            "2",
        )
        return command("sft", "--quiet", *line, "data.cache=./cache", "evaluation.at_end=false", *arguments)

    return run


def first_step(directory: str) -> dict[str, float]:
    records = map(json.loads, Path(directory, "metrics.jsonl").read_text().splitlines())
    return next(record["metrics"] for record in records if record["kind"] == "step")


def test_one_step_under_every_reducer_has_the_loss_of_its_weights(sft):
    """From one sum S of losses with equal weights: token_mean is S / M, the normalised sum S / (n L), whatever the micro-batches."""
    options = {
        "sum": (),
        "token_mean": (),
        "sequence_mean_token_sum_norm": ("reducer.max_sequence_length=50", "reducer.empty_sequence=skip"),
    }
    loss = {}
    for name, settings in options.items():
        outcome = sft("data.jsonl", "--reducer", name, *settings, "--output", name)
        assert outcome.code == 0, outcome.err
        loss[name] = first_step(name)["loss"]
    tokens = first_step("sum")["loss_tokens"]
    assert loss["token_mean"] == pytest.approx(loss["sum"] / tokens, rel=1e-5)
    assert loss["sequence_mean_token_sum_norm"] == pytest.approx(loss["sum"] / (6 * 50), rel=1e-5)


def test_the_run_s_maximum_length_will_do(sft):
    """`data.max_length` is the maximum where the reducer has none; the model's context length is not."""
    assert sft("data.jsonl", "--reducer", "sequence_mean_token_sum_norm", "--max-length", "100", "--output", "run").code == 0
    assert sft("data.jsonl", "--reducer", "sum", "--max-length", "100", "--output", "sum").code == 0
    assert first_step("run")["loss"] == pytest.approx(first_step("sum")["loss"] / (6 * 100), rel=1e-5)


def test_no_maximum_length_is_refused_while_planning(sft):
    outcome = sft("data.jsonl", "--reducer", "sequence_mean_token_sum_norm", "--dry-run")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "Set reducer.max_sequence_length (or data.max_length)" in outcome.last_line


def test_groups_by_either_name(sft):
    for name in ("group_mean", "prompt_mean"):
        outcome = sft("grouped.jsonl", "--reducer", name, "--output", name)
        assert outcome.code == 0, outcome.err
    assert first_step("group_mean")["loss"] == first_step("prompt_mean")["loss"]
    assert sft("grouped.jsonl", "--reducer", "sequence_mean", "--output", "sequences").code == 0
    assert first_step("group_mean")["loss"] != pytest.approx(first_step("sequences")["loss"], rel=1e-6)


def test_data_without_group_ids_is_refused_while_planning(sft):
    outcome = sft("rollouts.jsonl", "--reducer", "prompt_mean", "--dry-run")
    assert outcome.code == 4
    assert outcome.err.count("\n") == 1
    assert "the data has no group ids" in outcome.last_line


def test_an_option_of_the_wrong_kind_is_named(sft):
    outcome = sft("data.jsonl", "--reducer", "sequence_mean_token_sum_norm", "reducer.max_sequence_length=0")
    assert outcome.code == 2
    assert "reducer.max_sequence_length" in outcome.last_line
