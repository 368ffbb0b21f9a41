"""Online preferences: which attempts become pairs, and that a step on them is one of trainer preference on the same pairs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from by_day import now
from rl_runs import Rl, Seen, StopHereError, numbers_of, steps_of, weights_of, write_world

from skyrl_engine.config import load, resolve
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.contracts.values.rollout import Group, Trajectory
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.errors import ConfigError, DataError, UnsupportedError
from skyrl_engine.rollout.journal_index import read_index
from skyrl_engine.training.preference.trainer import run_preference
from skyrl_engine.training.rl.dry_run import facts, plan_rl
from skyrl_engine.training.rl.pairs import PairedAttempts, choose_pairs
from skyrl_engine.training.rl.prepare import prepare
from skyrl_engine.training.rl.run import run_rl

PAIRED = "online_dpo"


def attempts_of(groups: Sequence[int], masked: Sequence[int] = (), *, same: Sequence[int] = ()) -> SampleColumns:
    """One sample of three tokens for every attempt, in these groups; those `masked` carry no loss, those `same` have equal tokens."""
    count = len(groups)
    ids = [[7, 8, 10 + (0 if number in same else 1 + number)] for number in range(count)]
    weight = np.array([[0, 0] if number in masked else [1, 1] for number in range(count)], dtype=np.uint8)
    return SampleColumns.create(
        input_ids=np.array(ids, dtype=np.int64).reshape(-1),
        token_offsets=offsets_of([3] * count),
        action_offsets=offsets_of([2] * count),
        loss_weight=weight.reshape(-1),
        group_ids=np.array(groups, dtype=np.int64),
        trajectory_ids=np.arange(count, dtype=np.int64),
    )


def pairs_in(paired: PairedAttempts) -> set[tuple[int, int]]:
    """Return the attempts of every pair, the chosen one first."""
    columns = paired.columns
    return {
        tuple(
            columns.trajectory_ids[(columns.unit_ids == unit) & (columns.sample_values["role"] == role)].item() for role in (0, 1)
        )
        for unit in range(len(paired.margins))
    }


@pytest.mark.parametrize(
    ("rewards", "per_group", "pairs", "tied"),
    [
        ([1, 5, 3, 2, 2, 2], 1, {(1, 0)}, 1),
        ([0, 1, 0, 9, 7, 8], 1, {(1, 0), (3, 4)}, 0),
        ([1, 0, 1, 0, 0, 1], 1, {(0, 1), (5, 3)}, 0),
        ([1, 0, 1, 0, 0, 1], 3, {(0, 1), (5, 3)}, 0),
        ([4, 4, 4, 4, 4, 4], 2, set(), 2),
    ],
)
def test_the_best_attempt_of_a_group_is_chosen_and_the_worst_rejected(
    rewards: list[float], per_group: int, pairs: set[tuple[int, int]], tied: int
) -> None:
    paired = choose_pairs(attempts_of([4, 4, 4, 9, 9, 9]), np.array(rewards, dtype=np.float64), per_group)
    assert pairs_in(paired) == pairs
    assert (paired.tied, paired.groups) == (tied, 2)
    assert paired.margins.tolist() == [rewards[chosen] - rewards[rejected] for chosen, rejected in sorted(pairs)]
    assert (np.diff(paired.columns.trajectory_ids) > 0).all(), "the journal counts on their order"


def test_further_pairs_are_of_other_attempts_while_rewards_differ() -> None:
    columns = attempts_of([0] * 6)
    wanted = [(5, 0), (4, 1), (3, 2)]
    for most in (1, 2, 3):
        assert pairs_in(choose_pairs(columns, np.arange(6.0), most)) == set(wanted[:most])
    assert pairs_in(choose_pairs(columns, np.array([1.0, 2, 2, 2, 2, 3]), 3)) == {(5, 0)}


def test_attempts_without_loss_and_of_equal_tokens_make_no_pair() -> None:
    rewards = np.arange(4.0)
    assert pairs_in(choose_pairs(attempts_of([0] * 4, masked=[3]), rewards, 1)) == {(2, 0)}
    assert pairs_in(choose_pairs(attempts_of([0] * 4, same=[0, 3]), rewards, 2)) == {(2, 1)}
    nothing = choose_pairs(attempts_of([0] * 4, masked=[0, 1, 3]), rewards, 1)
    assert (len(nothing.columns), nothing.columns.loss_weight.any(), nothing.metrics) == (
        1,
        False,
        {"rollout/pairs": 0.0, "rollout/tied": 1.0},
    )


def test_an_attempt_of_several_samples_is_refused() -> None:
    columns = attempts_of([3, 3])
    with pytest.raises(DataError, match="an attempt of group 3 is 2 samples, because its history was rewritten"):
        choose_pairs(SampleColumns.create(**{**_fields(columns), "trajectory_ids": np.zeros(2, dtype=np.int64)}), np.zeros(1), 1)


def _fields(columns: SampleColumns) -> dict[str, Any]:
    names = ("input_ids", "token_offsets", "action_offsets", "loss_weight", "group_ids")
    return {name: getattr(columns, name) for name in names}


ROWS = {
    "padded": ("collator.use=padded",),
    "packed": ("collator.use=packed", "rl.micro_batch_tokens=216"),
    "tree": ("collator.use=tree", "collator.least_shared=2", "rl.micro_batch_tokens=216"),
}
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"use": "dpo", "beta": 0.7},
    "ipo": {"use": "dpo", "form": "ipo", "length_normalized": True},
    "robust": {"use": "dpo", "form": "robust", "label_smoothing": 0.1, "ld_alpha": 0.5},
    "js": {"use": "dpo", "f_divergence": "js_divergence", "weighted": True},
    "apo": {"use": "dpo", "form": "apo_zero"},
    "simpo": {"use": "simpo"},
    "cpo": {"use": "cpo"},
    "orpo": {"use": "orpo"},
    "judged": {"use": "kto", "form": "apo_zero_unpaired"},
}


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model: a reference that is not the policy."""
    return write_world(tmp_path_factory.mktemp("other"), intermediate_size=48) / "model"


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The gradients of the first step of every run, which ends there with StopHereError."""
    found: list[dict[str, Any]] = []

    def take_gradient(self: Engine, plan: Plan, *, temperature: float = 1.0, **_: Any) -> None:
        self.forward_backward(plan, temperature=temperature).result()
        found.append({name: np.array(value) for name, value in self.gradients().items()})
        raise StopHereError

    monkeypatch.setattr(Engine, "train", take_gradient)
    return found


def write_rows(path: Path, groups: Sequence[Group]) -> int:
    """Write the best and the worst attempt of every group as a pair of rows; return the number of pairs."""
    rows = []
    for group in groups:
        best, worst = (choose(group.finished, key=lambda attempt: attempt.reward) for choose in (max, min))
        assert best.reward > worst.reward
        rows += [_row(attempt, role, group.ticket) for role, attempt in enumerate((best, worst))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows) // 2


def _row(attempt: Trajectory, role: int, unit: int) -> dict[str, Any]:
    prompt = int(attempt.segment_offsets[1])
    return {
        "prompt_ids": attempt.token_ids[:prompt].tolist(),
        "response_ids": attempt.token_ids[prompt:].tolist(),
        "loss_mask": attempt.sampled[prompt:].astype(int).tolist(),
        "role": role,
        "unit_ids": unit,
    }


def compare_with_preference(
    rl: Rl, seen: Seen, gradients: list[dict[str, Any]], other: Path, tmp_path: Path, loss: str, keys: Sequence[str]
) -> None:
    """Hold the gradient of a step on attempts, several turns, cut off and failed ones, to that of trainer preference on rows of them."""
    table = LOSSES[loss]
    # rows of shared prefixes sum what comes back through a shared token in the float32 of transformers' norms
    bound = 1e-6 if "collator.use=tree" in keys else 1e-12
    reads_reference = table["use"] in ("dpo", "kto")
    reference = {"path": str(other)} if reads_reference else {}
    own = [f"loss.{key}={json.dumps(value)}" for key, value in table.items()]
    keys = [*keys, *own, "model.dtype=float64", "rl.groups=4", *([f"reference.path={other}"] if reads_reference else [])]
    config = rl("run", *keys, preset=PAIRED, environment={"failing": True})
    with pytest.raises(StopHereError):
        run_rl(config)
    attempts = [attempt for group in seen.groups[1] for attempt in group.trajectories]
    assert {attempt.status for attempt in attempts} == {"finished", "truncated", "failed"}
    assert max(attempt.turns for attempt in attempts) == 2
    assert write_rows(tmp_path / "pairs.jsonl", seen.groups[1]) == 4
    tables = {
        "trainer": "preference",
        "model": {"path": config.config.model.path, "dtype": "float64"},
        "data": {"train": str(tmp_path / "pairs.jsonl"), "cache": str(tmp_path / "cache")},
        "training": {"steps": 1, "batch_size": 8},
        "loss": table,
        "reference": reference,
        "collator": {"use": "padded"},
        "run": {"directory": str(tmp_path / "rows"), "device": "cpu"},
    }
    with pytest.raises(StopHereError):
        run_preference(resolve(load(tables, [])))
    got, wanted = gradients
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.any(), name
        np.testing.assert_allclose(got[name], value, rtol=0, atol=bound * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize(
    ("rows", "loss"),
    now([(rows, loss) for rows in ROWS for loss in LOSSES], ("padded", "dpo"), ("packed", "simpo"), ("tree", "dpo")),
)
def test_a_step_is_one_of_trainer_preference_on_the_same_pairs(
    rl: Rl, seen: Seen, gradients: list[dict[str, Any]], other: Path, tmp_path: Path, rows: str, loss: str
) -> None:
    compare_with_preference(rl, seen, gradients, other, tmp_path, loss, ROWS[rows])


@pytest.mark.usefixtures("without_ray")
def test_two_ranks_take_the_step_of_one(rl: Rl, seen: Seen, gradients: list[dict[str, Any]], other: Path, tmp_path: Path) -> None:
    compare_with_preference(rl, seen, gradients, other, tmp_path, "dpo", (*ROWS["packed"], "run.ranks=2", "run.launch=ray"))


def test_only_pairs_are_trained_on_and_the_journal_says_which(rl: Rl, seen: Seen) -> None:
    """Log-ratios of the first step are exactly 0, in two optimizer steps of a batch too, until the first of them."""
    run = run_rl(rl("run", "rl.groups=4", "rl.group_size=4", "rl.pairs=2", "rl.missing_eos_penalty=7", preset=PAIRED)).directory
    first, second = (record["metrics"] for record in steps_of(run))
    assert (first["rewards/margins"], first["implicit_kl"]) == (0.0, 0.0)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert second["rewards/margins"] != 0.0
    assert (first["rollout/pairs"], first["samples"], first["rollout/tied"]) == (8.0, 16.0, 0.0)
    learned = read_index(run / "rollouts").learned[1].read_learned()
    signs = {(attempt.ticket, attempt.member): set(attempt.advantages.tolist()) for attempt in learned}
    margins = []
    for group in seen.groups[1]:
        earned = {attempt.member: attempt.reward - 7 * attempt.misses_end for attempt in group.finished}
        ranked = sorted(group.finished, key=lambda attempt: earned[attempt.member])
        assert [signs[group.ticket, attempt.member] for attempt in ranked] == [{-1.0}, {-1.0}, {1.0}, {1.0}]
        margins += [earned[ranked[high].member] - earned[ranked[low].member] for high, low in ((3, 0), (2, 1))]
    assert first["reward/pair_margin"] == pytest.approx(np.mean(margins))
    assert {column for plan in seen.plans.values() for column in plan.columns.columns} == {
        "rewards",
        "rollout_logprobs",
        "ref_logprobs",
    }


@pytest.mark.parametrize("ranks", now([1, 2], 1))
@pytest.mark.usefixtures("without_ray")
def test_a_batch_of_ties_is_a_step_without_gradient(rl: Rl, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    settings = ("rl.steps=1", "rl.mini_batches=2", f"run.ranks={ranks}", f"run.launch={'ray' if ranks > 1 else 'inline'}")
    run = run_rl(rl("run", *settings, preset=PAIRED, environment={"constant": 1.5, "turns": 1})).directory
    (metrics,) = (record["metrics"] for record in steps_of(run))
    assert (metrics["grad_norm"], metrics["loss"], metrics["loss_tokens"]) == (0.0, 0.0, 0.0)
    assert (metrics["rollout/pairs"], metrics["rollout/tied"], metrics["rollout/zero_variance"]) == (0.0, 1.0, 1.0)
    assert "reward/pair_margin" not in metrics
    assert metrics["reward/mean"] == 1.5
    assert "the attempts of each of its 3 groups have the same reward, 1.5 in all of them" in caplog.text
    assert read_index(run / "rollouts").learned[1].read_learned() == []


def test_a_resumed_run_has_the_bits_of_a_whole_one(rl: Rl) -> None:
    """With a reference that follows training, two optimizer steps of a batch and ties now and then; kills: test_killed_rl.py."""
    settings = ("checkpoint.every=1", "rl.mini_batches=2", "reference.refresh_every=2", "rl.group_size=2")
    whole = run_rl(rl("whole", "rl.steps=3", *settings, preset=PAIRED)).directory
    run_rl(rl("parts", "rl.steps=2", *settings, preset=PAIRED))
    parts = run_rl(rl("parts", "rl.steps=3", *settings, preset=PAIRED), resume=True).directory
    assert weights_of(parts) == weights_of(whole)
    assert numbers_of(parts) == numbers_of(whole)


TERM = "loss.terms=[{use='cross_entropy', on='chosen', coef=0.1}]"


@pytest.mark.parametrize(
    ("preset", "overrides", "error", "words", "remedy"),
    [
        (PAIRED, ["rl.group_size=1"], ConfigError, "rl.pairs: is 1, and an attempt is in one pair: a group of 1", "raise rl.group_size"),
        (PAIRED, ["rl.pairs=2"], ConfigError, "rl.pairs: is 2, and .* a group of 3 makes 1", "Lower rl.pairs"),
        (PAIRED, ["rl.kl.coef=0.1"], ConfigError, "rl.kl: takes a penalty off the rewards", "by their beta"),
        (PAIRED, ["rl.history=template"], ConfigError, "rl.history: is \"template\"", 'rl.history = "append"'),
        (PAIRED, ["loss.use=ppo"], UnsupportedError, "ppo.* reads advantages, and rl.pairs trains on pairs", "such as dpo"),
        (PAIRED, ["loss.use=cross_entropy"], UnsupportedError, "cross_entropy.* does not tell chosen from rejected", 'loss.use = "dpo"'),
        (PAIRED, ["loss.use=kto"], UnsupportedError, "kto.* needs the column 'kl_baseline'", "Choose a part"),
        (PAIRED, ["loss.use=bradley_terry", "model.value_head=true"], UnsupportedError, "trains a reward model's values", 'loss.use = "dpo"'),
        (PAIRED, ["reducer.use=token_mean"], UnsupportedError, "only with the reducers sequence_mean", "sequence_mean"),
        (PAIRED, ["rl.micro_batch_rows=1"], DataError, "unit", ""),
        ("grpo", ["loss.use=dpo"], UnsupportedError, "dpo.* tells chosen from rejected answers", "Set rl.pairs = 1"),
        ("grpo", [TERM], UnsupportedError, r"loss.terms\[0\].on = \"chosen\" tells chosen", "Set rl.pairs = 1"),
        (PAIRED, ["loss.use=simpo", "reference.refresh_every=2"], ConfigError, "no part of the run reads ref_logprobs", "Remove"),
    ],
)  # fmt: skip
def test_what_pairs_contradict_is_refused(rl: Rl, preset: str, overrides: list[str], error: Any, words: str, remedy: str) -> None:
    with pytest.raises(error, match=words) as caught:
        prepare(rl("run", *overrides, preset=preset))
    found = caught.value.problems[0].remedy if isinstance(caught.value, ConfigError) else caught.value.remedy
    assert remedy in found


def test_an_estimator_of_advantages_is_no_part_of_a_run_on_pairs(rl: Rl) -> None:
    with pytest.raises(
        ConfigError, match=r"advantage: \[advantage\] selects an advantage, and trainer rl uses none where rl.pairs is set"
    ):
        rl("run", "advantage.use=rloo", preset=PAIRED)
    by_hand = rl("run", "rl.pairs=1", "loss.use=dpo")
    assert "advantage" not in by_hand.plugins, "the preset's goes with the others of its kind"
    assert resolve(load(by_hand.as_dict())).as_dict() == by_hand.as_dict()
    assert prepare(by_hand).advantage is None


def test_the_plan_of_a_run_names_its_pairs(rl: Rl) -> None:
    lines = facts(plan_rl(rl("run", preset=PAIRED)))
    assert lines["steps"] == "2 of 3 tasks x 3 attempts (a pair of each task whose rewards differ), 1 optimizer steps x 1 epochs"
    assert lines["passes"] == "sample, choose pairs, score logprobs of the reference as ref_logprobs, train"


@pytest.mark.nightly
def test_recorded_attempts_make_pairs(rl: Rl, seen: Seen, tmp_path: Path) -> None:
    """And are refused where none can be made of them."""
    run_rl(rl("recorded", "rl.steps=1", "rl.history=template"))
    recorded = [f"rl.rollouts={tmp_path / 'recorded'}", "environments=[]"]
    with pytest.raises(UnsupportedError, match="is several samples, because its history was rewritten"):
        prepare(rl("rewritten", *recorded, preset=PAIRED))
    run_rl(rl("sampled", "rl.steps=1"))
    recorded[0] = f"rl.rollouts={tmp_path / 'sampled'}"
    result = run_rl(rl("run", "rl.steps=1", *recorded, preset=PAIRED))
    assert steps_of(result.directory)[0]["metrics"]["rollout/pairs"] == 3
    assert sorted(seen.plans[1].columns.sample_values["role"].tolist()) == [0, 0, 0, 1, 1, 1]


@pytest.mark.nightly
def test_pairs_of_older_weights_are_trained_on_too(
    rl: Rl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No ratio corrects for their age, and no warning asks for one: a preference holds of attempts of any policy."""
    run = run_rl(rl("run", "rl.staleness=1", "rl.steps=3", preset=PAIRED)).directory
    assert all(record["metrics"]["rollout/pairs"] > 0 for record in steps_of(run))
    assert "no part of the loss reads" not in caplog.text
