"""The promise of ranks that sample together, each with its part of the weights: they give what one rank with all of them gives."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.generator import POLICY, Completion, GenerationRequest, GeneratorStart
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.generators.bench import (
    RunningGenerator,
    TinyWeights,
    claims,
    due_logprobs_of,
    model_folder,
    name_request,
    raise_broken_on_error,
    requests_of,
    require_likeliest,
    require_logprobs,
    run_generator,
    undecidable_on_error,
)
from skyrl_engine.testing.generators.places import CalledGenerator, description_of, placement_of
from skyrl_engine.testing.promise import Broken, any_of, promise
from skyrl_engine.testing.ranks.world import start_shared_world
from skyrl_engine.testing.subject import CONTEXT, Subject, part_of
from skyrl_engine.workers.process_group import agree_with_first, join_tensor_parallel

RANKS = 2
EVEN_COLUMNS = 102
"""Columns of feed-forward layers, which the ranks must be able to divide."""

MOST_POLLS = 500
"""A request of 14 tokens at most that is not back by then is lost."""

CHANGED = 3
"""The step after which weights are handed over."""

SHARE_OF_TIES = 10
"""One request in so many may be drawn otherwise than alone: a sum in another order moves the border between two tokens."""

Answers = list[list[Completion]]
"""The completions of one rank, by poll."""


def _cannot_be_made_on_ranks(subject: Subject[Any]) -> str | None:
    if placement_of(subject) != "rank":
        return "the generator lives outside of the ranks"
    if "tensors" not in description_of(subject).accepts:
        return "the generator takes no weights as tensors, of which ranks could take their parts"
    if subject.plugin is None:
        try:
            pickle.dumps(subject.make)
        except (pickle.PicklingError, AttributeError, TypeError):
            return "the generator is made by what other processes cannot import; name its plugin"
    return None


@promise(
    "Two tensor-parallel ranks that sample together answer the same requests in the same polls, with the model's log-probabilities, its most "
    "likely tokens at temperature 0, and of equal seeds the tokens of one rank; after an update too",
    exempt=any_of(claims("tensor_parallel", "logprobs"), _cannot_be_made_on_ranks),
    shrinks=False,
)
def sampling_together(subject: Subject[Any], _case: None) -> None:
    turns = [_make_requests(first) for first in (0, 100)]
    maker = subject.make if subject.plugin is None else subject.plugin.to_lock_entry()
    folder = model_folder(EVEN_COLUMNS)
    with raise_broken_on_error():
        mine, theirs = start_shared_world(RANKS).run(sample_on_rank, subject.label, maker, folder, turns)
    with undecidable_on_error(), run_generator(subject, folder=folder) as alone:
        for turn, requests in enumerate(turns):
            if turn:
                alone.update(CHANGED)
            completions = _require_same_polls(mine[turn], theirs[turn], requests)
            answers = [completions[request.request_id] for request in requests]
            _require_model(alone, requests, answers)
            if "seeded" in description_of(subject).capabilities:
                _require_tokens(requests, alone.sample(requests), answers)


def _make_requests(first: int) -> list[GenerationRequest]:
    """Draw requests of three temperatures; every third is greedy."""
    requests = requests_of(24, first=first, seed=first + 1)
    temperatures = (1.0, 0.7, 0.0)
    return [evolve(each, sampling=evolve(each.sampling, temperature=temperatures[each.request_id % 3])) for each in requests]


def sample_on_rank(
    label: str, maker: Callable[[], Any] | Mapping[str, Any], folder: Path, turns: Sequence[Sequence[GenerationRequest]]
) -> list[Answers]:
    """Sample with the other ranks of this world, and return the answers of each turn; weights change before each turn but the first.

    `maker` makes the generator, or is the lock of its plugin; `folder` holds the model. Half of the requests come when others are under way.
    """
    import torch.distributed as dist

    topology = Topology(tp=dist.get_world_size())
    together = join_tensor_parallel(topology, topology.coords(dist.get_rank()))
    weights = TinyWeights("tensors", folder=folder)
    product = maker() if callable(maker) else SelectedPlugin.from_lock(maker).make(CONTEXT)
    generator = CalledGenerator(part_of(product, label, "generator"))
    try:
        generator.start(GeneratorStart(ModelConfig(str(folder)), "cpu", (), weights, 0, together=together))
        results = []
        for turn, requests in enumerate(turns):
            if turn:
                weights.change(CHANGED)
                generator.update(weights, CHANGED, POLICY)
            half = len(requests) // 2
            generator.submit(requests[:half])
            polls = [generator.poll(0.0), generator.poll(0.0)]
            generator.submit(requests[half:])
            while len(polls) < MOST_POLLS and agree_with_first(together, sum(map(len, polls)) < len(requests)):
                polls.append(generator.poll(0.0))
            results.append(polls)
        return results
    finally:
        generator.close()


def _require_same_polls(first: Answers, other: Answers, requests: Sequence[GenerationRequest]) -> dict[int, Completion]:
    """Return the first rank's completions by request. Raises Broken where polls of the ranks answer unlike, and for a lost request."""
    for poll, (mine, theirs) in enumerate(zip(first, other, strict=True)):
        ids = [sorted(completion.request_id for completion in answer) for answer in (mine, theirs)]
        if ids[0] != ids[1]:
            raise Broken(
                f"answers the requests {ids[0]} on the first of two ranks that sample together, and {ids[1]} on the other, in poll {poll}",
                "Let every rank take the same tokens, and answer what they end in the same poll: a rank that has nothing left is not polled",
            )
    completions = {completion.request_id: completion for answer in first for completion in answer}
    for request in requests:
        if request.request_id not in completions:
            raise Broken(
                f"does not answer {name_request(request)} on two ranks that sample together",
                "Answer every request, and compute a step in every poll",
            )
    return completions


def _require_model(alone: RunningGenerator, requests: Sequence[GenerationRequest], answers: Sequence[Completion]) -> None:
    """Raise Broken for log-probabilities that are not those of the whole model, and for a greedy token that is not its most likely one."""
    remedy = "Join what each rank computes of its part of the weights, and take its part of every update"
    for request, completion in zip(requests, answers, strict=True):
        if completion.error is not None:
            raise Broken(f"fails {name_request(request)} on two ranks that sample together: {completion.error}", remedy)
        if (completion.token_ids >= VOCABULARY).any():
            raise Broken(f"samples a token outside of the vocabulary for {name_request(request)}", remedy)
        if request.sampling.temperature == 0.0:
            require_likeliest(alone, request, completion, remedy)
        else:
            (due,) = due_logprobs_of(alone.weights, [request], [completion])
            require_logprobs(alone, request, completion, remedy, due=due)


def _require_tokens(requests: Sequence[GenerationRequest], due: Sequence[Completion], got: Sequence[Completion]) -> None:
    """Raise Broken where more requests have other tokens than alone than those that rounding decides."""
    others = [
        request
        for request, one, other in zip(requests, due, got, strict=True)
        if one.token_ids.tolist() != other.token_ids.tolist()
    ]
    if len(others) > len(requests) // SHARE_OF_TIES:
        raise Broken(
            f"draws other tokens on two ranks that sample together than on one, for {len(others)} of {len(requests)} requests, such as "
            f"{name_request(others[0])}",
            "Draw the numbers of a request from its seed alone, on every rank the same",
        )
