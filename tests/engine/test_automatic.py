"""The engine chooses collator, token budget and precision where a configuration says "auto", says why, and takes the best that is possible."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_engine import Engine
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.config.automatic import list_automatic_keys
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.engine import assembly, automatic
from skyrl_engine.engine.automatic import Choices, find_largest_unit
from skyrl_engine.engine.capability import check_loading
from skyrl_engine.errors import ConfigError, DataError
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.training.preference.prepare import prepare as prepare_preferences
from skyrl_engine.training.sft.dry_run import RunPlan
from skyrl_engine.training.sft.prepare import prepare
from skyrl_engine.training.sft.trainer import plan_sft

WORDS = [f"word{number}" for number in range(60)]
STEM = " ".join(WORDS[:20])
ALIKE = [{"prompt": STEM, "completion": f" {' '.join(WORDS[number : number + 3])}"} for number in range(20, 40)]
UNLIKE = [{"prompt": WORDS[number], "completion": f" {' '.join(WORDS[: 1 + number % 9])}"} for number in range(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = write_tokenizer(directory, [" ".join(WORDS)])
    write_model(directory, "llama", tokenizer=tokenizer, max_position_embeddings=256)
    return directory


@pytest.fixture
def tables(model: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Write rows and return the configuration of a run over them, with some tables changed."""

    def make(rows: Sequence[dict[str, Any]], **changes: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        whole: dict[str, Any] = {
            "model": {"path": str(model)},
            "data": {"train": str(tmp_path / "rows.jsonl")},
            "training": {"steps": 1, "batch_size": 8},
            "run": {"device": "cpu"},
        }
        for name, table in changes.items():
            whole[name] = {**whole.get(name, {}), **table}
        return whole

    return make


def plan(table: dict[str, Any]) -> RunPlan:
    return plan_sft(resolve(from_dict(table, "test")))


def reason(planned: RunPlan, key: str) -> str:
    (sentence,) = (sentence for sentence in planned.chosen if sentence.startswith(f"{key} = "))
    return sentence


def test_samples_that_begin_alike_are_a_tree(tables: Any) -> None:
    planned = plan(tables(ALIKE))
    assert planned.plugins["collator"].startswith("skyrl-engine-collators:tree")
    assert reason(planned, "collator.use").startswith("collator.use = tree: common prefixes are computed once")
    assert planned.shape.computed_share < 0.5
    assert planned.shape.padding_share < 0.05


def test_others_are_packed(tables: Any) -> None:
    planned = plan(tables(UNLIKE))
    assert planned.plugins["collator"].startswith("skyrl-engine-collators:packed")
    assert (
        "not tree, because samples of the first mini-batch share 0.0% of their tokens in beginnings of at least 16 tokens"
        in reason(planned, "collator.use")
    )
    assert planned.shape.padding_share < 0.05


@pytest.mark.parametrize(("rows", "collator"), [(ALIKE, "tree"), (UNLIKE, "packed")])
def test_the_model_is_rehearsed_once(tables: Any, monkeypatch: pytest.MonkeyPatch, rows: Any, collator: str) -> None:
    """A rehearsal builds the model without values and runs its first layer; what takes trees takes documents."""
    asked: list[str] = []

    def rehearse(*arguments: Any) -> None:
        asked.append(arguments[-1])
        check_loading(*arguments)

    monkeypatch.setattr(automatic, "check_loading", rehearse)
    monkeypatch.setattr(assembly, "check_loading", rehearse)
    assert plan(tables(rows)).plugins["collator"].startswith(f"skyrl-engine-collators:{collator}")
    assert asked == ["tree"]


def test_a_model_that_mixes_tokens_is_padded_and_the_plan_says_why(tables: Any, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "stateful", [" ".join(WORDS)])
    write_model(tmp_path / "stateful", "jamba", tokenizer=tokenizer, mamba_d_state=4)
    planned = plan(tables(ALIKE, model={"path": str(tmp_path / "stateful")}))
    assert planned.plugins["collator"].startswith("skyrl-engine-collators:padded")
    told = reason(planned, "collator.use")
    assert "not tree, because" in told
    assert "not packed, because" in told
    assert "layers" in told


def test_rows_that_are_counted_are_padded(tables: Any) -> None:
    planned = plan(tables(ALIKE, training={"micro_batch_rows": 2}))
    assert planned.plugins["collator"].startswith("skyrl-engine-collators:padded")
    assert "training.micro_batch_rows counts rows of one sample" in reason(planned, "collator.use")
    assert {shape.rows for shape in planned.micro_batches} == {2}
    assert not any("micro_batch_tokens" in sentence for sentence in planned.chosen)


def test_images_go_with_rows_that_carry_them(seeing: Path) -> None:
    tables = {"model": {"path": str(seeing / "model")}, "data": {"train": str(seeing / "train.jsonl")}, "run": {"device": "cpu"}}
    planned = plan(tables)
    assert planned.plugins["collator"].startswith("skyrl-engine-collators:packed")
    assert "not tree, because it does not carry vision" in reason(planned, "collator.use") or "share" in reason(
        planned, "collator.use"
    )


def test_a_frozen_model_that_mixes_tokens_decides_too(tables: Any, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "stateful", [" ".join(WORDS)])
    write_model(tmp_path / "stateful", "jamba", tokenizer=tokenizer, mamba_d_state=4)
    rows = [{"prompt": STEM, "chosen": f" {WORDS[n]}", "rejected": f" {WORDS[n + 1]}"} for n in range(20)]
    table = {**tables(rows, reference={"path": str(tmp_path / "stateful")}), "trainer": "preference"}
    assert prepare_preferences(resolve(from_dict(table, "test"))).run.assembly.collator.name == "padded"
    table.pop("reference")
    assert prepare_preferences(resolve(from_dict(table, "test"))).run.assembly.collator.name == "tree"


def test_what_a_file_says_is_what_it_means(tables: Any) -> None:
    former = {"collator": {"use": "padded"}, "training": {"micro_batch_tokens": "none"}, "model": {"dtype": "float64"}}
    planned = plan(tables(ALIKE, **former))
    assert planned.chosen == ()
    (shape,) = planned.micro_batches
    assert (shape.rows, shape.samples) == (8, 8)


def test_options_of_a_collator_that_is_not_chosen_are_refused(tables: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"collator\.pad_token_id: is an option of a collator, and the engine chooses it"
    ) as caught:
        plan(tables(ALIKE, collator={"pad_token_id": 0}))
    assert "Name the collator that has this option in collator.use" in str(caught.value)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_the_device_decides_the_precision(tables: Any, monkeypatch: pytest.MonkeyPatch, device: str, dtype: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    choices = Choices(resolve(from_dict(tables(ALIKE, run={"device": device}), "test")))
    choices.choose_dtype()
    assert choices.resolved.config.model.dtype == dtype
    assert [choice.key for choice in choices.made] == ["model.dtype"]


def test_a_budget_holds_what_stays_together(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "CPU_MICRO_BATCH_TOKENS", 8)
    prepared = prepare(resolve(from_dict(tables(UNLIKE), "test")))
    longest = int(np.diff(prepared.train.columns.token_offsets).max())
    assert prepared.resolved.config.training.micro_batch_tokens == longest > 8
    assert "as many as the longest sample" in str(prepared.choices[-1])


def test_parts_that_depend_on_the_cut_keep_one_micro_batch(tables: Any) -> None:
    prepared = prepare(resolve(from_dict(tables(UNLIKE, reducer={"use": "token_mean_legacy"}), "test")))
    assert prepared.resolved.config.training.micro_batch_tokens is None
    assert "depends on the cut" in str(prepared.choices[-1])


def test_a_prepared_run_leaves_nothing_open(tables: Any) -> None:
    resolved = resolve(from_dict(tables(ALIKE), "test"))
    assert list_automatic_keys(resolved) == ("model.dtype", "collator.use", "training.micro_batch_tokens")
    prepared = prepare(resolved)
    assert list_automatic_keys(prepared.resolved) == ()
    again = resolve(from_dict(prepared.resolved.as_dict(), "test"))
    assert again.as_dict() == prepared.resolved.as_dict(), "what is recorded is read as the same"
    assert prepare(again).choices == ()


def units(*sizes: int, together: int = 1) -> SampleColumns:
    offsets = np.cumsum([0, *sizes])
    return SampleColumns.create(
        input_ids=np.zeros(offsets[-1], dtype=np.int64),
        token_offsets=offsets,
        action_offsets=np.arange(len(sizes) + 1),
        unit_ids=np.arange(len(sizes)) // together,
    )


def test_units_take_their_padding_and_their_alignment() -> None:
    assert find_largest_unit(units(3, 9, 4, 4, together=2), "padded", Topology()) == 2 * 9
    assert find_largest_unit(units(3, 9, 4, 4, together=2), "packed", Topology()) == 3 + 9
    assert find_largest_unit(units(3, 9, 4, 5), "tree", Topology(tp=2, cp=2)) == 16


def test_a_program_may_plan_any_batch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "CPU_MICRO_BATCH_TOKENS", 8)
    with Engine.open({"model": {"path": str(model)}}) as engine:
        assert engine.assembly.collator.name == "packed"
        widths = [batch.width for batch in engine.plan(units(3, 9, 4, 20)).cut.micro_batches]
        assert max(widths) == 20
        assert len(widths) == 2
        with pytest.raises(DataError, match="where a packed row holds 8"):
            engine.plan(units(3, 9), micro_batch_tokens=8)
