"""Promises of a run by reinforcement: ratios of 1, an old policy from either pass, a frozen reference, times that add up, exact resumes."""

import json
import logging
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
import torch
from by_day import now, rarely
from rl_runs import Rl, Seen, numbers_of, steps_of, weights_of
from safetensors.torch import load_file

from skyrl_engine import hookimpl
from skyrl_engine.contracts.kinds.generator import Completion
from skyrl_engine.contracts.kinds.observer import RolloutsFinished, StepFinished
from skyrl_engine.contracts.values.rollout import SEGMENT_OBSERVED, SEGMENT_SAMPLED
from skyrl_engine.engine.sampler import Sampler
from skyrl_engine.errors import CheckpointError, ContractError, PluginBrokenError, RolloutError, UnsupportedError
from skyrl_engine.modeling.compiling import refuse_without_compiler
from skyrl_engine.rollout.journal_index import read_groups, read_index
from skyrl_engine.testing.templates import TEMPLATES
from skyrl_engine.training.export import export_checkpoint
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine_generators.generator import HfGenerator

PACKED = ("collator.use=packed", "rl.micro_batch_tokens=128")
TREE = ("collator.use=tree", "collator.least_shared=2", "rl.micro_batch_tokens=128")
LORA = ("model.lora.rank=2",)
TWO = ("run.ranks=2", "run.launch=ray")
VARIANTS: dict[str, tuple[str, ...]] = {
    "padded": ("collator.use=padded",),
    "cut": ("rl.micro_batch_rows=2",),
    "packed": PACKED,
    "tree": TREE,
    "tree lora": (*TREE, *LORA),
    "lora": ("collator.use=padded", *LORA),
    "packed lora": (*PACKED, *LORA),
    "compiled": ("collator.use=padded", "model.compile=true"),
    "packed compiled": (*PACKED, "model.compile=true"),
    "tree lora compiled": (*TREE, *LORA, "model.compile=true"),
    "recomputed compiled": (*PACKED, "model.activation_checkpointing=true", "model.compile=true"),
}


@pytest.mark.parametrize(
    ("name", "old"),
    now(product(VARIANTS, ["current", "score"]), ("padded", "current"), ("packed", "score"), ("lora", "score"), ("tree", "score")),
)
def test_every_ratio_is_exactly_1_before_the_first_update(rl: Rl, seen: Seen, name: str, old: str) -> None:
    if "compiled" in name:
        try:
            refuse_without_compiler("cpu")
        except UnsupportedError as error:
            pytest.skip(f"NOT PROVED HERE: {error.cause}")
    result = run_rl(rl("run", f"rl.old={old}", "rl.temperature=0.7", *VARIANTS[name]))
    for record in steps_of(result.directory):
        assert (record["metrics"]["policy/ratio_max"], record["metrics"]["policy/ratio_mean"]) == (1.0, 1.0)
        assert record["metrics"]["policy/gap_mean"] < 1e-5
        assert record["metrics"]["grad_norm"] > 0
        assert ("shared_share" in record["metrics"]) == name.startswith("tree")
        assert record["metrics"].get("shared_share", 0.5) > 0
    assert ("old_logprobs" in seen.plans[1].columns.columns) == (old == "score"), "each way was gone"
    assert any(SEGMENT_OBSERVED in trajectory.kinds for group in seen.groups[1] for trajectory in group.trajectories), (
        "some attempts have two turns"
    )


@pytest.mark.parametrize("returned", [None, rarely({}), rarely([[1, 2]]), [(0, [1, 2])]], ids=["None", "dict", "lists", "tuples"])
def test_a_generator_that_returns_no_completions_is_named(rl: Rl, monkeypatch: pytest.MonkeyPatch, returned: object) -> None:
    monkeypatch.setattr(HfGenerator, "poll", lambda _generator, _timeout: returned)
    with pytest.raises(ContractError, match=r"generator 'hf' of .* from poll") as refused:
        run_rl(rl("run"))
    assert refused.value.exit_code == 3


HEADS = {
    "tied": (),
    "value head": ("model.value_head=true",),
    "lora": LORA,
    "lora with a value head": (*LORA, "model.value_head=true"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("history", ["append", "template"])
def test_sampled_log_probabilities_are_those_of_a_score_pass_over_several_turns(
    rl: Rl, seen: Seen, name: str, temperature: float, history: str
) -> None:
    """After each of three steps. Single turns: tests/engine/test_sampler.py."""
    tables = ("rl.steps=3", f"rl.temperature={temperature}", f"rl.history={history}", "rl.old=score")
    result = run_rl(rl("run", *tables, *HEADS[name]))
    assert max(record["metrics"]["policy/gap_max"] for record in steps_of(result.directory)) < 1e-4
    for groups in seen.groups.values():
        assert max(trajectory.turns for group in groups for trajectory in group.finished) == 2


def test_histories_that_are_rendered_anew_train_every_turn_in_its_place(rl: Rl, seen: Seen) -> None:
    """An attempt that is cut into several samples counts once; no sample is longer than planning allowed for."""
    result = run_rl(rl("run", "rl.history=template", "rl.old=score"))
    assert [record["metrics"]["policy/ratio_max"] for record in steps_of(result.directory)] == [1.0, 1.0]
    columns, attempts = seen.plans[1].columns, [trajectory for group in seen.groups[1] for trajectory in group.finished]
    assert len(columns) > len(attempts) == len(set(columns.trajectory_ids.tolist())), "some are cut"
    assert max(np.diff(columns.token_offsets)) <= 64 + 44
    assert int(columns.loss_weight.astype(bool).sum()) == sum(len(trajectory.logprobs) for trajectory in attempts)


@pytest.mark.usefixtures("without_ray")
def test_ratios_on_two_ranks_are_1_and_advantages_are_those_of_one_rank(rl: Rl, seen: Seen) -> None:
    """Compares step 1: what it samples does not depend on the ranks."""
    columns = {}
    for name, ranks in (("one", ()), ("two", TWO)):
        result = run_rl(rl(name, "rl.old=score", "rl.groups=4", "rl.mini_batches=2", "rl.steps=1", *ranks))
        columns[name] = seen.plans[1].columns
        cut = seen.plans[1].cut
        assert len(cut.mini_batches) == 2
        for mini_batch in cut.mini_batches:
            own = columns[name].group_ids[mini_batch.samples]
            others = np.delete(columns[name].group_ids, mini_batch.samples)
            assert not set(own.tolist()) & set(others.tolist()), "no group is cut"
    one, two = columns.values()
    assert one.input_ids.tobytes() == two.input_ids.tobytes()
    assert one.columns["advantages"].tobytes() == two.columns["advantages"].tobytes()
    assert one.columns["advantages"].any()
    result = run_rl(rl("ratios", "rl.old=score", "rl.steps=1", *TWO))
    assert steps_of(result.directory)[0]["metrics"]["policy/ratio_max"] == 1.0


@pytest.mark.nightly
def test_the_old_policy_of_either_pass_gives_the_same_weights(rl: Rl) -> None:
    """And so it is no accident that ratios are 1."""
    current, scored = (run_rl(rl(old, f"rl.old={old}", "rl.steps=1")).directory for old in ("current", "score"))
    assert weights_of(current) == weights_of(scored)
    learned = [read_index(run / "rollouts").learned[1].read_learned() for run in (current, scored)]
    for one, other in zip(*learned, strict=True):
        assert one.trained_logprobs.tobytes() == other.trained_logprobs.tobytes(), "of the weights before the step"
    sampled = {
        (attempt.ticket, attempt.member): attempt.logprobs
        for group in read_groups(scored / "rollouts")
        for attempt in group.finished
    }
    for attempt in learned[0]:
        np.testing.assert_allclose(attempt.trained_logprobs, sampled[attempt.ticket, attempt.member], rtol=0, atol=1e-5)
    other = run_rl(rl("other", "rl.old=current", "rl.steps=1", "optimizer.learning_rate=1e-3")).directory
    assert weights_of(current) != weights_of(other)


@pytest.mark.parametrize("preset", now(["grpo", "dr_grpo", "rloo"], "grpo"))
def test_equal_rewards_teach_nothing(rl: Rl, seen: Seen, preset: str) -> None:
    """3.3 / 2 turns is no number of float32, whose mean would be another one."""
    result = run_rl(rl("run", "rl.steps=1", "rl.group_size=5", preset=preset, environment={"constant": 3.3, "turns": 1}))
    advantages = seen.plans[1].columns.columns["advantages"]
    assert len(advantages) > 0
    assert not advantages.any()
    assert steps_of(result.directory)[0]["metrics"]["grad_norm"] == 0.0
    assert steps_of(result.directory)[0]["metrics"]["rollout/zero_variance"] == 1.0


@pytest.mark.parametrize("adapters", now([False, True], True))
def test_the_reference_stays_as_it_was(rl: Rl, seen: Seen, adapters: bool) -> None:
    scores: dict[str, list[bytes]] = {"policy": [], "reference": []}
    first: list[Any] = []

    def score(trainer: Any, plan: Any, _number: int) -> None:
        first.append(plan)
        for name, values in scores.items():
            output = trainer.engine.score(first[0], model=None if name == "policy" else name).result()
            values.append(output.on_actions("logprobs").values.tobytes())

    seen.also = score
    run_rl(rl("run", "rl.steps=20", *(LORA if adapters else ()), preset="reinforce_pp"))
    assert len(set(scores["policy"])) == 20, "the policy moves"
    assert set(scores["reference"]) == {scores["policy"][0]}


def test_a_refreshed_reference_is_the_policy_of_that_step(rl: Rl, seen: Seen) -> None:
    scores: dict[str, list[bytes]] = {"policy": [], "reference": []}
    first: list[Any] = []

    def score(trainer: Any, plan: Any, _number: int) -> None:
        first.append(plan)
        for name, values in scores.items():
            output = trainer.engine.score(first[0], model=None if name == "policy" else name).result()
            values.append(output.on_actions("logprobs").values.tobytes())

    seen.also = score
    tables = ("rl.steps=4", "reference.refresh_every=2", "checkpoint.every=1")
    result = run_rl(rl("run", *tables, preset="reinforce_pp"))
    policy, reference = scores.values()
    assert reference == [policy[0], policy[0], policy[2], policy[2]]
    parts = run_rl(rl("parts", "rl.steps=3", *tables[1:], preset="reinforce_pp"))
    (parts.directory / "model").rename(parts.directory / "of three steps")
    moved = parts.directory.rename(parts.directory.with_name("moved"))
    run_rl(rl("moved", *tables, preset="reinforce_pp"), resume=True)
    assert weights_of(moved) == weights_of(result.directory)


@pytest.mark.nightly
def test_a_penalty_in_the_reward_is_what_somebody_takes_off_by_hand(rl: Rl, seen: Seen) -> None:
    coefs, expected = [], 0.5
    result = run_rl(rl("run", "rl.steps=3", "rl.kl={coef=0.5, target=0.001, horizon=50}"))
    for step in (1, 2, 3):
        columns = seen.plans[step].columns
        kl, taken = 0.0, columns.columns["rewards"].astype(np.float64)
        attempts = [trajectory for group in seen.groups[step] for trajectory in group.finished]
        for sample, attempt in enumerate(attempts):
            start, end = columns.action_offsets[sample], columns.action_offsets[sample + 1]
            rewards = iter(attempt.rewards.tolist())
            for place in range(start, end):
                if not columns.loss_weight[place]:
                    assert taken[place] == 0
                    continue
                gap = float(columns.columns["old_logprobs"][place]) - float(columns.columns["ref_logprobs"][place])
                kl += gap
                assert taken[place] == pytest.approx(next(rewards) - expected * gap, rel=1e-6, abs=1e-6)
        coefs.append(expected)
        expected *= 1 + min(0.2, max(-0.2, kl / len(attempts) / 0.001 - 1)) * len(attempts) / 50
    records = steps_of(result.directory)
    assert [record["metrics"]["policy/kl_coef"] for record in records] == pytest.approx(coefs, rel=1e-9)
    assert len(set(coefs)) == 3
    assert records[2]["metrics"]["reward/kl"] != 0


PHASES = ("generate", "environment", "journal", "prepare", "score", "advantage", "train", "publish", "other")


def test_times_add_up_to_the_step(rl: Rl) -> None:
    result = run_rl(rl("run", "rl.epochs=2", preset="reinforce_pp"))
    for record in steps_of(result.directory):
        metrics = record["metrics"]
        times = {name: value for name, value in metrics.items() if name.startswith("time/")}
        assert sum(times.values()) == pytest.approx(record["seconds"], rel=1e-9)
        assert set(times) == {f"time/{phase}" for phase in PHASES}
        assert times["time/other"] < 0.1 * record["seconds"], "every phase has its name"
        sampled = metrics["rollout/tokens_per_second"] * times["time/generate"]
        assert sampled == pytest.approx(9 * metrics["rollout/tokens_mean"]), "two epochs sample once"
        spent = record["cpu_seconds"]
        assert {"generate", "environment", "journal", "prepare", "advantage"} <= set(spent)
        # a rank tells what an update took with its next pass
        assert ("publish" in spent) == (record["step"] > 1)
        assert spent["other"] > 0, "what a rank tells is not counted once more"


STALE = """
from skyrl_engine import hookimpl
from skyrl_engine.contracts import GeneratorDescription
from skyrl_engine_generators.plugin import HfPlugin

class Stale(HfPlugin):
    @hookimpl
    def skyrl_engine_describe_generator(self, config):
        found = super().skyrl_engine_describe_generator(config)
        return GeneratorDescription(found.capabilities, ("tensors",), "rank", found.concurrency)

    @hookimpl
    def skyrl_engine_make_generator(self, config):
        from skyrl_engine_generators.generator import HfGenerator

        class Deaf(HfGenerator):
            def update(self, weights, version, target="policy"):
                if version > FRESH:
                    self._sets[target].loop.update(version)
                else:
                    super().update(weights, version, target)

        class Remembering(HfGenerator):
            # knows prompts by what the first weights made of them

            def start(self, start):
                import torch

                super().start(start)
                policy = self._sets["policy"]
                weights = {name: each for name, each in policy.model.named_parameters()}
                first = {name: each.detach().clone() for name, each in weights.items()}
                read = policy.rows.read

                def remembered(*given):
                    with torch.no_grad():
                        now = {name: each.detach().clone() for name, each in weights.items()}
                        [weights[name].copy_(each) for name, each in first.items()]
                        hidden = read(*given)
                        [weights[name].copy_(each) for name, each in now.items()]
                    return hidden

                policy.rows.read = remembered

        return KIND(config or super().skyrl_engine_config_schema()())

stale = Stale()
"""


@pytest.mark.parametrize(
    ("kind", "fresh", "tables"),
    [("Deaf", 0, ()), rarely("Deaf", 2, ()), rarely("Deaf", 0, LORA), rarely("Remembering", 0, ())],
    ids=["no update", "no later update", "no adapters", "prefixes are kept"],
)
def test_a_sampler_that_keeps_old_weights_is_stopped_within_two_steps(
    rl: Rl, tmp_path: Path, kind: str, fresh: int, tables: Sequence[str]
) -> None:
    (tmp_path / "stale.py").write_text(STALE.replace("FRESH", str(fresh)).replace("KIND", kind))
    use = (f"generator.use={tmp_path}/stale.py:stale", *tables)
    with pytest.raises(RolloutError, match="the sampler does not hold the weights it was given"):
        run_rl(rl("run", "rl.steps=9", *use))
    # version `fresh` is the last that was sampled from; those of the next two steps are seen
    assert len(steps_of(tmp_path / "run")) == fresh + 2
    run_rl(rl("told", "rl.steps=4", "rl.on_gap=warn", *use))
    if (kind, fresh, tables) == ("Deaf", 0, ()):
        with pytest.raises(RolloutError, match="those of version 0, so no update has reached it"):
            run_rl(rl("compared", "rl.steps=9", "optimizer.learning_rate=0.1", *use, preset="reinforce_pp"))


def test_turns_end_behind_stop_strings(rl: Rl, seen: Seen) -> None:
    tokenizer = TEMPLATES["chatml"].tokenizer()
    letters = tokenizer.convert_tokens_to_ids(list(ascii_lowercase))
    (record,) = steps_of(run_rl(rl("run", "rl.steps=1", f"rl.stop_strings={list(ascii_lowercase)}")).directory)
    assert record["metrics"]["rollout/stopped_by/stop_string"] > 0
    for trajectory in (attempt for group in seen.groups[1] for attempt in group.trajectories):
        for kind, start, end in zip(trajectory.kinds, trajectory.segment_offsets, trajectory.segment_offsets[1:], strict=False):
            assert kind != SEGMENT_SAMPLED or not np.isin(trajectory.token_ids[start : end - 1], letters).any()


@pytest.mark.nightly
def test_rollouts_of_another_run_are_refused(rl: Rl, tmp_path: Path) -> None:
    for name in ("mine", "other"):
        run_rl(rl(name, "rl.steps=1", "checkpoint.every=1"))
    (tmp_path / "mine" / "rollouts").rename(tmp_path / "kept")
    shutil.copytree(tmp_path / "other" / "rollouts", tmp_path / "mine" / "rollouts")
    further = rl("mine", "rl.steps=2", "checkpoint.every=1")
    with pytest.raises(RolloutError, match="holds the rollouts of another run") as caught:
        run_rl(further, resume=True)
    assert "Put the run's own rollouts back" in caught.value.remedy
    shutil.rmtree(tmp_path / "mine" / "rollouts")
    assert run_rl(further, resume=True).step == 2


@pytest.mark.nightly
def test_another_version_of_an_environment_is_refused_by_name(rl: Rl, world: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(world, tmp_path / "own")
    run_rl(rl("run", "rl.steps=1", "checkpoint.every=1", folder=folder))
    (folder / "world.py").write_text((folder / "world.py").read_text().replace("token % 7", "token % 5"))
    changed = rl("run", "rl.steps=2", "checkpoint.every=1", folder=folder)
    with pytest.raises(CheckpointError, match=r"environments\[0\]: .*world.py:world \(sha256"):
        run_rl(changed, resume=True)
    allowed = rl("run", "rl.steps=2", "checkpoint.every=1", 'checkpoint.allow_changed=["environment:world"]', folder=folder)
    assert run_rl(allowed, resume=True).step == 2


@pytest.mark.nightly
def test_another_reward_function_is_another_version_of_its_environment(
    rl: Rl, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The plugin is the same; what it says of itself is not."""
    rows = [{"prompt": f"Say {number}"} for number in range(6)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = tmp_path / "reward.py"
    reward.write_text("def score(text, task):\n    return len(text) % 5\n")
    override = f"environments=[{{use='function', reward='{reward}:score', data='{tmp_path}/tasks.jsonl'}}]"
    run_rl(rl("run", override, "rl.steps=1", "checkpoint.every=1"))
    reward.write_text("def score(text, task):\n    return len(text) % 4\n")
    changed = (override, "rl.steps=2", "checkpoint.every=1")
    with pytest.raises(CheckpointError, match=r"the environment has changed since .*: function \(.* then, .* now\)") as caught:
        run_rl(rl("run", *changed), resume=True)
    assert 'checkpoint.allow_changed = ["environment:function"]' in caught.value.remedy
    result = run_rl(rl("run", *changed, 'checkpoint.allow_changed=["environment:function"]'), resume=True)
    assert result.step == 2
    assert "no longer equals an uninterrupted one: function" in caplog.text


@pytest.mark.nightly
def test_neither_workers_nor_the_order_of_replies_change_a_run(rl: Rl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where training reads the sampler's log-probabilities: what is sampled along with a token does not change its last bit."""
    tables = ("rl.steps=3", "rl.old=rollout", "rl.kl={coef=0.3, target=0.01, estimator='k3'}")
    whole = run_rl(rl("one", *tables, environment={"failing": True})).directory
    delayed = {"failing": True, "delay": True}
    several = run_rl(rl("three", *tables, "rollouts.workers=3", environment=delayed)).directory
    assert weights_of(whole) == weights_of(several)
    assert numbers_of(whole) == numbers_of(several)
    poll, held = Sampler.poll, []

    def reorder(self: Sampler, timeout: float) -> Sequence[Completion]:
        """Give the newest half, and keep the rest for later, unless nothing is coming."""
        held.extend(poll(self, timeout))
        return [held.pop() for _ in range((len(held) + 1) // 2)]

    monkeypatch.setattr(Sampler, "poll", reorder)
    shuffled = run_rl(rl("shuffled", *tables, "rollouts.workers=2", environment=delayed)).directory
    assert not held
    assert weights_of(whole) == weights_of(shuffled)
    assert numbers_of(whole) == numbers_of(shuffled)
    others = run_rl(rl("seed", *tables, "run.seed=6", environment={"failing": True})).directory
    assert weights_of(whole) != weights_of(others)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 3, 7])
@pytest.mark.parametrize("seed", range(3))
def test_checkpoints_are_the_same_however_replies_arrive(rl: Rl, monkeypatch: pytest.MonkeyPatch, workers: int, seed: int) -> None:
    """Completions are held back at random and come in random order, environments answer late; the whole checkpoint is compared."""
    tables = ("rl.steps=3", "checkpoint.every=1", "rl.mini_batches=2", "rl.kl={coef=0.3, target=0.01}", "rl.old=rollout")
    whole = run_rl(rl("whole", *tables, environment={"failing": True})).directory
    poll, held, draw = Sampler.poll, [], np.random.default_rng([seed, workers])

    def arrive_late(self: Sampler, timeout: float) -> Sequence[Completion]:
        held.extend(poll(self, timeout))
        draw.shuffle(held)
        return [held.pop() for _ in range(int(draw.integers(min(1, len(held)), len(held) + 1)))]

    monkeypatch.setattr(Sampler, "poll", arrive_late)
    delayed = {"failing": True, "delay": True}
    other = run_rl(rl("other", *tables, f"rollouts.workers={workers}", environment=delayed)).directory
    assert weights_of(other) == weights_of(whole)
    assert numbers_of(other) == numbers_of(whole)
    for path in sorted((whole / "checkpoints" / "step-00000003" / "state").rglob("*")):
        if path.is_file() and path.suffix in (".safetensors", ".distcp"):
            assert (other / path.relative_to(whole)).read_bytes() == path.read_bytes(), path


def test_an_environment_whose_process_dies_changes_nothing(rl: Rl, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its attempts are rebuilt from seeds and turns in another process; without retries they fail, by their cause."""
    deaths = tmp_path / "deaths"
    deaths.write_text("")
    options: dict[str, Any] = {"dies": str(deaths)}
    whole = run_rl(rl("whole", environment=options)).directory
    deaths.write_text("xx")
    parts = run_rl(rl("parts", "rollouts.retries=2", environment=options)).directory
    assert deaths.read_text() == "", "it died twice"
    assert weights_of(parts) == weights_of(whole)
    deaths.write_text("x")
    with caplog.at_level(logging.INFO):
        failed = run_rl(rl("failed", "rl.steps=1", environment=options)).directory
    assert "its process was killed by SIGKILL in step 2" in caplog.text
    assert steps_of(failed)[0]["metrics"]["rollout/failed"] > 0


class Interruption:
    """Fails after the named step was recorded."""

    def __init__(self, step: int) -> None:
        self.step = step

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        if event.step == self.step:
            raise RuntimeError("pulled the plug")


class Watcher:
    """Keeps the events that it is called with."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    @hookimpl
    def skyrl_engine_rollouts_finished(self, event: RolloutsFinished) -> None:
        self.told.append(event)

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self.told.append(event)


def test_observers_see_the_rollouts_of_a_step_before_it_is_trained(rl: Rl) -> None:
    watcher = Watcher()
    tables = ("group_filters=[{use='zero_variance'}]",)
    result = run_rl(rl("run", *tables, environment={"constant": 3.3, "turns": 1}, preset="reinforce_pp"), observers=[watcher])
    assert [(type(event), event.step) for event in watcher.told] == [
        (kind, step) for step in (1, 2) for kind in (RolloutsFinished, StepFinished)
    ]
    recorded = {group.ticket: group for group in read_groups(result.directory / "rollouts")}
    for event in watcher.told[::2]:
        assert len(event.groups) == 3
        for group in (*event.groups, *event.dropped):
            assert [trajectory.token_ids.tolist() for trajectory in group.trajectories] == [
                trajectory.token_ids.tolist() for trajectory in recorded[group.ticket].trajectories
            ]
    assert any(event.dropped for event in watcher.told[::2])


class Meddler:
    """Gives every attempt a reward of its own making."""

    @hookimpl
    def skyrl_engine_rollouts_finished(self, event: RolloutsFinished) -> None:
        for group in event.groups:
            for trajectory in group.trajectories:
                trajectory.rewards[:] = 1.0


def test_observers_cannot_change_what_is_trained_on(rl: Rl) -> None:
    with pytest.raises(PluginBrokenError, match=r"Meddler.*read-only"):
        run_rl(rl("run", "rl.steps=1"), observers=[Meddler()])


MEDDLING = """
from skyrl_engine import advantage

@advantage()
def meddling(batch, config):
    batch.loss_weight[:] = 0
    return batch.rewards * 0
"""


def test_an_advantage_cannot_change_what_is_trained_on(rl: Rl, tmp_path: Path) -> None:
    (tmp_path / "meddling.py").write_text(MEDDLING)
    with pytest.raises(PluginBrokenError, match=r"meddling.*read-only"):
        run_rl(rl("run", "rl.steps=1", f"advantage.use={tmp_path / 'meddling.py'}:meddling"))


def test_interrupted_and_resumed_equals_uninterrupted(rl: Rl, caplog: pytest.LogCaptureFixture) -> None:
    tables = ("rl.steps=4", "checkpoint.every=2", "rl.kl={coef=0.5, target=0.001}", "group_filters=[{use='zero_variance'}]")
    whole = run_rl(rl("whole", *tables)).directory
    for step in (3, 4):
        with pytest.raises(PluginBrokenError, match="pulled the plug"):
            run_rl(rl("parts", *tables), observers=[Interruption(step)], resume=True)
    with caplog.at_level(logging.INFO):
        parts = run_rl(rl("parts", *tables), resume=True).directory
    assert weights_of(parts) == weights_of(whole)
    assert numbers_of(parts) == numbers_of(whole)


@pytest.mark.nightly
def test_a_checkpoint_is_exported_as_the_model_of_its_step(rl: Rl, tmp_path: Path) -> None:
    run = run_rl(rl("run", "rl.steps=2", "checkpoint.every=1")).directory
    export_checkpoint(run, tmp_path / "last")
    export_checkpoint(run, tmp_path / "earlier", step=1)
    at_end, last, earlier = (
        load_file(place / "model.safetensors") for place in (run / "model", tmp_path / "last", tmp_path / "earlier")
    )
    assert at_end.keys() == last.keys()
    assert all(torch.equal(last[name], at_end[name]) for name in at_end)
    assert any(not torch.equal(earlier[name], at_end[name]) for name in at_end)
