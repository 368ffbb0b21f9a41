"""Attempts that are worth nothing are computed without gradients: the same weights, metrics and records, in fewer passes with gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import frozen
from by_day import now, rarely
from rl_runs import WORLD, Rl, Seen, numbers_of, weights_of
from safetensors.numpy import load_file

from skyrl_engine.engine.passes import Passes
from skyrl_engine.engine.plan import Plan
from skyrl_engine.rollout.journal_index import read_index
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.training.rl.trainer import RlTrainer
from skyrl_engine.workers.worker import Pass

EXACT = ("model.dtype=float64", "optimizer.use=sgd", "optimizer.learning_rate=0.1", "rl.steps=1", "rl.groups=6")
VARIANTS = {
    "one optimizer step": ("rl.micro_batch_rows=4",),
    "several": ("rl.micro_batch_tokens=256", "rl.mini_batches=2", "rl.epochs=2"),
    "attempts without loss": ("rl.truncated=mask", "rl.max_tokens=12", "collator.use=packed", "rl.micro_batch_tokens=128"),
    "the sampler's own old ones": ("rl.old=rollout", "rl.mini_batches=3"),
}


@frozen
class Done:
    """A run that ended: its folder, and the passes that trained."""

    directory: Path
    passes: list[Pass]


@pytest.fixture
def finish(rl: Rl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run in a world in which every attempt at an even task has the same reward."""
    condition = "if self.options.constant is not None"
    (tmp_path / "half.py").write_text(WORLD.replace(condition, f"{condition} and int(self.task.key) % 2 == 0"))
    passes: list[Pass] = []
    run = Passes.run

    def note(self: Passes, work: Pass, placed: Any) -> Any:
        passes.append(work)
        return run(self, work, placed)

    monkeypatch.setattr(Passes, "run", note)

    def run_to_end(name: str, *overrides: str, preset: str = "grpo") -> Done:
        passes.clear()
        world = f'environments=[{{use="{tmp_path}/half.py:world", constant=1.5, turns=1}}]'
        directory = run_rl(rl(name, world, *overrides, preset=preset)).directory
        return Done(directory, [work for work in passes if work.mode != "score"])

    return run_to_end


@pytest.mark.parametrize("variant", now(VARIANTS, "several"))
def test_a_run_is_the_same(finish: Callable[..., Done], variant: str) -> None:
    plain = finish("plain", *EXACT, *VARIANTS[variant], "rl.skip_zero_gradients=false")
    skipping = finish("skipping", *EXACT, *VARIANTS[variant])
    assert {work.mode for work in plain.passes} == {"forward_backward"}
    assert [work.mode for work in skipping.passes].count("evaluate") > 0, "tied groups have passes without gradients"
    one, other = (load_file(done.directory / "model" / "model.safetensors") for done in (plain, skipping))
    assert all(np.abs(value - other[name]).max() < 1e-12 for name, value in one.items())
    (before,), (after,) = numbers_of(plain.directory), numbers_of(skipping.directory)
    assert 0 < before["rollout/zero_variance"] < 1
    assert before["grad_norm"] > 0
    assert before.keys() == after.keys()
    drop_shape(before), drop_shape(after)
    assert after == pytest.approx(before, rel=1e-6, abs=1e-9)
    require_same_records(plain.directory, skipping.directory)


def drop_shape(numbers: dict[str, Any]) -> None:
    """Drop what the cut into micro-batches decides."""
    del numbers["padding_share"]
    numbers.pop("shared_share", None)


def require_same_records(one: Path, other: Path) -> None:
    """The journal holds what was learned of every attempt, tied ones too."""
    learned = [sorted(read_index(folder / "rollouts").learned[1].read_learned(), key=_place) for folder in (one, other)]
    assert [_place(each) for each in learned[0]] == [_place(each) for each in learned[1]]
    assert any(not each.advantages.any() for each in learned[0])
    for before, after in zip(*learned, strict=True):
        assert before.advantages.tobytes() == after.advantages.tobytes()
        assert after.trained_logprobs.all(), "log-probabilities of every token"
        np.testing.assert_allclose(after.trained_logprobs, before.trained_logprobs, rtol=1e-6)


def _place(learned: Any) -> tuple[int, int]:
    return learned.ticket, learned.member


def test_steps_in_which_all_are_tied_leave_the_bytes_that_they_left(finish: Callable[..., Done], rl: Rl) -> None:
    """Weights move by decay alone."""
    overrides = (
        "environments.0.constant=1.5",
        "environments.0.turns=1",
        "rl.max_tokens=60",
        "optimizer.weight_decay=0.1",
        "rl.steps=2",
    )
    runs = [run_rl(rl(str(skip), *overrides, f"rl.skip_zero_gradients={str(skip).lower()}")).directory for skip in (False, True)]
    assert weights_of(runs[0]) == weights_of(runs[1])
    for before, after in zip(*map(numbers_of, runs), strict=True):
        assert before["grad_norm"] == after["grad_norm"] == 0
        drop_shape(before), drop_shape(after)
        assert after == pytest.approx(before, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("grpo", ("rl.kl.coef=0.1",)),
        rarely("grpo", ('loss.terms=[{use="kl", coef=0.1}]',)),
        rarely("grpo", ('loss.corrections=[{use="tis"}]',)),
        rarely("ppo", ("rl.mini_batches=1",)),
    ],
    ids=["a penalty in the reward", "a term", "a correction", "a critic"],
)
def test_whatever_else_reads_an_attempt_keeps_it(
    finish: Callable[..., Done], seen: Seen, preset: str, overrides: tuple[str, ...]
) -> None:
    plans: list[Plan] = []
    seen.also = lambda _trainer, plan, _number: plans.append(plan)
    done = finish("run", "rl.steps=1", *overrides, preset=preset)
    assert [plan.shares for plan in plans] == [None]
    assert {work.mode for work in done.passes} == {"forward_backward"}


def test_the_first_ratio_stays_exactly_one(finish: Callable[..., Done]) -> None:
    """Advantages come before the plan, and the score of the old policy is of the rows that are trained on."""
    done = finish("run", "rl.steps=1", "rl.groups=6", "rl.old=score", "rl.micro_batch_rows=4")
    assert "evaluate" in {work.mode for work in done.passes}
    (numbers,) = numbers_of(done.directory)
    assert numbers["policy/ratio_mean"] == numbers["policy/ratio_max"] == 1.0


@pytest.mark.nightly
def test_advantages_that_need_scores_come_after_them(
    finish: Callable[..., Done], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for name in ("_score", "_advantages"):
        method = getattr(RlTrainer, name)
        monkeypatch.setattr(
            RlTrainer, name, lambda self, given, name=name, method=method: order.append(name) or method(self, given)
        )
    finish("needing", "rl.steps=1", "rl.mini_batches=1", preset="ppo")
    assert order == ["_score", "_advantages"]
    order.clear()
    finish("rewards", "rl.steps=1", preset="grpo")
    assert order == ["_advantages", "_score"]
