"""Rotary frequencies are fixed while a run is planned, by its longest sample or by model.rotary_length; states remember for what length."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_engine import Engine, UnsupportedError
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.errors import CheckpointError
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.proof.rollouts import LONGEST, make_rollouts
from skyrl_engine.training.sft.trainer import plan_sft, run_sft

THRESHOLD = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 32.0}
    write_model(directory, "llama", rope_parameters=rope, max_position_embeddings=THRESHOLD)
    write_tokenizer(directory, ["some words to learn from"])
    return directory


@pytest.fixture
def open_engine(model: Path) -> Iterator[Any]:
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine.open({"model": {"path": str(model), **options}, "collator": {"use": "padded"}}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def columns() -> SampleColumns:
    return make_rollouts(())


def test_loss_and_gradient_do_not_depend_on_micro_batches(open_engine: Any, columns: SampleColumns) -> None:
    """float32 sums in another order leave 1e-5; frequencies of each micro-batch's longest row were off by a third."""
    engine = open_engine(rotary_length=LONGEST)
    found = []
    for rows in (1, 4, 16):
        loss = engine.forward_backward(engine.plan(columns, micro_batch_rows=rows)).result().metrics["loss"].result
        found.append((loss, engine.gradients()))
        engine.optim_step(learning_rate=0.0).result()
    expected, gradients = found[0]
    for loss, others in found[1:]:
        assert loss == pytest.approx(expected, rel=1e-5)
        for name, gradient in gradients.items():
            assert np.linalg.norm(others[name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name


def test_a_batch_beyond_the_length_is_refused_before_a_rank_meets_it(open_engine: Any, columns: SampleColumns) -> None:
    engine = open_engine()
    with pytest.raises(UnsupportedError, match=r"a row has 40 tokens.*fixed them for rows of at most 16") as caught:
        engine.plan(columns)
    assert "model.rotary_length = 40" in caught.value.remedy
    engine.plan(columns.take(np.flatnonzero(np.diff(columns.token_offsets) <= THRESHOLD)))


def test_a_state_goes_on_with_the_same_frequencies_only(open_engine: Any, tmp_path: Path) -> None:
    open_engine(rotary_length=30).save(tmp_path)
    assert json.loads((tmp_path / "engine.json").read_text())["rotary_length"] == 30
    open_engine(rotary_length=30).load(tmp_path)
    with pytest.raises(CheckpointError, match=r"rows of 30 tokens, and this run would go on with those for 16 tokens") as caught:
        open_engine().load(tmp_path)
    assert "model.rotary_length = 30" in caught.value.remedy


@pytest.mark.parametrize(("words", "expected"), [(2, THRESHOLD), (30, None)])
def test_a_plan_fixes_them_for_the_longest_sample(model: Path, tmp_path: Path, words: int, expected: int | None) -> None:
    text = "some words to learn from " * words
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "some"}) + "\n")
    data = {"train": str(tmp_path / "data.jsonl"), "format": "text", "max_length": 400}
    tables: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": data,
        "training": {"steps": 1, "batch_size": 2, "micro_batch_rows": 1},
    }
    plan = plan_sft(resolve(from_dict(tables, "test")))
    longest = max(shape.width for shape in plan.micro_batches)
    assert plan.rotary_length == (expected or longest)
    if expected is None:
        tables["model"]["rotary_length"] = THRESHOLD + 1
        with pytest.raises(UnsupportedError, match=f"a row has {longest} tokens"):
            plan_sft(resolve(from_dict(tables, "test")))


def test_a_run_trains_and_goes_on_with_the_frequencies_of_its_plan(model: Path, tmp_path: Path) -> None:
    """Evaluation and training hold rows beyond the threshold, which ranks that did not know of them would refuse."""
    rows = [{"text": "some words to learn from " * count} for count in (1, 9, 2, 3)]
    for split in ("train", "eval"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl"), "format": "text", "max_length": 400},
        "training": {"steps": 1, "batch_size": 4, "micro_batch_rows": 1},
        "evaluation": {"every": 1},
        "run": {"directory": str(tmp_path / "run"), "device": "cpu"},
    }
    first = run_sft(resolve(from_dict(tables, "test")))
    assert "chooses its rotary frequencies by length" in (first.directory / "run.log").read_text()
    tables["training"]["steps"] = 2
    run_sft(resolve(from_dict(tables, "test")), resume=True)
    records = [json.loads(line) for line in (first.directory / "metrics.jsonl").read_text().splitlines()]
    assert len([record for record in records if record["kind"] == "step"]) == 2
