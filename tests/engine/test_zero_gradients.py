"""Samples whose gradient is known to be 0 get none: the same steps, metrics and outputs, and fewer passes with gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from by_day import now

from skyrl_engine import Engine
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.engine.passes import Passes
from skyrl_engine.engine.plan import Plan, Shares
from skyrl_engine.engine.results import PassResult
from skyrl_engine.engine.zero_gradients import Work, find_work
from skyrl_engine.proof.rollouts import make_rollouts
from skyrl_engine.workers.worker import Pass

TIED = (1, 3)
"""Groups of four whose advantages are all 0; sample 5, in the first of them, has no response, and sample 9 no token that carries loss."""

SGD = {"use": "sgd", "learning_rate": 1.0, "max_grad_norm": None}
"""Steps by the gradient itself: weights differ as gradients do."""

Open = Callable[..., Engine]


@pytest.fixture
def opened(model: Path) -> Iterator[Open]:
    """`opened(table={...})`: an engine in float64 with PPO's loss and some tables changed."""
    with ExitStack() as stack:

        def open_engine(**tables: Any) -> Engine:
            base: dict[str, Any] = {
                "model": {"path": str(model), "dtype": "float64"},
                "loss": {"use": "ppo"},
                "optimizer": SGD,
                "training": {"micro_batch_rows": 3},
                "run": {"device": "cpu"},
            }
            return stack.enter_context(Engine.open({**base, **tables}))

        yield open_engine


def columns_with_ties(groups: Sequence[int] = TIED) -> SampleColumns:
    columns = make_rollouts(("old_logprobs", "rollout_logprobs", "advantages"))
    advantages = columns.columns["advantages"].copy()
    for sample in np.flatnonzero(np.isin(columns.group_ids, groups)):
        advantages[columns.action_offsets[sample] : columns.action_offsets[sample + 1]] = 0
    return columns.with_columns({"advantages": advantages})


def train(engine: Engine, columns: SampleColumns, *, skip: bool, size: int | None, epochs: int = 2) -> list[PassResult]:
    """Take the steps of two epochs, the second in another order of the groups."""
    results = []
    for epoch in range(epochs):
        order = np.argsort(-columns.group_ids, kind="stable") if epoch else np.arange(len(columns))
        plan = engine.plan(columns.take(order), mini_batch_size=size, skip_zero_gradients=skip)
        results.append(engine.train(plan, watch={"policy", "entropy"}))
    return results


def largest_distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(value - other[name]).max()) for name, value in one.items())


def require_same_results(one: PassResult, other: PassResult) -> None:
    """All metrics, and the outputs of every sample, within the rounding of other rows; padding alone differs."""
    assert one.metrics.keys() == other.metrics.keys()
    for name, metric in one.metrics.items():
        if name != "padding_share":
            assert metric.result == pytest.approx(other.metrics[name].result, rel=1e-9, abs=1e-12), name
            assert metric.count == pytest.approx(other.metrics[name].count), f"{name} is about other tokens"
    assert one.output.sample_ids.tolist() == other.output.sample_ids.tolist()
    assert one.output.action_lengths.tolist() == other.output.action_lengths.tolist()
    assert one.output.fields.keys() == other.output.fields.keys()
    for name, field in one.output.fields.items():
        assert field.offsets.tolist() == other.output.fields[name].offsets.tolist()
        np.testing.assert_allclose(field.values, other.output.fields[name].values, rtol=1e-6, atol=1e-9)


LAYOUTS = {
    "rows": {"training": {"micro_batch_rows": 3}},
    "tokens": {"training": {"micro_batch_tokens": 90}},
    "whole": {"training": {}},
    "packed": {"training": {"micro_batch_tokens": 90}, "collator": {"use": "packed"}},
}
REDUCERS = [*((name, "token_mean") for name in LAYOUTS), ("rows", "sequence_mean")]
CASES = [(ranks, *named, size) for ranks in (1, 2) for named in REDUCERS for size in (None, 8, 4)]
BY_DAY = [
    (1, "rows", "token_mean", 8),
    (1, "tokens", "token_mean", None),
    (1, "whole", "token_mean", 4),
    (1, "packed", "token_mean", 8),
    (1, "rows", "sequence_mean", 4),
    (2, "rows", "token_mean", 4),
    (2, "packed", "token_mean", 8),
]


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(("ranks", "layout", "reducer", "size"), now(CASES, *BY_DAY))
def test_steps_metrics_and_outputs_are_the_same(opened: Open, ranks: int, layout: str, reducer: str, size: int | None) -> None:
    """Over several mini-batches and epochs; mini-batches of 4 are groups, two of them without any gradient."""
    run = {"device": "cpu", "ranks": ranks, "launch": "inline" if ranks == 1 else "ray"}
    weights, results = [], []
    for skip in (False, True):
        engine = opened(**LAYOUTS[layout], run=run, reducer={"use": reducer})
        start = engine.weights()
        results.append(train(engine, columns_with_ties(), skip=skip, size=size))
        weights.append(engine.weights())
    assert largest_distance(start, weights[0]) > 1e-3, "something is learned"
    assert largest_distance(*weights) < 1e-12
    for one, other in zip(*results, strict=True):
        require_same_results(one, other)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    passes: list[Pass] = []
    run = Passes.run

    def note(self: Passes, work: Pass, placed: Any) -> Any:
        passes.append(work)
        return run(self, work, placed)

    monkeypatch.setattr(Passes, "run", note)
    return passes


def test_no_gradient_is_computed_of_what_has_none(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, columns = opened(), columns_with_ties()
    plan = engine.plan(columns, skip_zero_gradients=True)
    assert plan.shares is not None
    (shares,) = plan.shares
    (rank,) = plan.cut.mini_batches[0].ranks
    learned, scored, nothing = (
        sorted(int(sample) for micro_batch in part for sample in micro_batch.samples)
        for part in (rank[: shares.learned], rank[shares.learned :][: shares.scored], rank[shares.learned + shares.scored :])
    )
    assert learned == [0, 1, 2, 3, 8, 10, 11]
    assert scored == [4, 6, 7, 12, 13, 14, 15]
    assert nothing == [5, 9] == sorted(plan.without_work(0).tolist())
    passes = recorded(monkeypatch)
    engine.train(plan)
    assert [(work.mode, work.micro_batches) for work in passes] == [("evaluate", (3, 6)), ("forward_backward", (0, 3))]


def test_every_pass_over_the_plan_sees_every_sample(opened: Open) -> None:
    """Scores before the step are of the rows that are learned from, so that the first ratio is exactly 1."""
    engine, columns = opened(), columns_with_ties()
    plan = engine.plan(columns, skip_zero_gradients=True)
    old = engine.score(plan).result()
    assert old.sample_ids.tolist() == columns.sample_ids.tolist()
    result = engine.train(plan.with_columns({"old_logprobs": old.on_actions("logprobs")}), watch={"policy"})
    assert result.metrics["policy/ratio_max"].result == pytest.approx(1.0, abs=1e-6), "old ones are float32"
    plain = engine.evaluate(engine.plan(columns)).result()
    apart = engine.evaluate(engine.plan(columns, skip_zero_gradients=True)).result()
    assert apart.metrics["loss"].result == pytest.approx(plain.metrics["loss"].result, rel=1e-12)
    engine.forward_backward(plan).result()
    engine.optim_step().result()


def test_ratios_of_the_first_step_are_exactly_one_in_float32(opened: Open, model: Path) -> None:
    engine = opened(model={"path": str(model), "dtype": "float32"})
    plan = engine.plan(columns_with_ties(), skip_zero_gradients=True)
    old = engine.score(plan).result()
    result = engine.train(plan.with_columns({"old_logprobs": old.on_actions("logprobs")}), watch={"policy"})
    assert result.metrics["policy/ratio_mean"].result == result.metrics["policy/ratio_max"].result == 1.0


def test_nothing_changes_by_a_byte_where_nothing_is_left_out(opened: Open) -> None:
    columns = columns_with_ties(()).take([0, 1, 2, 3, 4, 6, 7, 8])
    weights = []
    for skip in (False, True):
        engine = opened()
        plan = engine.plan(columns, skip_zero_gradients=skip)
        assert plan.shares is None
        engine.train(plan)
        weights.append(engine.weights())
    assert all(value.tobytes() == weights[1][name].tobytes() for name, value in weights[0].items())


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_without_any_gradient_moves_weights_by_momentum_and_decay_as_ever(opened: Open, ranks: int) -> None:
    run = {"device": "cpu", "ranks": ranks, "launch": "inline" if ranks == 1 else "ray"}
    adamw = {"learning_rate": 1e-2, "weight_decay": 0.1}
    tied = columns_with_ties((0, 1, 2, 3))
    weights = []
    for skip in (False, True):
        engine = opened(optimizer=adamw, run=run)
        engine.train(engine.plan(columns_with_ties(())))
        before = engine.weights()
        plan = engine.plan(tied, mini_batch_size=8, skip_zero_gradients=skip)
        result = engine.train(plan)
        assert result.metrics["grad_norm"].result == 0
        assert engine.step == 3
        weights.append(engine.weights())
    assert plan.shares is not None
    assert [shares.learned for shares in plan.shares] == [1, 1], "the smallest sample of each mini-batch"
    assert largest_distance(before, weights[0]) > 1e-4, "momentum and decay"
    assert all(value.tobytes() == weights[1][name].tobytes() for name, value in weights[0].items())


@pytest.mark.parametrize(
    "tables",
    [
        {"loss": {"use": "ppo", "terms": [{"use": "kl", "coef": 0.1}]}},
        {"loss": {"use": "ppo", "terms": [{"use": "entropy", "coef": 0.1}]}},
        {"loss": {"use": "dro"}},
        {"loss": {"use": "cross_entropy"}},
    ],
    ids=["kl", "entropy", "dro", "cross_entropy"],
)
def test_what_reads_a_tied_attempt_keeps_it(opened: Open, tables: dict[str, Any]) -> None:
    """Samples without a token that carries loss are left out all the same."""
    work = find_work(columns_with_ties(), opened(**tables).assembly)
    assert np.flatnonzero(work).tolist() == [5, 9]


@pytest.mark.parametrize(
    "tables",
    [
        {"loss": {"use": "ppo", "corrections": [{"use": "tis"}]}},
        {"loss": {"use": "ppo"}, "reducer": {"use": "token_mean_legacy"}},
        {"loss": {"use": "dpo"}, "reducer": {"use": "sequence_mean"}},
        {"loss": {"use": "clip_cov"}},
    ],
    ids=["correction", "reducer of the cut", "pairs", "loss of the cut"],
)
def test_nothing_is_left_out_where_samples_may_not_stand_alone(opened: Open, tables: dict[str, Any]) -> None:
    assert not find_work(columns_with_ties(), opened(**tables).assembly).any()


def test_terms_of_the_backend_over_a_step_and_dropout_keep_everything(opened: Open, model: Path) -> None:
    engine, columns = opened(), columns_with_ties()
    assembly = evolve(engine.assembly, description=evolve(engine.assembly.description, means_over_step=True))
    assert not find_work(columns, assembly).any()
    lora = {"rank": 2, "dropout": 0.5}
    dropping = opened(model={"path": str(model), "lora": lora})
    assert find_work(columns, dropping.assembly).any()
    assert dropping.plan(columns, skip_zero_gradients=True).shares is None


def test_attempts_and_units_count_as_a_whole(opened: Open) -> None:
    columns = columns_with_ties()
    attempts = columns.trajectory_ids.copy()
    attempts[[4, 8]] = 100
    units = columns.unit_ids.copy()
    units[[9, 10]] = 200
    work = find_work(evolve(columns, trajectory_ids=attempts, unit_ids=units), opened().assembly)
    assert (work[4], work[8], work[9], work[10]) == (Work.GRADIENT,) * 4
    assert work[6] == Work.SCORES


def test_one_advantage_or_one_that_is_no_number_keeps_an_attempt(opened: Open) -> None:
    columns = columns_with_ties()
    first = (
        np.flatnonzero(columns.loss_weight[columns.action_offsets[6] : columns.action_offsets[7]])[0] + columns.action_offsets[6]
    )
    for value in (1e-30, np.nan):
        advantages = columns.columns["advantages"].copy()
        advantages[first] = value
        work = find_work(columns.with_columns({"advantages": advantages}), opened().assembly)
        assert (work[6], work[7]) == (Work.GRADIENT, Work.SCORES)


def test_an_advantage_without_loss_keeps_nothing(opened: Open) -> None:
    columns = columns_with_ties()
    own = np.arange(columns.action_offsets[12], columns.action_offsets[16])
    masked = own[columns.loss_weight[own] == 0]
    assert len(masked)
    advantages = columns.columns["advantages"].copy()
    advantages[masked] = 1.0
    work = find_work(columns.with_columns({"advantages": advantages}), opened().assembly)
    assert work[12:].tolist() == [Work.SCORES] * 4


def test_shares_are_of_every_mini_batch(opened: Open) -> None:
    plan: Plan = opened().plan(columns_with_ties((1,)), mini_batch_size=4, skip_zero_gradients=True)
    assert plan.shares == (Shares(2, 0), Shares(1, 1), Shares(1, 0), Shares(2, 0))
    assert plan.cut.layout == Layout(mini_batch_size=4, micro_batch_rows=3)
    assert [len(plan.without_work(number)) for number in range(4)] == [0, 0, 1, 0], "the smallest is sample 5"
