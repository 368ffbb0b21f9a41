"""Promises about what a generator samples and says of it, as far as its capabilities go."""

from itertools import pairwise
from typing import Any

import numpy as np
from attrs import evolve

from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling, TopLogprobs
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.generators.bench import (
    TOLERANCE,
    claims,
    description_of,
    due_logprobs,
    model_folder,
    name_request,
    no_weights,
    raise_broken_on_error,
    requests_of,
    require_logprobs,
    running,
    undecidable_on_error,
)
from skyrl_engine.testing.promise import Broken, promise
from skyrl_engine.testing.subject import Subject

ENDS = (5, 17, 40, 41, 42, 80, 81, 99, 101, 120)
"""End tokens of the model, so many that most requests meet one."""

LONG = (*(length for power in (32, 64, 128, 256, 512) for length in (power - 2, power + 1)), 101, 200, 380)
"""Prompt tokens: beyond each power of two, before it with tokens to come that cross it, and between."""


# --- what comes back ---------------------------------------------------------------------------------------------------------------


@promise("Every request comes back exactly once under its own id, also where several finish at once", exempt=no_weights)
def exactly_once(subject: Subject[Any], _case: None) -> None:
    with raise_broken_on_error(), running(subject) as at_work:
        equal = [evolve(request, sampling=Sampling(max_tokens=3, ignore_eos=True)) for request in requests_of(9, first=40)]
        at_work.sample(requests_of(11))
        at_work.sample(equal)
        if late := at_work.poll(0.0):
            raise Broken(f"answers request {late[0].request_id} again", "Forget a request when its completion was returned")


@promise("No more than max_tokens come, and finish is length exactly where so many came without a stop", exempt=no_weights)
def length(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), running(subject, ends=ENDS) as at_work:
        every = tuple(range(VOCABULARY))
        # of the last ones, the only token that may come stops them too
        requests = [*requests_of(24, ignore_eos=False), *requests_of(2, first=30, max_tokens=1, stop_token_ids=every)]
        for request, done in zip(requests, at_work.sample(requests), strict=True):
            most, count = request.sampling.max_tokens, len(done.token_ids)
            stops = request.sampling.stop_token_ids or ENDS
            if count > most:
                raise Broken(f"samples {count} tokens for {name_request(request)}", "Count the token that stops among max_tokens")
            if (done.finish == "length") != (count == most and done.token_ids[-1] not in stops):
                raise Broken(
                    f"ends {name_request(request)} as {done.finish!r} behind {count} tokens, the last of them {done.token_ids[-1:]}",
                    'Say "length" where max_tokens came and none of them stopped it',
                )


@promise("At least one token comes, with its log-probability, unless the request was aborted or failed", exempt=no_weights)
def something(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), running(subject, ends=tuple(range(VOCABULARY))) as at_work:
        requests = requests_of(6, ignore_eos=False)
        for request, done in zip(requests, at_work.sample(requests), strict=True):
            if not len(done.token_ids) or len(done.logprobs) != len(done.token_ids):
                raise Broken(
                    f"returns {len(done.token_ids)} tokens and {len(done.logprobs)} log-probabilities for {name_request(request)}",
                    "Keep the token that stops: it was sampled",
                )


@promise("A request stops behind the first end or stop token, which is kept, from min_tokens on", exempt=no_weights)
def stop_tokens(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), running(subject, ends=ENDS) as at_work:
        own, every = (3, 8, 30, 77, 78), tuple(range(VOCABULARY))
        asked = {
            "end tokens": (requests_of(16, max_tokens=30, ignore_eos=False), ENDS),
            "stop tokens": (requests_of(16, first=20, max_tokens=30, stop_token_ids=own), own),
            "both": (requests_of(16, first=40, max_tokens=30, ignore_eos=False, stop_token_ids=own), (*ENDS, *own)),
            "ignore_eos": (requests_of(4, first=60, max_tokens=30), ()),
            "min_tokens": (requests_of(16, first=80, max_tokens=30, ignore_eos=False, min_tokens=6), ENDS),
            "min_tokens of stop tokens": (requests_of(16, first=100, max_tokens=30, min_tokens=6, stop_token_ids=ENDS), ENDS),
            "the last of max_tokens": (requests_of(4, first=120, max_tokens=1, stop_token_ids=every), every),
        }
        # all at once, so that nobody may take the stops of one request for those of all
        done = iter(at_work.sample([request for requests, _ in asked.values() for request in requests]))
        for what, (requests, stops) in asked.items():
            for request in requests:
                _require_stop(request, next(done), set(stops), what)


def _few(stops: set[int]) -> str:
    return str(sorted(stops)) if len(stops) < 20 else "every token"


def _require_stop(request: GenerationRequest, done: Completion, stops: set[int], what: str) -> None:
    least = request.sampling.min_tokens
    places = [place for place, token in enumerate(done.token_ids.tolist()) if token in stops and place + 1 >= least]
    last = len(done.token_ids) - 1
    if places and places[0] != last:
        raise Broken(
            f"goes on behind the token {done.token_ids[places[0]]}, which stops it ({what})", "Stop behind every end token"
        )
    if (done.finish == "stop") != bool(places):
        raise Broken(
            f"ends a request as {done.finish!r} behind the tokens {done.token_ids.tolist()} ({what}: {_few(stops)})",
            'Say "stop" where the last token stops it, and keep that token',
        )
    if places and done.stop != done.token_ids[last]:
        raise Broken(
            f"names {done.stop!r} as the stop, where the token {done.token_ids[last]} stopped it", "Name the token in `stop`"
        )


@promise(
    "A request stops behind the token that completes a stop string, and no sooner",
    exempt=claims("stop_strings"),
)
def stop_strings(subject: Subject[Any], _case: None) -> None:
    tokenizer = load_tokenizer(ModelConfig(str(model_folder())))

    def text(ids: Any) -> str:
        said = tokenizer.decode([int(each) for each in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(said, str)
        return said

    with undecidable_on_error(), running(subject) as at_work:
        free = at_work.sample(requests_of(10, max_tokens=24))
        requests, due = [], []
        for request, done in zip(requests_of(10, first=20, max_tokens=24), free, strict=True):
            said = text(done.token_ids)
            string = said[len(said) // 2 : len(said) // 2 + 2 + request.request_id % 2]
            if string.strip("\ufffd") != string or not string:
                continue
            upto = next(count for count in range(1, len(done.token_ids) + 1) if string in text(done.token_ids[:count]))
            requests.append(evolve(request, sampling=evolve(request.sampling, stop_strings=("never said at all", string))))
            due.append((string, upto, done.token_ids[:upto].tolist()))
        for (string, upto, tokens), done in zip(due, at_work.sample(requests), strict=True):
            if done.token_ids.tolist() == tokens and (done.finish, done.stop) == ("stop", string):
                continue
            raise Broken(
                f"ends as {done.finish!r}, {done.stop!r} with {len(done.token_ids)} tokens, where {string!r} is complete with token {upto}",
                "Look for stop strings in the text of all tokens, and keep the token that completes one",
            )


@promise("Spans of versions cover the tokens and rise", exempt=no_weights)
def spans(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), running(subject, version=3) as at_work:
        for done in at_work.sample(requests_of(6)):
            starts, versions = done.versions.starts.tolist(), done.versions.versions.tolist()
            rising = all(one < two for each in (starts, versions) for one, two in pairwise(each))
            if not starts or starts[0] != 0 or starts[-1] >= len(done.token_ids) or not rising or versions != [3]:
                raise Broken(
                    f"says that tokens from {starts} on are of versions {versions}, of {len(done.token_ids)} tokens that version 3 made",
                    "Start a span at 0 and wherever the version changed",
                )


# --- what is sampled ---------------------------------------------------------------------------------------------------------------


@promise(
    "Log-probabilities are those of the distribution that was sampled from, at temperatures 0.5, 1 and 2",
    exempt=claims("logprobs"),
)
def log_probabilities(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), running(subject) as at_work:
        # side by side, so that nobody may take the settings of one request for those of all
        temperatures = (1.0, 0.5, 2.0)
        several = [requests_of(12, first=20 * place, seed=place, temperature=each) for place, each in enumerate(temperatures)]
        requests = [request for alike in zip(*several, strict=True) for request in alike]
        for request, done in zip(requests, at_work.sample(requests), strict=True):
            remedy = "Report log_softmax(logits / temperature) at the sampled token, of the whole vocabulary and the request's temperature"
            require_logprobs(at_work, request, done, remedy)


@promise("The same seeds give the same tokens: once more, in another order, one at a time", exempt=claims("seeded"))
def seeded(subject: Subject[Any], _case: None) -> None:
    requests = requests_of(12, seed=3)
    with undecidable_on_error(), running(subject) as at_work:
        first = at_work.sample(requests)
        ways = {
            "once more": at_work.sample(requests),
            "in another order": at_work.sample(requests[::-1])[::-1],
            "one at a time": [at_work.sample([request])[0] for request in requests],
        }
    for way, again in ways.items():
        for request, one, other in zip(requests, first, again, strict=True):
            if one.token_ids.tolist() != other.token_ids.tolist():
                raise Broken(
                    f"samples {one.token_ids.tolist()} and then, {way}, {other.token_ids.tolist()} for {name_request(request)}",
                    "Draw from a generator of each request's own seed",
                )


@promise("Seeds are of 64 bits, and all of them count", exempt=claims("seeded"))
def whole_seeds(subject: Subject[Any], _case: None) -> None:
    prompt, low = np.array([11, 22, 33], dtype=np.int32), 5
    with undecidable_on_error(), running(subject) as at_work:
        for bits in (16, 32, 63):
            asked = Sampling(max_tokens=12, ignore_eos=True, temperature=2.0)
            seeds = (low, low + 2**bits, 2**64 - 1)
            requests = [GenerationRequest(10 * bits + n, prompt, asked, seed, session=n) for n, seed in enumerate(seeds)]
            one, other, _ = at_work.sample(requests)
            if one.token_ids.tolist() == other.token_ids.tolist():
                raise Broken(
                    f"draws the same {len(one.token_ids)} tokens from the seeds {low} and {low} + 2**{bits}",
                    "Hand the whole seed on to the generator that draws",
                )


@promise("Rows count from their first token on, at lengths beyond every power of two up to 512", exempt=no_weights)
def long_rows(subject: Subject[Any], _case: None) -> None:
    draw = np.random.default_rng(5)
    asked = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
    requests = [
        GenerationRequest(number, draw.integers(0, VOCABULARY, length).astype(np.int32), asked, number, session=number)
        for number, length in enumerate(LONG)
    ]
    remedy = "Attend to all tokens of a row, from its first one on"
    told = "logprobs" in description_of(subject).capabilities
    with undecidable_on_error(), running(subject) as at_work:
        for request, done in zip(requests, at_work.sample(requests), strict=True):
            due = due_logprobs(at_work.weights, request, done)
            if (due.max(-1) - due[np.arange(len(due)), done.token_ids]).max(initial=0) > TOLERANCE:
                raise Broken(f"takes another token than the most likely one after {len(request.prompt_ids)} tokens", remedy)
            if told:
                require_logprobs(at_work, request, done, remedy)


@promise("Temperature 0 takes the most likely token", exempt=no_weights)
def greedy(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), running(subject) as at_work:
        requests = requests_of(8, temperature=0.0)
        for request, done in zip(requests, at_work.sample(requests), strict=True):
            due = due_logprobs(at_work.weights, request, done)
            if (due.max(-1) - due[np.arange(len(done.token_ids)), done.token_ids]).max() > TOLERANCE:
                raise Broken(
                    f"takes another token than the most likely one for {name_request(request)}", "Take the argmax at temperature 0"
                )
            require_logprobs(at_work, request, done, "Report log_softmax(logits) at temperature 0")


@promise("Log-probabilities of prompts are the model's, and NaN at their first token", exempt=claims("prompt_logprobs"))
def prompt_scores(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), running(subject) as at_work:
        requests = [evolve(request, prompt_logprobs=True) for request in requests_of(6, temperature=0.5)]
        for request, done in zip(requests, at_work.sample(requests), strict=True):
            ids = request.prompt_ids.tolist()
            due = at_work.weights.logprobs(ids, 0.5)[np.arange(len(ids) - 1), ids[1:]]
            given = done.prompt_logprobs
            if (
                given is None
                or len(given) != len(ids)
                or not np.isnan(given[0])
                or np.abs(given[1:] - due).max(initial=0) > TOLERANCE
            ):
                raise Broken(
                    f"gives a prompt of {len(ids)} tokens the log-probabilities {given}",
                    "Give one per token, behind all tokens before it, at the request's temperature, and NaN for the first",
                )


@promise("The most likely tokens at every place are the model's, the most likely first", exempt=claims("top_logprobs"))
def top_scores(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), running(subject) as at_work:
        requests = [evolve(request, top_logprobs=4) for request in requests_of(6)]
        for request, done in zip(requests, at_work.sample(requests), strict=True):
            due = due_logprobs(at_work.weights, request, done)
            _require_most_likely(done.top_logprobs, due, "per sampled token", "top_logprobs, [n, k]")


@promise(
    "The most likely tokens at every place of a prompt are the model's, and NaN at the first", exempt=claims("top_prompt_logprobs")
)
def top_prompt_scores(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), running(subject) as at_work:
        requests = [evolve(request, top_prompt_logprobs=4) for request in requests_of(6, temperature=0.5)]
        for request, done in zip(requests, at_work.sample(requests), strict=True):
            due = at_work.weights.logprobs(request.prompt_ids.tolist(), 0.5)[: len(request.prompt_ids) - 1]
            top = done.top_prompt_logprobs
            if top is None or len(top.logprobs) != len(request.prompt_ids) or not np.isnan(top.logprobs[0]).all():
                raise Broken(
                    f"gives no most likely tokens at the {len(request.prompt_ids)} places of a prompt",
                    "Fill Completion.top_prompt_logprobs, [P, k], with NaN for the first place",
                )
            _require_most_likely(
                TopLogprobs(top.token_ids[1:], top.logprobs[1:]), due, "per place of the prompt", "top_prompt_logprobs, [P, k]"
            )


def _require_most_likely(top: TopLogprobs | None, due: Any, where: str, field: str) -> None:
    """Raise Broken unless `top` holds the 4 largest log-probabilities of each row of `due` float64[n, V], and their tokens."""
    if top is None or top.token_ids.shape != (len(due), 4) or top.logprobs.shape != top.token_ids.shape:
        raise Broken(f"gives no 4 most likely tokens {where}", f"Fill Completion.{field}")
    best = -np.sort(-due, axis=-1)[:, :4]
    own = np.take_along_axis(due, top.token_ids.astype(np.int64), axis=-1)
    if max(np.abs(best - top.logprobs).max(initial=0), np.abs(own - top.logprobs).max(initial=0)) > TOLERANCE:
        raise Broken(
            f"gives other tokens or log-probabilities than the model's most likely ones {where}", "Take the largest of log_softmax"
        )
