"""The promise of batch invariance: what a request gets does not depend on the requests that were sampled with it, to the last bit."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from attrs import evolve

from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.generators.bench import RunningGenerator, claims, run_generator, undecidable_on_error
from skyrl_engine.testing.generators.places import description_of
from skyrl_engine.testing.promise import Broken, promise
from skyrl_engine.testing.subject import Subject

LENGTHS = (1, 7, 16, 40, 100, 127, 129, 190, 193, 330, 500)
"""Prompt tokens. Kernels of a CPU change with the width of a batch: on torch 2.13 at 192 places, and at every 192 further ones."""

LATER = 12
"""The most tokens that come between two turns."""


@promise(
    "A request's tokens and log-probabilities are the same, to the last bit, whatever is sampled before it or with it: alone, all at once, "
    "in the opposite order, as others come and go; in a later turn too",
    exempt=claims("batch_invariant", "logprobs"),
)
def batch_invariance(subject: Subject[Any], _case: None) -> None:
    first = _make_first_turns("seeded" in description_of(subject).capabilities)
    with undecidable_on_error():
        with run_generator(subject) as generator:
            alone = [_sample_one_at_a_time(generator, first)]
            later = _make_later_turns(first, alone[0])
            # a generator that has not seen the first turns, as after a kill
        with run_generator(subject) as generator:
            alone.append(_sample_one_at_a_time(generator, later))
        for schedule, sample in SCHEDULES.items():
            with run_generator(subject) as generator:
                for turn, (requests, due) in enumerate(zip((first, later), alone, strict=True)):
                    turn_name = "in a first turn" if turn == 0 else "in a later turn"
                    _require_same(requests, due, sample(generator, requests), f"{schedule}, {turn_name}")


def _make_first_turns(seeded: bool) -> list[GenerationRequest]:
    """Requests of all lengths, two of each prompt, which share a prefix; greedy ones where seeds decide nothing."""
    draw = np.random.default_rng(11)
    requests: list[GenerationRequest] = []
    for group, length in enumerate(LENGTHS):
        prompt = draw.integers(0, VOCABULARY, length).astype(np.int32)
        for temperature in (1.0, 0.7):
            sampling = Sampling(int(draw.integers(2, 9)), temperature=temperature if seeded else 0.0, ignore_eos=True)
            requests.append(
                GenerationRequest(len(requests), prompt, sampling, seed=len(requests), session=len(requests), prefix_group=group)
            )
    return requests


def _make_later_turns(first: Sequence[GenerationRequest], done: Sequence[Completion]) -> list[GenerationRequest]:
    """The next requests of the same sessions and groups: they go on after what was said and some more; some under new sessions."""
    draw = np.random.default_rng(12)
    requests = []
    for request, completion in zip(first, done, strict=True):
        more = draw.integers(0, VOCABULARY, draw.integers(1, LATER + 1))
        prompt = np.concatenate([request.prompt_ids, completion.token_ids, more]).astype(np.int32)
        session = request.session + 1000 * (request.session % 3 == 0)
        requests.append(evolve(request, request_id=request.request_id + 1000, prompt_ids=prompt, session=session))
    return requests


def _sample_one_at_a_time(generator: RunningGenerator, requests: Sequence[GenerationRequest]) -> list[Completion]:
    return [generator.sample([request])[0] for request in requests]


def _sample_in_opposite_order(generator: RunningGenerator, requests: Sequence[GenerationRequest]) -> list[Completion]:
    return generator.sample(requests[::-1])[::-1]


def _sample_as_others_come_and_go(generator: RunningGenerator, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """Submit a few, sample a step, submit a few more; the longest are among the first and among the last."""
    order = [*requests[1::2], *requests[0::2]]
    completions: dict[int, Completion] = {}
    for group in _split_into_few(order):
        generator.submit(group)
        completions |= {each.request_id: each for each in generator.poll(0.0)}
    left = [each for each in requests if each.request_id not in completions]
    completions |= {each.request_id: each for each in generator.collect(left)}
    return [completions[each.request_id] for each in requests]


def _split_into_few(order: Sequence[GenerationRequest]) -> Iterator[Sequence[GenerationRequest]]:
    start, count = 0, 1
    while start < len(order):
        yield order[start : start + count]
        start, count = start + count, count % 3 + 1


SCHEDULES: dict[str, Callable[[RunningGenerator, Sequence[GenerationRequest]], list[Completion]]] = {
    "all at once": RunningGenerator.sample,
    "in the opposite order": _sample_in_opposite_order,
    "as others come and go": _sample_as_others_come_and_go,
}


def _require_same(
    requests: Sequence[GenerationRequest], due: Sequence[Completion], got: Sequence[Completion], schedule: str
) -> None:
    """Raise Broken where a completion differs in a bit from that of the request alone."""
    remedy = "Choose kernels by the row alone, or do not declare batch_invariant"
    for request, one, other in zip(requests, due, got, strict=True):
        where = f"for {len(request.prompt_ids)} prompt tokens, {schedule},"
        if one.token_ids.tolist() != other.token_ids.tolist():
            raise Broken(f"samples {where} other tokens than alone", remedy)
        if one.logprobs.tobytes() != other.logprobs.tobytes():
            gap = np.abs(one.logprobs.astype(np.float64) - other.logprobs)
            place = int(np.flatnonzero(gap)[0]) if gap.any() else 0
            raise Broken(
                f"gives {where} log-probabilities that differ from those of the same request alone: by {gap[place]:.2g} nats at token {place}",
                remedy,
            )
