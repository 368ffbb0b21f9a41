"""Runs on preferences from configuration to run directory: exact references, held-out pairs, and resumes to the same bits."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import now
from pair_runs import Configure, EndedError, Ending
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.errors import ConfigError, DataError, ModelError, PluginBrokenError, UnsupportedError
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.testing.ranks.world_transport import OwnRanksTransport
from skyrl_engine.training.export import export_checkpoint
from skyrl_engine.training.preference.trainer import plan_preference, run_preference
from skyrl_engine.training.sft.trainer import run_sft


def steps(directory: Path, kind: str = "step") -> list[dict[str, float]]:
    return [record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == kind]


def weights(directory: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(directory / "model" / "model.safetensors").items()}


@pytest.mark.parametrize("collator", ["padded", "packed", "tree"])
def test_the_first_log_ratios_are_zero_and_held_out_pairs_are_told_apart(configure: Configure, collator: str) -> None:
    """Reference and policy are scored over one plan: rewards of the first step are exactly 0, its loss log 2."""
    size = {"micro_batch_rows": 4} if collator == "padded" else {"micro_batch_rows": None, "micro_batch_tokens": 96}
    options = {"least_shared": 2} if collator == "tree" else {}
    resolved = configure(collator={"use": collator, **options}, training=size, evaluation={"at_start": True})
    done = run_preference(resolved)
    first, *_, last = steps(done.directory)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "implicit_kl"):
        assert first[name] == 0.0, name
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["loss"] < first["loss"]
    assert last["rewards/accuracies"] == 1.0
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], rel=1e-6)
    before, after = steps(done.directory, "evaluation")
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert after["loss"] < before["loss"]
    assert after["rewards/accuracies"] > 0.5
    state = json.loads((done.directory / "checkpoints" / "step-00000006" / "trainer.json").read_text())
    assert state["trainer"] == "preference"


@pytest.mark.nightly
def test_dropout_is_switched_off_and_exported(configure: Configure, pairs: Path, tmp_path: Path) -> None:
    """All shares are refused at once; off, the run is bit for bit that of the model without them, and its export states them."""
    model = tmp_path / "dropping"
    shutil.copytree(pairs / "model", model)
    stated = json.loads((model / "config.json").read_text())
    dropping = {"attention_dropout": 0.1, "hidden_dropout": 0.2}
    (model / "config.json").write_text(json.dumps({**stated, **dropping}))
    with pytest.raises(UnsupportedError, match=r"\(attention_dropout 0\.1, hidden_dropout 0\.2 in config\.json") as caught:
        plan_preference(configure(model={"path": str(model)}))
    assert caught.value.remedy == 'Set model.dropout = "off"'
    off = run_preference(configure("off", model={"path": str(model), "dropout": "off"}, checkpoint={"every": 3})).directory
    assert steps(off)[0]["rewards/margins"] == 0.0
    plain = run_preference(configure("plain")).directory
    assert weights(off) == weights(plain)
    shutil.rmtree(model)
    export_checkpoint(off, tmp_path / "exported", step=3)
    for directory in (off / "model", tmp_path / "exported"):
        written = json.loads((directory / "config.json").read_text())
        assert {key: written[key] for key in dropping} == dropping


def test_no_cut_changes_the_loss(configure: Configure) -> None:
    curves = [
        [
            step["loss"]
            for step in steps(run_preference(configure(f"cut-{rows}", training={"micro_batch_rows": rows, "steps": 3})).directory)
        ]
        for rows in (2, 8)
    ]
    np.testing.assert_allclose(*curves, rtol=1e-5)


def test_adapters_off_are_the_reference(configure: Configure) -> None:
    """A fresh adapter changes nothing: the model without it scores as the model with it, to the bit."""
    resolved = configure(model={"lora": {"rank": 4}}, training={"steps": 2})
    first, second = steps(run_preference(resolved).directory)
    assert first["rewards/margins"] == first["implicit_kl"] == 0.0
    assert second["rewards/margins"] != 0.0


def test_metrics_of_the_vocabulary_are_those_of_the_whole_logits(configure: Configure, pairs: Path) -> None:
    """Before the first step, in training and evaluation; without them nothing else changes."""
    tables: dict[str, Any] = {"training": {"steps": 2, "batch_size": 20}, "evaluation": {"at_start": True}}
    plain = run_preference(configure("plain", **tables)).directory
    watched = run_preference(configure("watched", **tables, preference={"vocabulary_metrics": True})).directory
    assert weights(watched) == weights(plain)
    assert "policy/entropy" not in steps(plain)[0]
    tokenizer = AutoTokenizer.from_pretrained(pairs / "model")
    model = AutoModelForCausalLM.from_pretrained(pairs / "model").double()
    for name, kind in (("train", "step"), ("eval", "evaluation")):
        rows = [json.loads(line) for line in (pairs / f"{name}.jsonl").read_text().splitlines()]
        entropies, means = [], {"chosen": [], "rejected": []}
        for row in rows:
            prompt = tokenizer(row["prompt"]).input_ids
            for half in means:
                ids = tokenizer(row["prompt"] + row[half]).input_ids
                ids = ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
                logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
                logprobs = logits.log_softmax(-1)
                entropies += (-(logprobs.exp() * logprobs).sum(-1)).tolist()
                means[half] += logits.mean(-1).tolist()
        reported = steps(watched, kind)[0]
        assert reported["policy/entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)
        for half, of_half in means.items():
            assert reported[f"logits/{half}"] == pytest.approx(np.mean(of_half), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"weighted": True, "ld_alpha": 0.5},
        {"form": "aot"},
        {"form": "exo_pair", "label_smoothing": 0.01, "f_divergence": "js_divergence"},
    ],
    ids=str,
)
def test_options_of_dpo_reach_the_ranks_and_learn(configure: Configure, options: dict[str, Any]) -> None:
    first, *_, last = steps(run_preference(configure(loss={"use": "dpo", **options}, training={"steps": 4})).directory)
    assert first["rewards/margins"] == 0.0
    assert last["rewards/margins"] > 0.0
    assert last["loss"] < first["loss"]


@pytest.mark.nightly
def test_a_copied_reference_is_the_model_of_that_step(configure: Configure) -> None:
    """So the rewards of the step after it are exactly 0, in training and in an evaluation."""
    tables: dict[str, Any] = {"training": {"steps": 4}, "evaluation": {"every": 2}, "reference": {"refresh_every": 2}}
    run = run_preference(configure("run", **tables)).directory
    margins = [step["rewards/margins"] for step in steps(run)]
    assert margins[0] == margins[2] == 0.0
    assert margins[1] != 0.0
    assert margins[3] != 0.0
    assert [evaluation["rewards/margins"] for evaluation in steps(run, "evaluation")] == [0.0, 0.0]


def test_a_mixed_reference_is_the_mean_of_the_weights_and_resumes(configure: Configure, pairs: Path) -> None:
    """0.6 of the trained weights and 0.4 of the reference's before, twice; a run that was ended between the two goes on to the same bits."""
    tables: dict[str, Any] = {
        "training": {"steps": 4},
        "checkpoint": {"every": 1},
        "reference": {"refresh_every": 2, "mixup": 0.6},
    }
    whole = run_preference(configure("whole", **tables)).directory
    trained = run_preference(configure("two", **{**tables, "training": {"steps": 2}, "reference": {}})).directory
    start, policy = (load_file(directory / "model.safetensors") for directory in (pairs / "model", trained / "model"))
    second, fourth = (load_file(whole / "reference" / f"step-{step}" / "model.safetensors") for step in (2, 4))
    last = load_file(whole / "model" / "model.safetensors")
    assert second.keys() == start.keys() == policy.keys()
    for name, weight in second.items():
        np.testing.assert_allclose(weight, 0.4 * start[name] + 0.6 * policy[name], rtol=0, atol=5e-7)
        np.testing.assert_allclose(fourth[name], 0.4 * weight + 0.6 * last[name], rtol=0, atol=5e-7)
        assert not np.array_equal(weight, policy[name])
    with pytest.raises(PluginBrokenError):
        run_preference(configure("cut", **tables), observers=[Ending()])
    cut = run_preference(configure("cut", **tables), resume=True).directory
    assert [step["loss"] for step in steps(cut)] == [step["loss"] for step in steps(whole)]
    assert weights(cut) == weights(whole)


@pytest.mark.parametrize("loss", ["dpo", pytest.param("kto", marks=pytest.mark.nightly)])
def test_a_run_that_was_ended_resumes_to_the_same_bits(configure: Configure, loss: str) -> None:
    settings: dict[str, Any] = {"preference": {"preset": loss}, "checkpoint": {"every": 2}, "training": {"steps": 4}}
    whole = run_preference(configure("whole", **settings)).directory
    with pytest.raises(PluginBrokenError):
        run_preference(configure("cut", **settings), observers=[Ending()])
    cut = run_preference(configure("cut", **settings), resume=True).directory
    names = ("loss", "grad_norm", "rewards/chosen", "implicit_kl")
    assert [[step[name] for name in names] for step in steps(cut)[-2:]] == [
        [step[name] for name in names] for step in steps(whole)[-2:]
    ]
    assert weights(cut) == weights(whole)


@pytest.mark.parametrize(
    "preset", ["orpo", *(pytest.param(recipe, marks=pytest.mark.nightly) for recipe in ("simpo", "cpo", "ipo"))]
)
def test_every_preset_learns(configure: Configure, preset: str) -> None:
    done = run_preference(configure(preference={"preset": preset}, training={"steps": 3}))
    first, _, last = steps(done.directory)
    assert last["rewards/margins"] > first["rewards/margins"]


@pytest.mark.nightly
def test_single_answers_train_with_kto(configure: Configure, pairs: Path) -> None:
    """The model is its reference at first: no reward, a baseline of 0, and a loss of 1/2. Later the baseline is the measured one."""
    resolved = configure(preference={"preset": "kto"}, data={"train": str(pairs / "single.jsonl"), "eval": None})
    first, *_, last = steps(run_preference(resolved).directory)
    assert first["loss"] == pytest.approx(0.5, abs=1e-7)
    assert first["kl_baseline"] == 0.0
    assert last["loss"] < first["loss"]
    assert last["rewards/chosen"] > last["rewards/rejected"]


def test_a_mini_batch_without_a_gradient_is_logged(configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once in a session, with what has no gradient; runs over a dataset go on."""
    (tmp_path / "flat.py").write_text(
        "from skyrl_engine import loss\n\n"
        "@loss(needs=('logprobs',), unit_size=2, reducers=('sequence_mean',))\n"
        "def flat(tokens, config):\n    return tokens.logprobs * 0\n"
    )
    own = {"preference": {"preset": "none"}, "loss": {"use": f"{tmp_path / 'flat.py'}:flat"}, "reducer": {"use": "sequence_mean"}}
    with caplog.at_level("WARNING", logger="skyrl_engine"):
        assert run_preference(configure(**own, training={"steps": 2})).step == 2
    messages = [record.getMessage() for record in caplog.records if "exactly 0" in record.getMessage()]
    assert len(messages) == 1
    assert "the gradient of step 1 is exactly 0: loss 'flat'" in messages[0]


def test_a_term_on_the_chosen_half_is_half_of_its_mean(configure: Configure) -> None:
    """Coef = 2 adds the mean over chosen answers of their mean -log p, the NLL term of RPO with alpha = 1."""
    plain = steps(run_preference(configure("plain", training={"steps": 1})).directory)[0]
    term = {"loss": {"terms": [{"use": "cross_entropy", "coef": 2.0, "on": "chosen"}]}}
    added = steps(run_preference(configure("added", training={"steps": 1}, **term)).directory)[0]
    assert added["loss"] - plain["loss"] == pytest.approx(added["objective/cross_entropy"], rel=1e-6)
    assert 1.0 < added["objective/cross_entropy"] < 10.0


@pytest.mark.proof
@pytest.mark.nightly
@pytest.mark.usefixtures("without_ray")
def test_two_ranks_learn_as_one(configure: Configure) -> None:
    """Pairs stay on one rank; rewards of the first step are 0 on both."""
    alone = steps(run_preference(configure("alone", training={"steps": 3})).directory)
    both = steps(run_preference(configure("both", training={"steps": 3}, run={"launch": "ray", "ranks": 2})).directory)
    assert both[0]["rewards/margins"] == 0.0
    np.testing.assert_allclose([step["loss"] for step in both], [step["loss"] for step in alone], rtol=1e-4)


RUNNER = """
import json, os, signal, sys
from skyrl_engine import hookimpl
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.training.preference import references
from skyrl_engine.training.preference.trainer import run_preference
settings, killed_in = json.loads(sys.argv[1]), sys.argv[2]
references._SECONDS_BETWEEN_WRITES = 0.0
def kill(place):
    if place == killed_in:
        os.kill(os.getpid(), signal.SIGKILL)
class Kill:
    @hookimpl
    def skyrl_engine_step_finished(self, event):
        kill(f"step {event.step}")
def progress(what, done, total):
    kill(f"{what}, {done} of {total}")
run_preference(resolve(from_dict(settings, "test")), observers=[Kill()], progress=progress, resume=True)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "places",
    [("step 3",), ("scoring with the reference, 16 of 20", "scoring with the reference, 8 of 12", "step 3")],
    ids=["live", "kept"],
)
def test_a_killed_run_resumes_to_the_same_bits(configure: Configure, tmp_path: Path, places: tuple[str, ...]) -> None:
    settings: dict[str, Any] = {"checkpoint": {"every": 2}, "training": {"steps": 4}, "reference": {"precompute": len(places) > 1}}
    whole = run_preference(configure("whole", **settings)).directory
    resolved = configure("killed", **settings, data={"cache": str(tmp_path / "cache")})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for place in places:
        command = [sys.executable, "-c", RUNNER, json.dumps(resolved.as_dict()), place]
        assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL, place
    assert weights(run_preference(resolved, resume=True).directory) == weights(whole)


def test_what_cannot_work_is_refused_while_planning(configure: Configure, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="does not tell chosen from rejected"):
        plan_preference(configure(preference={"preset": "none"}))
    with pytest.raises(DataError, match=r"loss .dpo. .* compares the two answers of a pair, and the data has single answers"):
        plan_preference(configure(data={"train": str(pairs / "single.jsonl"), "eval": None}))
    with pytest.raises(
        ConfigError, match=r"reference\.refresh_every: changes the reference, and reference\.precompute keeps the scores"
    ):
        plan_preference(configure(reference={"refresh_every": 2, "precompute": True}))
    with pytest.raises(ConfigError, match="says at no step to mix"):
        plan_preference(configure(reference={"mixup": 0.5}))
    with pytest.raises(ConfigError, match=r"reference\.refresh_every: is set, and no part of the run reads"):
        plan_preference(configure(preference={"preset": "orpo"}, reference={"refresh_every": 2}))
    with pytest.raises(UnsupportedError, match="copies the whole trained model"):
        plan_preference(configure(model={"lora": {"rank": 2}}, reference={"refresh_every": 2}))
    with pytest.raises(UnsupportedError, match="makes sense only with the reducers sequence_mean"):
        plan_preference(configure(reducer={"use": "token_mean"}))
    with pytest.raises(DataError, match="holds preferences"):
        run_sft(configure(trainer="sft"))
    with pytest.raises(ConfigError, match="there is no preset"):
        configure(preference={"preset": "dop"})
    other = tmp_path / "other"
    write_model(other, tokenizer=write_tokenizer(other, ["other words than those"], size=64))
    with pytest.raises(
        UnsupportedError, match=r"the reference .* has another tokenizer than the trained model: the token .* is number"
    ):
        plan_preference(configure(reference={"path": str(other)}))
    bare = tmp_path / "bare"
    shutil.copytree(pairs / "model", bare, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    with pytest.raises(
        ModelError, match=r"the reference cannot be compared with the trained model: the directory .* holds no tokenizer"
    ):
        plan_preference(configure(reference={"path": str(bare)}))
    plan_preference(configure(model={"path": str(bare), "tokenizer": str(pairs / "model")}, reference={"path": str(bare)}))
    plan = plan_preference(configure())
    assert plan.train["format"] == "preference"
    assert plan.train["samples"] == 20


class Scoring:
    """Counts the samples of every scoring pass; pass number `ends` fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.ends = -1
        original = Engine.score

        def score(engine: Engine, plan: Plan, **keywords: Any) -> Any:
            self.sizes.append(len(plan.columns))
            if len(self.sizes) == self.ends:
                raise EndedError
            return original(engine, plan, **keywords)

        monkeypatch.setattr(Engine, "score", score)
        monkeypatch.setattr("skyrl_engine.training.preference.references._SECONDS_BETWEEN_WRITES", 0.0)

    def drain(self) -> list[int]:
        sizes, self.sizes = self.sizes, []
        return sizes


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> Scoring:
    return Scoring(monkeypatch)


@pytest.fixture
def cache_tables(tmp_path: Path) -> dict[str, Any]:
    return {"data": {"cache": str(tmp_path / "cache")}, "training": {"steps": 2}, "reference": {"precompute": True}}


@pytest.mark.nightly
def test_references_are_computed_once(configure: Configure, cache_tables: dict[str, Any], scoring: Scoring) -> None:
    """A pass that was ended goes on after its mark, and a second run loads no reference. Scores of another cut are equal within rounding."""
    live = steps(run_preference(configure("live", **{**cache_tables, "reference": {}})).directory)
    scoring.drain()
    scoring.ends = 3
    with pytest.raises(EndedError):
        run_preference(configure("ended", **cache_tables))
    assert scoring.drain() == [8, 8, 4]
    scoring.ends = -1
    first = steps(run_preference(configure("first", **cache_tables)).directory)
    assert scoring.drain() == [4, 8, 4], "the rest of the training pairs, and the held-out ones"
    np.testing.assert_allclose([step["loss"] for step in first], [step["loss"] for step in live], rtol=0, atol=1e-5)
    assert first[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    again = steps(run_preference(configure("again", **cache_tables)).directory)
    assert scoring.drain() == []
    assert [step["loss"] for step in again] == [step["loss"] for step in first]


@pytest.mark.nightly
def test_kept_references_belong_to_their_model_and_data(
    configure: Configure, cache_tables: dict[str, Any], scoring: Scoring, tmp_path: Path, pairs: Path
) -> None:
    first = steps(run_preference(configure("first", **cache_tables)).directory)
    everything = [8, 8, 4, 8, 4]
    assert scoring.drain() == everything
    other_model = {"precompute": True, "path": str(tmp_path / "first" / "model")}
    run_preference(configure("model", **{**cache_tables, "reference": other_model}))
    assert scoring.drain() == everything
    run_preference(configure("data", **{**cache_tables, "data": {**cache_tables["data"], "max_samples": 8}}))
    assert scoring.drain() == [8, 8], "the held-out pairs are the same, and so are their scores"
    for file in (tmp_path / "cache" / "references").glob("*.f32"):
        file.write_bytes(bytes(file.stat().st_size))
    again = steps(run_preference(configure("damaged", **cache_tables)).directory)
    assert scoring.drain() == everything
    assert [step["loss"] for step in again] == [step["loss"] for step in first]


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("precompute", now([True, False], False), ids=["placed", "cut"])
def test_batches_made_ahead_change_no_byte(configure: Configure, monkeypatch: pytest.MonkeyPatch, precompute: bool) -> None:
    """With scores of the reference in the data, shards are placed ahead; without, only the plan is made, over which the reference scores."""
    settings = {"run": {"launch": "ray", "ranks": 2}, "reference": {"precompute": precompute}, "training": {"micro_batch_rows": 4}}
    placed = []
    place = Engine.place
    monkeypatch.setattr(Engine, "place", lambda self, plan: (placed.append(self.step), place(self, plan)))
    ahead = run_preference(configure("ahead", **settings)).directory
    assert placed == (list(range(5)) if precompute else [])
    monkeypatch.setattr(OwnRanksTransport, "concurrent", False)
    in_turn = run_preference(configure("in-turn", **settings)).directory
    for kind in ("step", "evaluation"):
        told = [
            [record.items() - {("tokens_per_second", record.get("tokens_per_second"))} for record in steps(run, kind)]
            for run in (ahead, in_turn)
        ]
        assert told[0] == told[1]
    assert weights(ahead) == weights(in_turn)


def test_pairs_of_several_datasets_have_metrics_of_their_own(configure: Configure, pairs: Path, tmp_path: Path) -> None:
    """Each dataset's are those of an evaluation on it alone, and weighted by its pairs they add up to the whole."""
    rows = (pairs / "eval.jsonl").read_text().splitlines(keepends=True)
    for name, own in (("two", rows[:2]), ("four", rows[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(own))
    evaluated = {}
    for name, held_out in (("both", ["two", "four"]), ("alone", ["two"])):
        data = {"eval": [str(tmp_path / f"{held}.jsonl") for held in held_out]}
        directory = run_preference(configure(name, data=data, training={"steps": 2})).directory
        (evaluated[name],) = [
            record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "evaluation"
        ]
    both, alone = evaluated["both"], evaluated["alone"]
    for metric in ("rewards/accuracies", "rewards/margins", "logps/chosen"):
        assert both[f"{metric}/two"] == pytest.approx(alone[metric], rel=1e-5)
        assert (2 * both[f"{metric}/two"] + 4 * both[f"{metric}/four"]) / 6 == pytest.approx(both[metric], rel=1e-5)
        assert f"{metric}/two" not in alone
    assert both["rewards/margins/two"] != both["rewards/margins/four"]


def test_pairs_are_streamed_whole_and_what_needs_all_data_is_refused(configure: Configure, pairs: Path) -> None:
    rows = [str(pairs / "train.jsonl"), str(pairs / "eval.jsonl")]
    data = {"train": rows, "weights": [1, 1], "streaming": True, "buffer_size": 3, "max_length": 32, "eval": None}
    (*_, last) = steps(run_preference(configure(data=data, training={"steps": 3})).directory)
    assert (last["samples"], last["data/rows"]) == (8, 12)
    assert 0 <= last["rewards/accuracies/train"] <= 1
    with pytest.raises(ConfigError, match=r"reference\.precompute: scores all samples before the run"):
        plan_preference(configure(data=data, reference={"precompute": True}))
    with pytest.raises(UnsupportedError, match="reads KTO's baseline"):
        plan_preference(configure(data=data, preference={"preset": "kto"}))
