"""The promise of top_k, top_p and min_p: what is left of a distribution, and how often each token of it comes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.testing.generators.bench import (
    TOLERANCE,
    RunningGenerator,
    claims,
    due_logprobs_of,
    requests_of,
    require_likeliest,
    run_generator,
    undecidable_on_error,
)
from skyrl_engine.testing.generators.power import FALSE_ALARM, distance_from_uniform, largest_step, step_shown
from skyrl_engine.testing.promise import Broken, Undecidable, promise
from skyrl_engine.testing.subject import Subject

CUTS: tuple[dict[str, Any], ...] = (
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 2.0, "min_p": 0.3},
    {"temperature": 2.0, "top_p": 0.4, "min_p": 0.3},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.7, "min_p": 0.35},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "top_k": 10, "top_p": 0.7},
    {"temperature": 1.0, "top_p": 0.7, "min_p": 0.1},
    {"temperature": 0.5, "top_p": 0.8},
    {"temperature": 0.5, "top_k": 8, "top_p": 0.85},
    {"temperature": 0.5, "min_p": 0.05},
)
"""All leave several tokens: `min_p` = 0.3 leaves 20 on average at a temperature of 2, 0.9 would leave 1.3, which argmax gives too. Where
several are given, leaving one of them out, or taking two whose order counts in the opposite one, changes what is left at a third of the places
or more.
"""

REQUESTS, TOKENS = 48, 6
"""Requests of each cut, and tokens of each."""

EDGE = 1e-5
"""Tokens so close to the edge of a cut may stay or go: sums in float32 are rounded in another order."""


@promise(
    "top_k, then top_p, then min_p cut off what they say, at temperatures 0.5, 1 and 2; draws and log-probabilities are of what is left; at "
    "temperature 0 they change nothing",
    exempt=claims("filters", "logprobs"),
)
def filters(subject: Subject[Any], _case: None) -> None:
    """Look for what was cut off, and compare the places of the tokens in the distribution that is left with uniform ones."""
    with undecidable_on_error(), run_generator(subject) as generator:
        cuts = [cut for cut in CUTS if not generator.refuses(Sampling(1, **cut))]
        several = [requests_of(REQUESTS, first=100 * place, seed=place, max_tokens=TOKENS, **cut) for place, cut in enumerate(cuts)]
        # side by side, so that nobody may take the settings of one request for those of all
        done = iter(generator.sample([request for alike in zip(*several, strict=True) for request in alike]))
        by_cut = zip(*([next(done) for _ in cuts] for _ in range(REQUESTS)), strict=True)
        for requests, completions, cut in zip(several, by_cut, cuts, strict=True):
            _require_left(generator, requests, completions, cut)
        none: dict[str, Any] = {"temperature": 0.0, "top_k": 20, "top_p": 0.4, "min_p": 0.3}
        if generator.refuses(Sampling(1, **none)):
            none.pop("min_p")
        greedy = requests_of(4, first=5000, **none)
        for request, completion in zip(greedy, generator.sample(greedy), strict=True):
            require_likeliest(
                generator,
                request,
                completion,
                "Take the argmax at temperature 0, and report log_softmax(logits) of the whole vocabulary",
            )


def _require_left(
    generator: RunningGenerator, requests: list[GenerationRequest], done: tuple[Completion, ...], cut: dict[str, Any]
) -> None:
    """Raise Broken where a token was cut off, its log-probability is not of what is left, or tokens come too often or too seldom."""
    places: list[float] = []
    spread = np.random.default_rng(7)
    for request, completion, due in zip(requests, done, due_logprobs_of(generator.weights, requests, done), strict=True):
        for token, logprob, scores in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), due, strict=True):
            right = [left_of(np.exp(scores), request.sampling, edge) for edge in (0.0, -EDGE, EDGE)]
            possible = [left for left in right if token in left]
            if not possible:
                raise Broken(
                    f"samples a token that {cut} cuts off", "Cut each request by its own top_k, then by top_p, then by min_p"
                )
            if not any(abs(np.log(left[token]) - logprob) <= 10 * TOLERANCE for left in possible):
                raise Broken(
                    f"gives a token the log-probability {logprob:.4f} under {cut}, and {np.log(possible[0][token]):.4f} is due",
                    "Divide by the mass that is left",
                )
            places.append(place_of(token, possible[0], spread.random()))
    if not places:
        raise Undecidable("it samples no token")
    _require_uniform(np.array(places), cut)


def _require_uniform(places: npt.NDArray[np.float64], cut: dict[str, Any]) -> None:
    """Raise Broken where the places of tokens in the distributions that they were drawn from are not spread as chance spreads them."""
    distance, largest = distance_from_uniform(places), largest_step(len(places), len(CUTS))
    if distance > largest:
        raise Broken(
            f"draws {(places < 0.5).mean():.0%} of {len(places)} tokens from the likelier half of what {cut} leaves; the distance of their "
            f"places from a uniform distribution is {distance:.2f}, and a right one's above {largest:.2f} once in {1 / FALSE_ALARM:,.0f} "
            f"at most for all cuts (so many draws show a distance of {step_shown(len(places), len(CUTS)):.2f})",
            "Divide by the mass that is left, and draw from what is left",
        )


def place_of(token: int, left: dict[int, float], spread: float) -> float:
    """Return the mass of the tokens that are likelier than this one, and the part `spread` of its own: uniform in [0, 1] for a right draw."""
    before = 0.0
    for other, probability in left.items():
        if other == token:
            return before + spread * probability
        before += probability
    raise KeyError(token)


def left_of(probabilities: Any, sampling: Sampling, edge: float = 0.0) -> dict[int, float]:
    """Return what is left of a distribution, by token, the likeliest first; `edge` moves the edges of `top_p` and `min_p` outwards."""
    order = np.argsort(-probabilities, kind="stable")[: sampling.top_k or None]
    mass = probabilities[order] / probabilities[order].sum()
    before = np.cumsum(mass) - mass
    stays = (before < sampling.top_p + edge) & (mass >= (sampling.min_p - edge) * mass[0])
    order, mass = order[stays], mass[stays]
    return dict(zip(order.tolist(), (mass / mass.sum()).tolist(), strict=True))
