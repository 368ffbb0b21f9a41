"""Promises about what a generator samples and says of it, as far as its capabilities go."""

from itertools import pairwise
from typing import Any

import numpy as np
from attrs import evolve

from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling, TopLogprobs
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.generators.bench import (
    TOLERANCE,
    RunningGenerator,
    claims,
    due_logprobs,
    due_logprobs_of,
    model_folder,
    name_request,
    no_weights,
    raise_broken_on_error,
    requests_of,
    require_likeliest,
    require_logprobs,
    run_generator,
    undecidable_on_error,
)
from skyrl_engine.testing.generators.places import description_of
from skyrl_engine.testing.generators.power import FALSE_ALARM
from skyrl_engine.testing.promise import Broken, Undecidable, promise
from skyrl_engine.testing.subject import Subject

ENDS = (5, 17, 40, 41, 42, 80, 81, 99, 101, 120)
"""End tokens of the model, so many that most requests meet one."""

LONG = (*(length for power in (32, 64, 128, 256, 512) for length in (power - 2, power + 1)), 101, 200, 380)
"""Prompt tokens: beyond each power of two, before it with tokens to come that cross it, and between."""


# --- what comes back ---------------------------------------------------------------------------------------------------------------


@promise(
    "Every request comes back exactly once under its own id, also where several finish at once and after it was aborted",
    exempt=no_weights,
)
def exactly_once(subject: Subject[Any], _case: None) -> None:
    with raise_broken_on_error(), run_generator(subject) as generator:
        equal = [evolve(request, sampling=Sampling(max_tokens=3, ignore_eos=True)) for request in requests_of(9, first=40)]
        generator.sample(requests_of(11))
        generator.sample(equal)
        if "abort" in description_of(subject).capabilities:
            generator.submit(aborted := requests_of(4, first=60, max_tokens=20))
            generator.abort()
            generator.collect(aborted)
            # what else is said of them comes while others are sampled
            generator.sample(requests_of(2, first=80, max_tokens=40))
        generator.poll(0.0)


@promise("No more than max_tokens come, and finish is length exactly where so many came without a stop", exempt=no_weights)
def length(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject, ends=ENDS) as generator:
        every = tuple(range(VOCABULARY))
        # of the last ones, the only token that may come stops them too
        requests = [*requests_of(24, ignore_eos=False), *requests_of(2, first=30, max_tokens=1, stop_token_ids=every)]
        for request, done in zip(requests, generator.sample(requests), strict=True):
            most, count = request.sampling.max_tokens, len(done.token_ids)
            stops = request.sampling.stop_token_ids or ENDS
            if count > most:
                raise Broken(f"samples {count} tokens for {name_request(request)}", "Count the token that stops among max_tokens")
            if (done.finish == "length") != (count == most and done.token_ids[-1] not in stops):
                raise Broken(
                    f"ends {name_request(request)} as {done.finish!r} after {count} tokens, the last of them {done.token_ids[-1:]}",
                    'Say "length" where max_tokens came and none of them stopped it',
                )


@promise("At least one token comes, with its log-probability, unless the request was aborted or failed", exempt=no_weights)
def something(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject, ends=tuple(range(VOCABULARY))) as generator:
        requests = requests_of(6, ignore_eos=False)
        for request, done in zip(requests, generator.sample(requests), strict=True):
            if not len(done.token_ids) or len(done.logprobs) != len(done.token_ids):
                raise Broken(
                    f"returns {len(done.token_ids)} tokens and {len(done.logprobs)} log-probabilities for {name_request(request)}",
                    "Keep the token that stops: it was sampled",
                )


@promise("A request stops after the first end or stop token, which is kept, from min_tokens on", exempt=no_weights)
def stop_tokens(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject, ends=ENDS) as generator:
        own, every = (3, 8, 30, 77, 78), tuple(range(VOCABULARY))
        cases = {
            "end tokens": (requests_of(16, max_tokens=30, ignore_eos=False), ENDS),
            "stop tokens": (requests_of(16, first=20, max_tokens=30, stop_token_ids=own), own),
            "both": (requests_of(16, first=40, max_tokens=30, ignore_eos=False, stop_token_ids=own), (*ENDS, *own)),
            "ignore_eos": (requests_of(4, first=60, max_tokens=30), ()),
            "min_tokens": (requests_of(16, first=80, max_tokens=30, ignore_eos=False, min_tokens=6), ENDS),
            "min_tokens of stop tokens": (requests_of(16, first=100, max_tokens=30, min_tokens=6, stop_token_ids=ENDS), ENDS),
            "the last of max_tokens": (requests_of(4, first=120, max_tokens=1, stop_token_ids=every), every),
        }
        # all at once, so that nobody may take the stops of one request for those of all
        done = iter(generator.sample([request for requests, _ in cases.values() for request in requests]))
        for what, (requests, stops) in cases.items():
            completions = [next(done) for _ in requests]
            for request, completion in zip(requests, completions, strict=True):
                _require_stop(request, completion, set(stops), what)
            if generator.has_logprobs:
                for request, completion, due in zip(
                    requests, completions, due_logprobs_of(generator.weights, requests, completions), strict=True
                ):
                    require_logprobs(
                        generator,
                        request,
                        completion,
                        "Report the log-probability of the token that stops, as of every other",
                        due=due,
                    )


def _describe_stops(stops: set[int]) -> str:
    return str(sorted(stops)) if len(stops) < 20 else "every token"


def _require_stop(request: GenerationRequest, done: Completion, stops: set[int], what: str) -> None:
    least = request.sampling.min_tokens
    places = [place for place, token in enumerate(done.token_ids.tolist()) if token in stops and place + 1 >= least]
    last = len(done.token_ids) - 1
    if places and places[0] != last:
        raise Broken(f"goes on after the token {done.token_ids[places[0]]}, which stops it ({what})", "Stop after every end token")
    if (done.finish == "stop") != bool(places):
        raise Broken(
            f"ends a request as {done.finish!r} after the tokens {done.token_ids.tolist()} ({what}: {_describe_stops(stops)})",
            'Say "stop" where the last token stops it, and keep that token',
        )
    if places and done.stop != done.token_ids[last]:
        raise Broken(
            f"names {done.stop!r} as the stop, where the token {done.token_ids[last]} stopped it", "Name the token in `stop`"
        )


@promise(
    "A request stops after the token that completes a stop string, and no sooner",
    exempt=claims("stop_strings"),
)
def stop_strings(subject: Subject[Any], _case: None) -> None:
    tokenizer = load_tokenizer(ModelConfig(str(model_folder())))

    def text(ids: Any) -> str:
        decoded = tokenizer.decode(
            [int(token_id) for token_id in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(decoded, str)
        return decoded

    with undecidable_on_error(), run_generator(subject) as generator:
        free = generator.sample(requests_of(10, max_tokens=24))
        requests, due = [], []
        for place, (request, done) in enumerate(zip(requests_of(10, first=20, max_tokens=24), free, strict=True)):
            completion_text = text(done.token_ids)
            string = completion_text[len(completion_text) // 2 : len(completion_text) // 2 + 2 + request.request_id % 2]
            if string.strip("\ufffd") != string or not string:
                continue
            upto = next(count for count in range(1, len(done.token_ids) + 1) if string in text(done.token_ids[:count]))
            # what a prompt says stops nothing
            prompt_text = text(request.prompt_ids)
            pairs = [prompt_text[start : start + 2] for start in range(len(prompt_text) - 1)]
            other = next((pair for pair in pairs if pair not in completion_text and "\ufffd" not in pair), "never said at all")
            sampling = evolve(request.sampling, stop_strings=(other, string), min_tokens=upto + 2 if place % 4 == 0 else 0)
            requests.append(evolve(request, sampling=sampling))
            due.append((string, upto, done.token_ids.tolist()))
        for request, (string, upto, tokens), done in zip(requests, due, generator.sample(requests), strict=True):
            ended, count = (done.finish, done.stop) == ("stop", string), len(done.token_ids)
            if request.sampling.min_tokens:
                # the string may have to come again
                right = count >= min(request.sampling.min_tokens, len(tokens)) and (ended or count == len(tokens))
            else:
                right = ended and count == upto
            if not right or done.token_ids.tolist() != tokens[:count]:
                raise Broken(
                    f"ends as {done.finish!r}, {done.stop!r} with {count} tokens, where {string!r} is complete with token {upto} and at least "
                    f"{request.sampling.min_tokens} are asked for",
                    "Look for stop strings in the text of all sampled tokens, from min_tokens on, and keep the token that completes one",
                )
            if generator.has_logprobs:
                require_logprobs(
                    generator, request, done, "Report the log-probabilities of the tokens that complete a stop string, too"
                )


@promise("Spans of versions cover the tokens and rise", exempt=no_weights)
def spans(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject, version=3) as generator:
        for done in generator.sample(requests_of(6)):
            starts, versions = done.versions.starts.tolist(), done.versions.versions.tolist()
            rising = all(one < two for values in (starts, versions) for one, two in pairwise(values))
            if (
                not starts
                or starts[0] != 0
                or starts[-1] >= len(done.token_ids)
                or not rising
                or versions != [generator.first_version]
            ):
                raise Broken(
                    f"says that tokens from {starts} on are of versions {versions}, of {len(done.token_ids)} tokens that version "
                    f"{generator.first_version} made",
                    "Start a span at 0 and wherever the version changed",
                )


# --- what is sampled ---------------------------------------------------------------------------------------------------------------


TEMPERATURES = (1.0, 0.5, 2.0, 0.3, 0.37, 0.7, 3.0)


@promise(
    "Log-probabilities are those of the distribution that was sampled from, at temperatures between 0.3 and 3",
    exempt=claims("logprobs"),
)
def log_probabilities(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject) as generator:
        # side by side and of one prompt, so that nobody may take the settings of one request for those of all
        several = [
            requests_of(6, first=20 * place, temperature=temperature)
            for place, temperature in enumerate(TEMPERATURES)
            if not generator.refuses(Sampling(1, temperature=temperature))
        ]
        requests = [
            evolve(request, prefix_group=group) for group, alike in enumerate(zip(*several, strict=True)) for request in alike
        ]
        for request, done in zip(requests, generator.sample(requests), strict=True):
            remedy = "Report log_softmax(logits / temperature) at the sampled token, of the whole vocabulary and the request's temperature"
            require_logprobs(generator, request, done, remedy)


@promise(
    "The same seeds give the same tokens: once more, in another order, one at a time, under other ids and sessions, in a later version",
    exempt=claims("seeded"),
)
def seeded(subject: Subject[Any], _case: None) -> None:
    requests = requests_of(12, seed=3)
    renamed = [evolve(original, request_id=original.request_id + 1001, session=original.session + 77) for original in requests]
    with undecidable_on_error(), run_generator(subject) as generator:
        first = generator.sample(requests)
        repeats = {
            "once more": generator.sample(requests),
            "in another order": generator.sample(requests[::-1])[::-1],
            "one at a time": [generator.sample([request])[0] for request in requests],
            "under other ids and sessions": generator.sample(renamed),
        }
        generator.hand_over(3)
        repeats["after an update to the same weights"] = generator.sample(requests)
    for how, repeated in repeats.items():
        for request, one, other in zip(requests, first, repeated, strict=True):
            if one.token_ids.tolist() != other.token_ids.tolist():
                raise Broken(
                    f"samples {one.token_ids.tolist()} and then, {how}, {other.token_ids.tolist()} for {name_request(request)}",
                    "Draw from a generator of each request's own seed, and of nothing else",
                )


SEEDS = (5, 2**64 - 6)
"""Neighbours of the larger one are equal as float64."""


@promise("Seeds are of 64 bits, and all of them count", exempt=claims("seeded"))
def whole_seeds(subject: Subject[Any], _case: None) -> None:
    """Draw from two seeds and from each with one bit changed: at a temperature of 2 two of them draw alike once in a million at most."""
    prompt, sampling = np.array([11, 22, 33], dtype=np.int32), Sampling(max_tokens=6, ignore_eos=True, temperature=2.0)
    seeds = [base_seed ^ changed for base_seed in SEEDS for changed in (0, *(2**bit for bit in range(64)))]
    requests = [GenerationRequest(n, prompt, sampling, seed, session=n) for n, seed in enumerate(seeds)]
    with undecidable_on_error(), run_generator(subject) as generator:
        known: dict[tuple[int, ...], int] = {}
        for request, done in zip(requests, generator.sample(requests), strict=True):
            other = known.setdefault(tuple(done.token_ids.tolist()), request.seed)
            if other != request.seed:
                raise Broken(
                    f"draws the same {len(done.token_ids)} tokens from the seeds {other} and {request.seed}",
                    "Hand the whole seed, an integer of 64 bits, on to the generator that draws",
                )


PAIRS = 12
"""Pairs of `seeds_apart`. All of them agree by chance once in 10^20 at most."""


@promise(
    "Neighbouring seeds share no numbers: a token of one is not drawn as the token before it is of the next seed",
    exempt=claims("seeded"),
)
def seeds_apart(subject: Subject[Any], _case: None) -> None:
    """Draw the second token of a row once more, as the first one after a longer prompt, from a seed near the row's."""
    sampling = Sampling(max_tokens=2, ignore_eos=True, temperature=2.0)
    rows = [evolve(row, seed=1000 + 16 * n) for n, row in enumerate(requests_of(PAIRS))]
    rows = [evolve(row, sampling=sampling) for row in rows]
    with undecidable_on_error(), run_generator(subject) as generator:
        row_tokens = [done.token_ids for done in generator.sample(rows)]
        if any(len(tokens) != 2 for tokens in row_tokens):
            raise Undecidable("it does not sample as many tokens as it is asked for")
        for offset in (1, -1):
            neighbours = [
                evolve(
                    row,
                    request_id=row.request_id + 100 + offset,
                    prompt_ids=np.append(row.prompt_ids, tokens[:1]).astype(np.int32),
                    sampling=evolve(sampling, max_tokens=1),
                    seed=row.seed + offset,
                    session=row.session + 100,
                )
                for row, tokens in zip(rows, row_tokens, strict=True)
            ]
            if [done.token_ids[0] for done in generator.sample(neighbours)] == [tokens[1] for tokens in row_tokens]:
                raise Broken(
                    f"draws the second tokens of {PAIRS} seeds with the first numbers of the seeds {offset:+d}",
                    "Draw all tokens of a request from one generator of its seed; do not add the place of a token to it",
                )


LONG_DRAWS, LONG_TEMPERATURE = 4, 0.5
"""Requests that draw, and are not greedy, at every length of `long_rows`; at this temperature a token is seldom likely in another row."""


@promise(
    "Rows count from their first token on, at lengths beyond every power of two up to 512: what is drawn, log-probabilities and greedy tokens",
    exempt=no_weights,
)
def long_rows(subject: Subject[Any], _case: None) -> None:
    """Compare how likely draws are with how likely they would be if all tokens were."""
    draw = np.random.default_rng(5)
    greedy = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
    requests: list[GenerationRequest] = []
    for group, length in enumerate(LONG):
        prompt = draw.integers(0, VOCABULARY, length).astype(np.int32)
        for sampling in (greedy, *[evolve(greedy, temperature=LONG_TEMPERATURE)] * LONG_DRAWS):
            number = len(requests)
            requests.append(GenerationRequest(number, prompt, sampling, number, session=number, prefix_group=group))
    remedy = "Attend to all tokens of a row, from its first one on"
    with undecidable_on_error(), run_generator(subject) as generator:
        done = generator.sample(requests)
        for start in range(0, len(requests), 1 + LONG_DRAWS):
            require_likeliest(generator, requests[start], done[start], remedy)
            drawn = slice(start + 1, start + 1 + LONG_DRAWS)
            due = due_logprobs_of(generator.weights, requests[drawn], done[drawn])
            own = [scores[np.arange(len(scores)), each.token_ids] for scores, each in zip(due, done[drawn], strict=True)]
            if generator.has_logprobs:
                for request, each, scores in zip(requests[drawn], done[drawn], due, strict=True):
                    require_logprobs(generator, request, each, remedy, due=scores)
            # by how much draws are likelier where all tokens are equally likely: e^x and more once in e^x at most (Markov)
            evidence = -sum(float(each.sum()) + len(each) * np.log(VOCABULARY) for each in own)
            if evidence > np.log(len(LONG) / FALSE_ALARM):
                raise Broken(
                    f"draws tokens after {len(requests[start].prompt_ids)} tokens that are e^{evidence:.0f} times less likely than "
                    f"tokens are on average ({sum(map(len, own))} draws; a right sampler's are so once in {len(LONG) / FALSE_ALARM:,.0f} "
                    f"at most)",
                    remedy,
                )


@promise("Temperature 0 takes the most likely token", exempt=no_weights)
def greedy(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject) as generator:
        requests = requests_of(8, temperature=0.0)
        for request, done in zip(requests, generator.sample(requests), strict=True):
            require_likeliest(generator, request, done, "Take the argmax at temperature 0, and report log_softmax(logits)")


@promise(
    "Log-probabilities of prompts are the model's, and NaN at their first token; a temperature other than 1 may be refused as unsupported",
    exempt=claims("prompt_logprobs"),
)
def prompt_scores(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject) as generator:
        try:
            _require_prompt_scores(generator, 0.5)
        except UnsupportedError:
            _require_prompt_scores(generator, 1.0)


def _require_prompt_scores(generator: RunningGenerator, temperature: float) -> None:
    several = [requests_of(6, first=20 * place, temperature=temperature) for place in range(2)]
    # a prompt that was read before, or is read for several, has scores too
    alike = [evolve(request, prefix_group=group) for pair in several for group, request in enumerate(pair)]
    requests = [evolve(request, prompt_logprobs=place % 3 != 0) for place, request in enumerate(alike)]
    requests += [evolve(request, request_id=request.request_id + 50, prompt_logprobs=True) for request in several[0]]
    scored = [
        (request, done) for request, done in zip(requests, generator.sample(requests), strict=True) if request.prompt_logprobs
    ]
    for request, done in scored:
        ids = request.prompt_ids.tolist()
        due = generator.weights.logprobs(ids, temperature)[np.arange(len(ids) - 1), ids[1:]]
        scores = done.prompt_logprobs
        if (
            scores is None
            or len(scores) != len(ids)
            or not np.isnan(scores[0])
            or not np.abs(scores[1:] - due).max(initial=0) <= TOLERANCE
        ):
            raise Broken(
                f"gives a prompt of {len(ids)} tokens the log-probabilities {scores}",
                "Give one per token, after all tokens before it, at the request's temperature, and NaN for the first",
            )


@promise("The most likely tokens at every place are the model's, the most likely first", exempt=claims("top_logprobs"))
def top_scores(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject) as generator:
        several = [requests_of(3, first=20 * place, temperature=temperature) for place, temperature in enumerate((1.0, 0.5, 2.0))]
        requests = [evolve(request, top_logprobs=4) for alike in zip(*several, strict=True) for request in alike]
        for request, done in zip(requests, generator.sample(requests), strict=True):
            due = due_logprobs(generator.weights, request, done)
            _require_most_likely(done.top_logprobs, due, "per sampled token", "top_logprobs, [n, k]")


@promise(
    "The most likely tokens at every place of a prompt are the model's, and NaN at the first", exempt=claims("top_prompt_logprobs")
)
def top_prompt_scores(subject: Subject[Any], _case: None) -> None:
    with undecidable_on_error(), run_generator(subject) as generator:
        requests = [evolve(request, top_prompt_logprobs=4) for request in requests_of(6, temperature=0.5)]
        for request, done in zip(requests, generator.sample(requests), strict=True):
            due = generator.weights.logprobs(request.prompt_ids.tolist(), 0.5)[: len(request.prompt_ids) - 1]
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
    gaps = np.abs(np.stack([best, own]) - top.logprobs)
    # so written, a NaN is off too
    if not gaps.max(initial=0) <= TOLERANCE:
        raise Broken(
            f"gives other tokens or log-probabilities than the model's most likely ones {where}", "Take the largest of log_softmax"
        )
