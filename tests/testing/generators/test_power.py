"""The power and the false alarms of the kit's statistical tests of generators, measured on the distributions of the kit's own model."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from attrs import evolve
from by_day import now

from skyrl_engine.contracts.kinds.generator import Sampling
from skyrl_engine.testing.generators import distribution_promises as promises
from skyrl_engine.testing.generators import filter_promises as cuts
from skyrl_engine.testing.generators.bench import TinyWeights, requests_of
from skyrl_engine.testing.generators.power import (
    FACTORS,
    FALSE_ALARM,
    MISS,
    ODDS,
    ChiSquare,
    Repeats,
    Temperatures,
    cells_of,
    distance_from_uniform,
    distance_shown,
    draws_for,
    largest_chi_square,
    largest_step,
    scale_to_temperature,
    step_shown,
)

pytestmark = pytest.mark.of_sources("skyrl_engine/testing", "skyrl_engine/contracts")

Floats = npt.NDArray[np.float64]
DRAWS_AT_ONCE = 2000


@pytest.fixture(scope="module")
def weights() -> TinyWeights:
    return TinyWeights("tensors")


# --- counts ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def binned_weights(weights: TinyWeights) -> dict[str, Floats]:
    """The probabilities of the cells of both chi-square tests of `distribution`."""
    first, _, pairs = promises.due_pairs(weights)
    cells = {"first": cells_of(first * promises.DRAWS), "pairs": cells_of(pairs * promises.DRAWS)}
    return {name: np.bincount(cells[name], weights=each) for name, each in (("first", first), ("pairs", pairs))}


def chi_squares(probabilities: Floats, exact: Floats, draw: np.random.Generator) -> Floats:
    """float64[DRAWS_AT_ONCE]: of counts that follow `probabilities`."""
    expected = exact * promises.DRAWS
    counts = draw.multinomial(promises.DRAWS, probabilities / probabilities.sum(), size=DRAWS_AT_ONCE)
    return np.asarray((((counts - expected) ** 2) / expected).sum(-1))


@pytest.mark.parametrize("times", now([20, 400], 20))
@pytest.mark.parametrize("name", ["first", "pairs"])
def test_counts_of_a_right_sampler_seldom_break_the_promise(binned_weights: dict[str, Floats], name: str, times: int) -> None:
    """Draw for 40,000 samplers by day and 800,000 by night; three standard deviations of the number that is stated stay allowed."""
    expected, draw = binned_weights[name], np.random.default_rng(1)
    largest = largest_chi_square(len(expected) - 1)
    alarms = sum(int((chi_squares(expected, expected, draw) > largest).sum()) for _ in range(times))
    allowed = times * DRAWS_AT_ONCE * FALSE_ALARM / 2
    print(f"{name}: {alarms} false alarms of {times * DRAWS_AT_ONCE}, {allowed:.0f} are stated")
    assert alarms <= allowed + 3 * allowed**0.5


@pytest.mark.parametrize("name", ["first", "pairs"])
def test_counts_show_the_distance_that_is_stated(binned_weights: dict[str, Floats], name: str) -> None:
    """The one of all distributions so far away whose chi-square is least: half of the mass is too likely by one factor, half too unlikely."""
    expected, draw = binned_weights[name], np.random.default_rng(2)
    distance = distance_shown(promises.DRAWS, len(expected))
    assert distance <= (promises.DISTANCE if name == "first" else 0.14)
    likelier = np.arange(len(expected)) % 2 == 0
    mass = expected[likelier].sum()
    wrong = expected * np.where(likelier, 1 + distance / mass, 1 - distance / (1 - mass))
    assert np.abs(wrong - expected).sum() / 2 == pytest.approx(distance)
    largest = largest_chi_square(len(expected) - 1)
    missed = sum(int((chi_squares(wrong, expected, draw) <= largest).sum()) for _ in range(10))
    print(f"{name}: {missed} missed of {10 * DRAWS_AT_ONCE} at a distance of {distance:.3f}, {promises.DRAWS} draws")
    assert missed <= 10 * DRAWS_AT_ONCE * MISS + 6 * (10 * DRAWS_AT_ONCE * MISS) ** 0.5


def test_distances_and_draws_are_inverse() -> None:
    for cells in (20, 128, 600):
        assert distance_shown(draws_for(0.1, cells), cells) == pytest.approx(0.1, rel=1e-3)


def test_neighbours_share_a_cell_until_enough_are_due() -> None:
    assert cells_of(np.array([6.0, 1.0, 2.0, 3.0, 9.0, 1.0])).tolist() == [0, 1, 1, 1, 2, 2]
    outcomes = np.repeat(np.arange(6), [6, 1, 2, 3, 9, 1])
    exact = ChiSquare.of(outcomes, np.array([6.0, 1.0, 2.0, 3.0, 9.0, 1.0]) / 22)
    assert exact.value == pytest.approx(0.0, abs=1e-12)
    assert exact.due.tolist() == [6.0, 6.0, 10.0]


# --- temperatures ------------------------------------------------------------------------------------------------------------------


def places(weights: TinyWeights, temperature: float, factor: float, draw: np.random.Generator) -> Floats:
    """float64[n, vocabulary]: the model's log-probabilities at all places of the promise's draws, which a sampler at `factor` times the
    temperature made.
    """
    rows = [
        request.prompt_ids.tolist()
        for request in requests_of(promises.REQUESTS[temperature], seed=list(promises.REQUESTS).index(temperature))
    ]
    values: list[Floats] = []
    for _ in range(promises.TOKENS):
        logprobs = np.array([scores[-1] for scores in weights.logprobs_of_rows(rows, temperature)])
        values.append(logprobs)
        tokens = draw_tokens(scale_to_temperature(logprobs, factor), draw, 1)[0]
        rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
    return np.concatenate(values)


def draw_tokens(logprobs: Floats, draw: np.random.Generator, times: int) -> npt.NDArray[np.int64]:
    """int64[times, n]: tokens at n places."""
    running = np.exp(logprobs).cumsum(-1)
    tokens = [np.searchsorted(sums, draw.random(times) * sums[-1], side="right") for sums in running]
    return np.array(tokens).T


def gains(logprobs: Floats, factor: float, draw: np.random.Generator, times: int) -> Floats:
    """float64[times, factors]: the gains of samplers at `factor` times the temperature."""
    tokens = draw_tokens(scale_to_temperature(logprobs, factor), draw, times)
    ratios = np.stack([scale_to_temperature(logprobs, scale) - logprobs for scale in FACTORS], axis=-1)
    return ratios[np.arange(len(logprobs)), tokens].sum(1)


def factor_at_the_bound(logprobs: Floats, farthest: float) -> float:
    """Return the factor, between 1 and `farthest`, of a sampler whose mean evidence is the bound."""
    near, far = 0.0, float(np.log(farthest))
    for _ in range(20):
        middle = (near + far) / 2
        probabilities = np.exp(scale_to_temperature(logprobs, np.exp(middle)))
        means = [(probabilities * (scale_to_temperature(logprobs, scale) - logprobs)).sum() for scale in FACTORS]
        near, far = (middle, far) if max(means) < BOUND + np.log(len(FACTORS)) else (near, middle)
    return float(np.exp(far))


def evidence(of_samplers: Floats) -> Floats:
    highest = of_samplers.max(-1)
    return np.asarray(highest + np.log(np.exp(of_samplers - highest[:, None]).mean(-1)))


BOUND = np.log(promises.TESTS / FALSE_ALARM)


def test_the_evidence_is_that_of_the_kit(weights: TinyWeights) -> None:
    draw = np.random.default_rng(3)
    logprobs = places(weights, 1.0, 1.0, draw)[:40]
    tokens = draw_tokens(logprobs, draw, 1)
    found = Temperatures.of([logprobs[:10], logprobs[10:]], [tokens[0, :10].astype(np.int32), tokens[0, 10:].astype(np.int32)])
    ratios = np.stack([scale_to_temperature(logprobs, scale) - logprobs for scale in FACTORS], axis=-1)
    np.testing.assert_allclose(found.gains, ratios[np.arange(40), tokens[0]].sum(0))
    assert found.evidence == pytest.approx(evidence(found.gains[None])[0])
    assert found.count == 40
    np.testing.assert_allclose(
        scale_to_temperature(logprobs, 2.0), scale_to_temperature(scale_to_temperature(logprobs, 0.5), 4.0), atol=1e-12
    )


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", promises.REQUESTS)
def test_temperatures_of_a_right_sampler_seldom_break_the_promise(weights: TinyWeights, temperature: float) -> None:
    """By importance sampling: draws of two samplers, a cooler and a warmer one, that break it half of the time, weighted with how much less
    likely they are of a right one.
    """
    draw = np.random.default_rng(4)
    logprobs = places(weights, temperature, 1.0, draw)
    sides = [factor_at_the_bound(logprobs, factor) for factor in (min(FACTORS), max(FACTORS))]
    tokens = np.concatenate([draw_tokens(scale_to_temperature(logprobs, factor), draw, 1000) for factor in sides])
    at = np.arange(len(logprobs))
    found = evidence(
        np.stack([(scale_to_temperature(logprobs, scale) - logprobs)[at, tokens].sum(1) for scale in FACTORS], axis=-1)
    )
    log_weights = -np.logaddexp(
        *((scale_to_temperature(logprobs, factor) - logprobs)[at, tokens].sum(1) for factor in sides)
    ) + np.log(2)
    alarms = float(np.where(found > BOUND, np.exp(log_weights), 0.0).mean())
    print(
        f"temperature {temperature:g}: a false alarm with probability {alarms:.2g} per turn, {FALSE_ALARM / promises.TESTS:.2g} is stated"
    )
    assert 0 < alarms <= FALSE_ALARM / promises.TESTS


SHOWN = [
    (temperature, factor)
    for temperature in promises.REQUESTS
    for factor in FACTORS
    if not 2 / 3 < factor < 3 / 2 and (temperature < 3 or factor != 3 / 2)
]


@pytest.mark.nightly
@pytest.mark.parametrize(("temperature", "factor"), SHOWN)
def test_temperatures_show_wrong_ones(weights: TinyWeights, temperature: float, factor: float) -> None:
    """The probability of a miss, bounded exactly from the model's distributions (Chernoff), and none in 400 samplers."""
    draw = np.random.default_rng(5)
    logprobs = places(weights, temperature, factor, draw)
    wrong = scale_to_temperature(logprobs, factor)
    # the mean of all ratios is at least a part of that of the right factor
    needed = BOUND + np.log(len(FACTORS))
    bounds = [
        share * needed + np.log(np.exp((1 - share) * wrong + share * logprobs).sum(-1)).sum()
        for share in np.linspace(0.05, 0.95, 19)
    ]
    print(
        f"temperature {temperature:g}, sampled at {temperature * factor:.2g}: missed with probability {np.exp(min(bounds)):.2g} at most"
    )
    assert np.exp(min(bounds)) <= MISS
    assert (evidence(gains(logprobs, factor, draw, 400)) > BOUND).all()


# --- close temperatures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(len(promises.CLOSE)))
def test_close_temperatures_seldom_give_equal_tokens(weights: TinyWeights, place: int) -> None:
    """However a right sampler makes tokens of numbers, two temperatures give another one with the total variation at least, place by place."""
    near, far = promises.CLOSE[place]
    rows = [request.prompt_ids.tolist() for request in requests_of(promises.CLOSE_REQUESTS, seed=place)]
    draw, same = np.random.default_rng(6), 0.0
    for _ in range(promises.TOKENS):
        logprobs = np.array([scores[-1] for scores in weights.logprobs_of_rows(rows, near)])
        variations = np.abs(np.exp(logprobs) - np.exp(scale_to_temperature(logprobs, far / near))).sum(-1) / 2
        same += float(np.log1p(-variations).sum())
        rows = [[*row, int(token)] for row, token in zip(rows, draw_tokens(logprobs, draw, 1)[0], strict=True)]
    print(f"temperatures {near:g} and {far:g}: all tokens are the same with probability {np.exp(same):.2g} at most")
    assert np.exp(same) <= FALSE_ALARM / len(promises.CLOSE)


# --- repeats -----------------------------------------------------------------------------------------------------------------------


def test_repeats_are_those_of_tokens_that_the_row_holds() -> None:
    logprobs = [np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])), np.log(np.array([[0.2, 0.2, 0.6]]))]
    found = Repeats.of(logprobs, [np.array([1, 1]), np.array([0])], [np.array([0]), np.array([2, 2])])
    assert (found.count, found.draws) == (1, 3)
    assert found.due == pytest.approx(0.5 + 0.7 + 0.6)
    for odds, gain in zip(ODDS, found.gains, strict=True):
        others = [1 / (1 + (odds - 1) * 0.5), odds / (1 + (odds - 1) * 0.7), 1 / (1 + (odds - 1) * 0.6)]
        assert gain == pytest.approx(np.log(others).sum())


# --- places ------------------------------------------------------------------------------------------------------------------------


def test_places_of_a_right_sampler_are_seldom_so_far_from_uniform() -> None:
    draw, count, tests = np.random.default_rng(7), cuts.REQUESTS * cuts.TOKENS, len(cuts.CUTS)
    right = np.array([distance_from_uniform(draw.random(count)) for _ in range(5000)])
    print(
        f"{count} draws: {(right > largest_step(count, tests)).sum()} false alarms of {len(right)}; {step_shown(count, tests):.2f} shows"
    )
    assert (right <= largest_step(count, tests)).all()
    assert step_shown(count, tests) <= 0.28


def test_places_show_the_distance_that_is_stated() -> None:
    """The least visible of all distributions so far away is one whose mass was moved from the upper end to the middle."""
    draw, count, tests = np.random.default_rng(8), cuts.REQUESTS * cuts.TOKENS, len(cuts.CUTS)
    distance = step_shown(count, tests)
    for _ in range(2000):
        places = draw.random(count)
        moved = (places > 0.5) & (draw.random(count) < 2 * distance)
        assert distance_from_uniform(np.where(moved, 0.5 - draw.random(count) * 1e-3, places)) > largest_step(count, tests)


def test_the_distance_is_that_of_kolmogorov_and_smirnov() -> None:
    assert distance_from_uniform(np.array([0.1, 0.2, 0.9])) == pytest.approx(2 / 3 - 0.2)
    assert distance_from_uniform(np.array([0.8, 0.9])) == pytest.approx(0.8)


# --- changed weights ---------------------------------------------------------------------------------------------------------------


def test_every_parameter_that_keeps_its_values_shows(weights: TinyWeights) -> None:
    """By 0.01 nats or more at every row of two tokens or more, where 1e-4 are allowed."""
    changed = TinyWeights("tensors", 1)
    rows = [request.prompt_ids.tolist() for request in requests_of(8) if len(request.prompt_ids) > 1]
    expected = changed.logprobs_of_rows(rows)
    old = dict(weights.tensors())
    for name, parameter in changed.model.named_parameters():
        copy = parameter.detach().clone()
        parameter.data.copy_(old[name])
        gaps = [np.abs(one[-1] - other[-1]).max() for one, other in zip(expected, changed.logprobs_of_rows(rows), strict=True)]
        parameter.data.copy_(copy)
        assert min(gaps) > 0.01, name


# --- filters -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", cuts.CUTS, ids=str)
def test_cuts_leave_several_tokens_and_each_of_them_counts(weights: TinyWeights, cut: dict[str, Any]) -> None:
    """A sampler that leaves one of several out, or cuts by top_p in another order, is shown at every place where something else is left."""
    sampling = Sampling(1, **cut)
    rows = [np.exp(weights.logprobs(request.prompt_ids.tolist(), sampling.temperature)[-1]) for request in requests_of(60)]
    left = [cuts.left_of(row, sampling) for row in rows]
    assert np.mean([len(tokens) for tokens in left]) >= 3
    for name, off in {"top_k": 0, "top_p": 1.0, "min_p": 0.0}.items():
        if name in cut:
            others = [cuts.left_of(row, evolve(sampling, **{name: off})) for row in rows]
            assert np.mean([tokens.keys() != other.keys() for tokens, other in zip(left, others, strict=True)]) > 0.33, name
    if "top_p" in cut and "top_k" in cut:
        first = [len(cuts.left_of(row, evolve(sampling, top_k=0, min_p=0.0))) for row in rows]
        others = [
            cuts.left_of(row, evolve(sampling, top_k=min(sampling.top_k, most), top_p=1.0))
            for row, most in zip(rows, first, strict=True)
        ]
        assert np.mean([tokens.keys() != other.keys() for tokens, other in zip(left, others, strict=True)]) > 0.33
    if "top_p" in cut and "min_p" in cut:
        first = [len(cuts.left_of(row, evolve(sampling, top_k=0, top_p=1.0))) for row in rows]
        others = [
            cuts.left_of(row, evolve(sampling, top_k=min(sampling.top_k or most, most)))
            for row, most in zip(rows, first, strict=True)
        ]
        assert np.mean([tokens.keys() != other.keys() for tokens, other in zip(left, others, strict=True)]) > 0.33


def test_a_request_of_the_kit_is_met_by_a_cut_at_many_places() -> None:
    """So many that a third of them are all missed once in ten million."""
    assert 0.67 ** (cuts.REQUESTS * cuts.TOKENS) < 1e-7
