"""Promises about the distribution that tokens are drawn from: the model's, at the request's temperature, cut off where that is asked for."""

from typing import Any

import numpy as np
from attrs import evolve

from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.generators.bench import (
    TOLERANCE,
    Running,
    TinyWeights,
    claims,
    due_logprobs,
    due_logprobs_of,
    no_weights,
    requests_of,
    running,
    undecidable_on_error,
)
from skyrl_engine.testing.generators.power import FACTORS, FALSE_ALARM, ChiSquare, Temperatures, distance_shown, draws_for
from skyrl_engine.testing.promise import Broken, Undecidable, promise
from skyrl_engine.testing.subject import Subject

DISTANCE = 0.1
"""Total variation of the first token that `distribution` shows: between temperatures 1 and 2 it is 0.3 on the kit's model."""

DRAWS = 8 * -(-draws_for(DISTANCE, VOCABULARY) // 8)

PARTS = 8
"""First tokens in so many parts of equal probability, each with the second token, are counted as pairs."""

PROMPT = (11, 22, 33)
WARM = 2.0
"""At this temperature every token of the kit's model is drawn now and then."""

TEMPERATURES = (0.5, 1.0, 2.0)
REQUESTS, TOKENS = 250, 8
"""Requests of `temperatures`, by temperature and turn, and tokens of each. So many draws show a temperature that is 3/2 or 2/3 of the right one
or farther from it, but with probability `MISS`; at 0.5 and 1, where distributions differ more, 5/4 and 4/5 too.
"""

CUTS: tuple[dict[str, Any], ...] = (
    {"top_k": 3},
    {"top_p": 0.4},
    {"min_p": 0.3},
    {"top_p": 0.4, "min_p": 0.3},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.35},
)
"""Cuts of `filters`, at `WARM`. All leave several tokens: `min_p` = 0.3 leaves 20 on average, 0.9 would leave 1.3, which argmax gives too.
Where several are given, leaving one of them out changes what is left at a third of the places or more.
"""

EDGE = 1e-5
"""Tokens so close to the edge of a cut may stay or go: sums in float32 are rounded in another order."""


@promise("Draws of different seeds follow the model's distribution, and attempts at one task differ", exempt=no_weights)
def distribution(subject: Subject[Any], _case: None) -> None:
    """Compare counts of the first token, and of pairs of a part of the first tokens and the second token, by chi-square."""
    with undecidable_on_error(), running(subject) as at_work:
        asked = Sampling(max_tokens=2, ignore_eos=True, temperature=WARM)
        prompt = np.array(PROMPT, dtype=np.int32)
        requests = [GenerationRequest(seed, prompt, asked, seed, session=seed, prefix_group=seed // 8) for seed in range(DRAWS)]
        drawn = [done.token_ids for done in at_work.sample(requests)]
        if any(len(tokens) != asked.max_tokens for tokens in drawn):
            raise Undecidable("it does not sample as many tokens as it is asked for")
        first, second = np.array(drawn, dtype=np.int64).T
        groups = [len(set(group.tolist())) for group in first.reshape(-1, 8)]
        if max(groups) == 1:
            raise Broken("gives all attempts of a group the same token", "Draw from the request's own seed, not from the group's")
        of_first, part, of_pairs = due_pairs(at_work.weights)
        _require_counts(first, of_first, "first tokens")
        _require_counts(
            part[first] * VOCABULARY + second, of_pairs, f"pairs of an eighth of the first tokens (of {PARTS}) and a second one"
        )


def due_pairs(weights: TinyWeights) -> tuple[Any, Any, Any]:
    """Return the probabilities of first tokens [V], the part of each, int64[V], and the probabilities of parts and second tokens [parts V]."""
    of_first = np.exp(weights.logprobs(PROMPT, WARM)[-1])
    part = np.minimum((np.cumsum(of_first) - of_first / 2) * PARTS, PARTS - 1).astype(np.int64)
    rows = weights.logprobs_of_rows([[*PROMPT, token] for token in range(VOCABULARY)], WARM)
    of_pairs = np.zeros((PARTS, VOCABULARY))
    np.add.at(of_pairs, part, of_first[:, None] * np.exp([row[-1] for row in rows]))
    return of_first, part, of_pairs.ravel()


def _require_counts(outcomes: Any, probabilities: Any, what: str) -> None:
    """Raise Broken where so many draws follow the probabilities less often than the promise's false alarms allow."""
    found = ChiSquare.of(outcomes, probabilities)
    if found.value <= found.largest:
        return
    worst, cells = found.worst, len(found.due)
    raise Broken(
        f"draws {what} {found.counts[worst]:.0f} times in {len(outcomes)} that are due {found.due[worst]:.0f} times; chi-square "
        f"{found.value:.0f} of {cells} cells, where a right one's is above {found.largest:.0f} once in {2 / FALSE_ALARM:,.0f} at most (so many "
        f"draws show a total variation of {distance_shown(len(outcomes), cells):.2f})",
        "Sample from softmax(logits / temperature) of the whole vocabulary, with numbers of its own for every token",
    )


@promise(
    "Draws are as likely as softmax(logits / temperature) makes them, at temperatures 0.5, 1 and 2, in first turns and later ones",
    exempt=no_weights,
)
def temperatures(subject: Subject[Any], _case: None) -> None:
    """Compare how likely draws are at the temperature that was asked for and at `FACTORS` times it."""
    with undecidable_on_error(), running(subject) as at_work:
        for turn in range(2):
            for place, temperature in enumerate(TEMPERATURES):
                first = 10_000 * (1 + place + len(TEMPERATURES) * turn)
                drawn = requests_of(REQUESTS, first=first, seed=place, max_tokens=TOKENS, temperature=temperature)
                requests = [evolve(request, session=request.request_id) for request in drawn]
                if turn:
                    requests = _next_turn(at_work, requests)
                _require_temperature(at_work, requests, f"{'a later' if turn else 'the first'} turn")


def _next_turn(at_work: Running, requests: list[GenerationRequest]) -> list[GenerationRequest]:
    """Sample two tokens of each request, and return requests that go on after them in the same sessions."""
    said = at_work.sample([evolve(request, sampling=evolve(request.sampling, max_tokens=2)) for request in requests])
    return [
        evolve(
            request,
            request_id=request.request_id + 5000,
            prompt_ids=np.concatenate([request.prompt_ids, done.token_ids, request.prompt_ids[:3]]).astype(np.int32),
            seed=request.seed + 777_777,
        )
        for request, done in zip(requests, said, strict=True)
    ]


def _require_temperature(at_work: Running, requests: list[GenerationRequest], turn: str) -> None:
    """Raise Broken where draws are likelier at another temperature than chance explains."""
    done = at_work.sample(requests)
    if any(not len(each.token_ids) for each in done):
        raise Undecidable("it does not sample as many tokens as it is asked for")
    found = Temperatures.of(due_logprobs_of(at_work.weights, requests, done), [each.token_ids for each in done])
    tests = 2 * len(TEMPERATURES)
    if found.evidence <= np.log(tests / FALSE_ALARM):
        return
    asked, best = requests[0].sampling.temperature, found.likeliest
    raise Broken(
        f"draws tokens that are e^{found.gains[best]:.0f} times likelier at temperature {asked * FACTORS[best]:.2g} than at {asked:g}, which "
        f"was asked for ({turn}; {found.count} draws; the two are {found.distances[best]:.2f} apart in total variation; a right sampler's "
        f"seem so once in {tests / FALSE_ALARM:,.0f} at most)",
        "Divide the logits of every token by the request's temperature, once, before drawing",
    )


@promise(
    "top_k, top_p and min_p cut off what they say, and log-probabilities are of what is left", exempt=claims("filters", "logprobs")
)
def filters(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), running(subject) as at_work:
        several = [requests_of(8, first=20 * place, seed=place, temperature=WARM, **cut) for place, cut in enumerate(CUTS)]
        done = iter(at_work.sample([request for alike in zip(*several, strict=True) for request in alike]))
        for alike in zip(*several, strict=True):
            for request, cut in zip(alike, CUTS, strict=True):
                _require_left(at_work, request, next(done), cut)


def _require_left(at_work: Running, request: GenerationRequest, done: Completion, cut: dict[str, Any]) -> None:
    """Raise Broken where a token was cut off, or its log-probability is not of what is left."""
    due = due_logprobs(at_work.weights, request, done)
    for token, logprob, scores in zip(done.token_ids.tolist(), done.logprobs.tolist(), due, strict=True):
        right = [left_of(np.exp(scores), request.sampling, edge) for edge in (0.0, -EDGE, EDGE)]
        possible = [np.log(left[token]) for left in right if token in left]
        if not possible:
            raise Broken(f"samples a token that {cut} cuts off", "Cut each request by its own top_k, then by top_p, then by min_p")
        if min(abs(each - logprob) for each in possible) > 10 * TOLERANCE:
            raise Broken(
                f"gives a token the log-probability {logprob:.4f} under {cut}, and {possible[0]:.4f} is due",
                "Divide by the mass that is left",
            )


def left_of(probabilities: Any, sampling: Sampling, edge: float = 0.0) -> dict[int, float]:
    """Return what is left of a distribution, by token, normalised; `edge` moves the edges of `top_p` and `min_p` outwards."""
    order = np.argsort(-probabilities, kind="stable")[: sampling.top_k or None]
    kept = probabilities[order] / probabilities[order].sum()
    before = np.cumsum(kept) - kept
    stays = (before < sampling.top_p + edge) & (kept >= (sampling.min_p - edge) * kept[0])
    order, kept = order[stays], kept[stays]
    return dict(zip(order.tolist(), (kept / kept.sum()).tolist(), strict=True))
