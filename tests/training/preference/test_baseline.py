"""KTO's baseline: answers to other prompts, never to a sample's own, and mini-batches that have none."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_runs import Configure, Ending
from safetensors.numpy import load_file, save_file

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.engine.engine import Engine
from skyrl_engine.errors import DataError, PluginBrokenError
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.preference.baseline import mismatch_answers, other_answers, prompt_labels
from skyrl_engine.training.preference.trainer import plan_preference, run_preference


def columns_of(*samples: tuple[list[int], list[int]], **others: Any) -> SampleColumns:
    """Samples of a prompt and an answer, in tokens."""
    return SampleColumns.create(
        input_ids=np.concatenate([np.array([*prompt, *answer], dtype=np.int64) for prompt, answer in samples]),
        token_offsets=offsets_of([len(prompt) + len(answer) for prompt, answer in samples]),
        action_offsets=offsets_of([len(answer) for _, answer in samples]),
        **others,
    )


def rows(columns: SampleColumns) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(columns.input_ids, columns.token_offsets[1:-1])]


def test_answers_of_pairs_stand_after_the_other_pairs_prompt() -> None:
    """Rows are cut to `longest` tokens; a mini-batch of one prompt has no other answers."""
    units = np.array([0, 0, 1, 1])
    columns = columns_of(([1, 2], [50]), ([1, 2], [51, 52]), ([3], [60, 61]), ([3], [62]), unit_ids=units)
    others = mismatch_answers(columns, 4)
    assert others is not None
    assert rows(others) == [[1, 2, 60, 61], [1, 2, 62], [3, 50], [3, 51, 52]]
    short = mismatch_answers(columns, 3)
    assert short is not None
    assert rows(short) == [[1, 2, 60], [1, 2, 62], [3, 50], [3, 51, 52]]
    assert mismatch_answers(columns.take([0, 1]), None) is None


def test_answers_of_interleaved_rows_are_never_matched() -> None:
    """Rows as many files hold them: the two answers to a prompt, one after the other. The next row's answer would be the prompt's own."""
    others = mismatch_answers(columns_of(([1], [10]), ([1], [11]), ([2], [20]), ([2], [21]), ([3], [30]), ([3], [31])), None)
    assert others is not None
    assert rows(others) == [[1, 20], [1, 21], [2, 30], [2, 31], [3, 10], [3, 11]]


def test_samples_of_different_prompts_get_the_next_ones_answer() -> None:
    others = mismatch_answers(columns_of(([1], [10]), ([2], [20]), ([3], [30])), None)
    assert others is not None
    assert rows(others) == [[1, 20], [2, 30], [3, 10]]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=24))
def test_no_sample_gets_an_answer_to_its_own_prompt(labels: list[int]) -> None:
    """Each answer is taken once, unless more than half of the samples have one prompt; there is none where all have."""
    given_labels = np.array(labels, dtype=np.int64)
    others = other_answers(given_labels)
    if len(set(labels)) == 1:
        assert others is None
        return
    assert others is not None
    assert (given_labels[others] != given_labels).all()
    if 2 * max(map(labels.count, labels)) <= len(labels):
        assert sorted(others.tolist()) == list(range(len(labels)))


def test_one_prompt_is_known_by_its_tokens_by_the_data_and_by_its_unit() -> None:
    columns = columns_of(
        ([1, 2], [10]),
        ([1], [2, 11]),  # an answer that merges with the prompt's end
        ([4], [12]),
        ([5], [13]),  # a unit with the sample before it
        ([4], [14]),
        sample_values={"prompt_number": np.array([0, 0, 1, 2, 1])},
        unit_ids=np.array([0, 1, 2, 2, 3]),
    )
    assert prompt_labels(columns).tolist() == [0, 0, 2, 2, 2]
    bare = columns_of(([1, 2], [10]), ([1], [2, 11]), ([1, 2], [12]))
    assert prompt_labels(bare).tolist() == [0, 1, 0]


def kto(configure: Configure, folder: Path, rows: list[tuple[str, str, bool]], name: str = "run", **training: Any) -> Any:
    path = folder / f"{name}.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": prompt, "completion": text, "label": good}) + "\n" for prompt, text, good in rows)
    )
    settings = {"steps": 2, "batch_size": 2, "micro_batch_rows": 2, **training}
    return configure(name, preference={"preset": "kto"}, data={"train": str(path), "eval": None}, training=settings)


INTERLEAVED = [(f"{number} + {number} =", text, good) for number in range(4) for text, good in ((" 4", True), (" 5 or so", False))]


def test_mini_batches_without_another_prompt_are_refused_while_planning(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the mini-batch of step 1 holds 2 answers of .* to one prompt") as error:
        plan_preference(kto(configure, tmp_path, INTERLEAVED, shuffle=False))
    assert "training.batch_size" in str(error.value)
    one = [row for row in INTERLEAVED if row[0] == "2 + 2 ="]
    with pytest.raises(DataError, match=r"all 2 answers of .* are to one prompt"):
        plan_preference(kto(configure, tmp_path, one, batch_size=8))
    plan_preference(kto(configure, tmp_path, INTERLEAVED, batch_size=4, shuffle=False))
    late = [INTERLEAVED[place] for place in (0, 2, 4, 6, 1, 3, 5, 5)]
    with pytest.raises(DataError, match="the mini-batch of step 4 holds 2 answers") as error:
        plan_preference(kto(configure, tmp_path, [*late, late[0], late[1]], steps=5, shuffle=False))


def test_a_last_mini_batch_of_one_prompt_has_no_baseline_and_is_logged(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = kto(configure, tmp_path, INTERLEAVED[:5], batch_size=4, shuffle=False, micro_batch_rows=4)
    with caplog.at_level(logging.WARNING):
        done = run_preference(resolved)
    assert "1 of 2 mini-batches" in caplog.text
    last = [record["metrics"] for record in read_metrics(done.directory / "metrics.jsonl") if record["kind"] == "step"][-1]
    assert last["kl_baseline"] == 0.0


def baselines(directory: Path) -> list[float]:
    return [record["metrics"]["kl_baseline"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]


def write_reference(pairs: Path, folder: Path) -> Path:
    """A model that is sure of tokens at random, so that the trained one finds answers likelier and its baseline is above 0."""
    directory = folder / "other"
    shutil.copytree(pairs / "model", directory)
    scaled = {name: weight * 10 for name, weight in load_file(directory / "model.safetensors").items()}
    save_file(scaled, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_precomputed_baseline_is_the_live_one_where_the_mini_batch_is_the_data(
    configure: Configure, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In smaller mini-batches its mean over an epoch is the same; a second run loads no reference."""
    other = write_reference(pairs, tmp_path)
    loaded: list[str] = []
    add = Engine.add_frozen
    monkeypatch.setattr(Engine, "add_frozen", lambda engine, frozen: (loaded.append(frozen.name), add(engine, frozen))[1])
    data = {"train": str(pairs / "single.jsonl"), "eval": None, "cache": str(tmp_path / "cache")}
    reference = {"path": str(other)}

    def run(name: str, **training: Any) -> Path:
        options = {"steps": 1, "batch_size": 20, "shuffle": False, **training}
        precompute = name != "live"
        return run_preference(
            configure(
                name,
                preference={"preset": "kto"},
                data=data,
                reference={**reference, "precompute": precompute},
                training=options,
                optimizer={"learning_rate": 1e-9},
            )
        ).directory

    (live,) = baselines(run("live"))
    assert live > 0.1
    (kept,) = baselines(run("kept"))
    assert kept == pytest.approx(live, rel=1e-5)
    assert loaded == ["reference", "reference"]
    halves = baselines(run("halves", batch_size=10, steps=2, shuffle=True))
    assert halves[0] != halves[1]
    assert np.mean(halves) == pytest.approx(live, rel=1e-4)
    singles = baselines(run("singles", batch_size=1, steps=20))
    assert np.mean(singles) >= live - 1e-4
    assert loaded == ["reference", "reference"], "scores are kept"


def test_precomputed_references_score_held_out_answers_and_resume(configure: Configure, pairs: Path, tmp_path: Path) -> None:
    single = str(pairs / "single.jsonl")
    tables: dict[str, Any] = {
        "preference": {"preset": "kto"},
        "data": {"train": single, "eval": single, "cache": str(tmp_path / "cache")},
        "reference": {"precompute": True, "path": str(write_reference(pairs, tmp_path))},
        "training": {"steps": 4},
        "checkpoint": {"every": 2},
    }
    whole = run_preference(configure("whole", **tables)).directory
    with pytest.raises(PluginBrokenError):
        run_preference(configure("cut", **tables), observers=[Ending()])
    cut = run_preference(configure("cut", **tables), resume=True).directory
    assert baselines(cut) == baselines(whole)
    assert all(baseline > 0 for baseline in baselines(whole))
    (evaluation,) = [record for record in read_metrics(whole / "metrics.jsonl") if record["kind"] == "evaluation"]
    assert evaluation["metrics"]["kl_baseline"] > 0


def test_held_out_answers_are_looked_at_too(configure: Configure, tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    rows = [{"prompt": "1 + 1 =", "completion": f" {number}", "label": number == 2} for number in range(3)]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed = [INTERLEAVED[place] for place in (0, 2, 4, 6)]
    resolved = kto(configure, tmp_path, mixed)
    with pytest.raises(DataError, match=r"all 3 answers of .*held-out\.jsonl are to one prompt"):
        plan_preference(
            configure("eval", preference={"preset": "kto"}, data={"train": resolved.config.data.train, "eval": str(held_out)})
        )
