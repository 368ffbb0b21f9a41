"""Each loss against an independent oracle: values, gradients, dtypes, and what it declares about itself."""

import math
import random

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from loss_oracles import CASES, COLUMNS, SCORES, Batch, Case, random_batch

from skyrl_engine.contracts import ENGINE_METRICS
from skyrl_engine_losses import plugin
from skyrl_engine_losses.clipping import ClipConfig
from skyrl_engine_losses.covariance import ClipCovConfig

each_case = pytest.mark.parametrize("case", CASES, ids=str)
FIRST = {case.name: case for case in reversed(CASES)}.values()
each_loss = pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    count = sum(lengths)

    def column(low: float, high: float) -> list[float]:
        numbers = st.floats(low, high).map(
            lambda number: number if abs(number) > 1e-150 else 0.0
        )  # products of tiny ones lose digits
        return draw(st.lists(numbers, min_size=count, max_size=count))

    logprobs = [column(-12.0, 0.0) for _ in range(4)]
    return Batch(
        lengths,
        logprobs[0],
        column(0.0, 12.0),
        column(-5.0, 5.0),
        *logprobs[1:],
        draw(st.lists(st.integers(-3072, 3072).map(lambda steps: steps / 1024), min_size=count, max_size=count)),
        column(-5.0, 5.0),
        column(-5.0, 5.0),
        column(-5.0, 20.0),
        column(-12.0, 0.0),
    )


def test_every_loss_has_an_oracle() -> None:
    """Those of preferences, reward models and distillation have theirs in files of their own."""
    elsewhere = {
        "bradley_terry",
        "step_cross_entropy",
        "cpo",
        "divergence",
        "dpo",
        "gold",
        "kto",
        "orpo",
        "simpo",
        "teacher_kl",
        "top_k_divergence",
        "uld",
    }
    assert {case.name for case in CASES} | elsewhere == {
        name for name in plugin.__all__ if hasattr(getattr(plugin, name), "skyrl_engine_make_loss")
    }


@each_case
@pytest.mark.parametrize("seed", range(3))
def test_values_are_the_formulas(case: Case, seed: int) -> None:
    """Both sides compute in float64; 1e-11 leaves room for another order of summation and torch's own exp."""
    batch = random_batch(seed)
    output, _ = case.run(batch)
    assert output.token_loss.dtype == torch.float64
    assert output.token_loss.tolist() == pytest.approx(case.expected(batch), rel=1e-11, abs=1e-12)


DEFINITE = [case for case in CASES if getattr(case.config, "fraction", 1.0) == 1.0]
"""Not the ones that order tokens by covariance: of nearly equal tokens, another order of summation prefers another one."""


@pytest.mark.parametrize("case", DEFINITE, ids=str)
@given(batch=batches())
def test_values_are_the_formulas_wherever_hypothesis_looks(case: Case, batch: Batch) -> None:
    output, _ = case.run(batch)
    assert output.token_loss.tolist() == pytest.approx(case.expected(batch), rel=1e-9, abs=1e-9)


@each_case
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_finite_differences_of_the_formulas(case: Case, seed: int) -> None:
    """In float64, through clamps and past stop-gradients, with another weight for each token as a reducer would have.

    Kinks are not covered: random tokens lie on none. 1e-6 relative is what central differences with a step of 1e-6 give.
    """
    batch = random_batch(seed)
    draw = random.Random(seed + 100)
    weights = [draw.uniform(0.1, 1.0) for _ in range(len(batch))]
    output, tokens = case.run(batch)
    (torch.tensor(weights, dtype=torch.float64) * output.token_loss).sum().backward()
    scores = set(case.loss.needs) & set(SCORES)
    assert scores
    for score in scores:
        gradient = tokens.needs[score].grad
        assert gradient is not None
        assert gradient.tolist() == pytest.approx(case.expected_gradient(batch, score, weights), rel=1e-6, abs=1e-8)


@each_case
def test_float32_stays_float32(case: Case) -> None:
    """Against the float64 oracle; 1e-5 of the value is a few dozen roundings, 1e-6 absolute what remains where values cancel."""
    batch = random_batch(11)
    output, _ = case.run(batch, torch.float32)
    assert output.token_loss.dtype == torch.float32
    assert output.token_loss.tolist() == pytest.approx(case.expected(batch), rel=1e-5, abs=2e-6)


@each_case
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_token_gives_no_value(case: Case, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    output, tokens = case.run(random_batch(0, lengths), dtype)
    assert output.token_loss.shape == (0,)
    assert output.token_loss.dtype == dtype
    assert all(metric.count == 0 for metric in output.metrics.values())
    output.token_loss.sum().backward()
    assert all(tokens.needs[score].grad is not None for score in set(case.loss.needs) & set(SCORES))


@each_case
def test_one_token(case: Case) -> None:
    batch = random_batch(5, (1,))
    output, _ = case.run(batch)
    assert output.token_loss.tolist() == pytest.approx(case.expected(batch), rel=1e-11, abs=1e-12)


@each_case
def test_without_advantage_there_is_nothing_to_gain(case: Case) -> None:
    """All A = 0: a loss that is homogeneous in A is exactly 0, and so is its gradient; every other one follows its oracle."""
    batch = random_batch(6)
    batch = evolve(batch, advantages=[0.0] * len(batch), frozen=batch.frozen)
    output, tokens = case.run(batch)
    if case.loss.homogeneous:
        output.token_loss.sum().backward()
        gradient = tokens.logprobs.grad
        assert gradient is not None
        assert not output.token_loss.any()
        assert not gradient.any()
    elif case.name != "kl_cov":  # the oracle ranks covariances that are all 0 up to rounding
        assert output.token_loss.tolist() == pytest.approx(case.expected(batch), rel=1e-11, abs=1e-12)


@each_case
@pytest.mark.parametrize("lengths", [(1,) * 12, (12,), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ratios_of_a_thousand_nats_stay_finite(case: Case, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every combination of log p - log q in -1000, 0, 1000 with every sign of the advantage; nothing is infinite or NaN."""
    advantages = [1.0, -1.0, 0.0, 2.5] * 3
    logprobs = [-1000.0] * 4 + [0.0] * 4 + [-1.0] * 4
    logprobs_now = [0.0] * 4 + [-1000.0] * 4 + [-1.0] * 4
    big = [1000.0] * 4 + [0.0] * 4 + [-1000.0] * 4
    batch = Batch(
        lengths,
        logprobs,
        [0.0] * 12,
        big,
        *[logprobs_now] * 3,
        advantages,
        [1.0] * 12,
        [0.0] * 12,
        big,
        logprobs,
    )
    output, tokens = case.run(batch, dtype)
    assert output.token_loss.isfinite().all()
    output.token_loss.sum().backward()
    for score in set(case.loss.needs) & set(SCORES):
        gradient = tokens.needs[score].grad
        assert gradient is not None
        assert gradient.isfinite().all()


@each_case
def test_columns_carry_no_gradient_into_the_loss_that_scores_do_not(case: Case) -> None:
    """A loss reads exactly what it declares: it runs with nothing else, and each declared need changes it."""
    batch = random_batch(3)
    reference, _ = case.run(batch)
    draw = random.Random(1)
    for need in case.loss.needs:
        assert need in (*SCORES, *COLUMNS)
        moved = [value + draw.uniform(-0.8, -0.4) for value in getattr(batch, need)]
        changed = evolve(batch, **{need: moved}, frozen=moved if need == "logprobs" else batch.frozen)
        assert not torch.equal(case.run(changed)[0].token_loss, reference.token_loss), f"{need} is declared and not used"


@pytest.mark.parametrize("case", [case for case in FIRST if case.loss.homogeneous], ids=lambda case: case.name)
@given(batch=batches(), factor=st.sampled_from([0.125, 0.5, 2.0, 64.0]))
def test_losses_that_say_so_are_homogeneous_in_the_advantage(case: Case, batch: Batch, factor: float) -> None:
    """A times c > 0 gives the loss times c. Powers of two change no digit of numbers that are not tiny, so this is equality."""
    scaled = evolve(batch, advantages=[factor * advantage for advantage in batch.advantages], frozen=batch.frozen)
    assert torch.equal(case.run(scaled)[0].token_loss, factor * case.run(batch)[0].token_loss)


@pytest.mark.parametrize("case", [case for case in FIRST if not case.loss.homogeneous], ids=lambda case: case.name)
def test_losses_that_do_not_say_so_are_not_homogeneous(case: Case) -> None:
    batch = random_batch(2)
    scaled = evolve(batch, advantages=[64.0 * advantage for advantage in batch.advantages], frozen=batch.frozen)
    assert not torch.allclose(case.run(scaled)[0].token_loss, 64.0 * case.run(batch)[0].token_loss)


@each_loss
def test_losses_depend_on_the_cut_exactly_where_they_say_so(case: Case) -> None:
    """Sequences alone or together: the same values, except for those that compare tokens over the micro-batch."""
    batch = random_batch(4, (4, 3, 5))
    together, _ = case.run(batch)
    alone = []
    for start, length in ((0, 4), (4, 3), (7, 5)):
        part = {name: list(getattr(batch, name))[start : start + length] for name in (*SCORES, *COLUMNS)}
        alone.append(case.run(Batch(lengths=(length,), **part))[0].token_loss)
    same = torch.allclose(torch.cat(alone), together.token_loss, rtol=1e-12, atol=0)
    assert same is not case.loss.batch_local


@each_case
def test_no_global_random_number_is_drawn(case: Case) -> None:
    before, plain = torch.get_rng_state(), random.getstate()
    case.run(random_batch(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == plain


@each_case
def test_metrics_are_means_over_tokens_with_names_of_their_own(case: Case) -> None:
    batch = random_batch(7)
    output, _ = case.run(batch)
    assert not set(output.metrics) & ENGINE_METRICS
    for metric in output.metrics.values():
        assert metric.reduction == "mean"
        assert metric.count == len(batch)


def test_clip_fraction_and_approximate_kl_are_what_they_say() -> None:
    """Ratios 1.5, 1.5, 0.5, 0.5, 1 with A = 1, -1, 1, -1, 1: of these, the first and the fourth gain nothing more; four lie outside."""
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 1.0], [1.0, -1.0, 1.0, -1.0, 1.0]
    lp = [math.log(r) - 2.0 for r in ratios]
    batch = evolve(
        random_batch(0, (5,)), logprobs=lp, old_logprobs=[-2.0] * 5, rollout_logprobs=[-2.0] * 5, advantages=advantages, frozen=lp
    )
    expected_kl = sum(r - 1 - math.log(r) for r in ratios) / 5
    expected = {"ppo": 2 / 5, "ppo_dual_clip": 2 / 5, "cispo": 0.0, "rollout_is": 4 / 5, "clip_cov": 2 / 5}
    for case in CASES:
        if case.name in expected and case.config in (type(case.config)(), ClipConfig()):
            metrics = case.run(batch)[0].metrics
            assert metrics["clip_fraction"].result == pytest.approx(expected[case.name]), case
            assert metrics["approximate_kl"].result == pytest.approx(expected_kl, rel=1e-12), case
    silent = Case("clip_cov", ClipCovConfig(lower=50.0, upper=51.0), CASES[0].oracle)
    assert silent.run(batch)[0].metrics["covariance_clip_fraction"].result == 0.0
