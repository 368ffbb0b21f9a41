"""Generators with one fault each, made from a right one: it reads every row again in every step, and samples a token of each."""

import numpy as np
import torch
from attrs import define, evolve, field

from skyrl_engine import ContractError
from skyrl_engine.contracts import Completion, GeneratorDescription, TopLogprobs, VersionSpans
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.modeling.sampler_model import fill, load_sampler_model
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.generators.bench import POSITIONS as LIMIT


@define(eq=False)
class State:
    request: object
    tokens: list = field(factory=list)
    logprobs: list = field(factory=list)
    versions: list = field(factory=list)
    draws: object = None
    submitted: int = 0


class Plain:
    description = GeneratorDescription(
        frozenset({"logprobs", "seeded", "abort", "stop_strings", "update_while_generating"}), ("tensors",), "rank", 8
    )

    def __init__(self):
        self.states, self.ready = {}, []
        self.models, self.versions = {}, {}

    def start(self, start):
        self.start_values = start
        self.tokenizer = load_tokenizer(start.model)
        self.update(start.weights, start.version)

    def submit(self, requests):
        for request in requests:
            if not len(request.prompt_ids) or request.prompt_ids.min() < 0 or request.prompt_ids.max() >= VOCABULARY:
                raise ContractError("there is a token outside of the vocabulary", remedy="Encode anew")
        for request in requests:
            state = State(request, draws=np.random.default_rng(self.seed(request)), submitted=self.versions[request.target])
            if len(request.prompt_ids) + request.sampling.max_tokens > LIMIT:
                self.ready.append(self.completion(state, "error", error=f"{len(request.prompt_ids)} tokens of {LIMIT}"))
            else:
                self.states[request.request_id] = state

    def seed(self, request):
        return request.seed

    def poll(self, timeout):
        while self.states and not self.ready:
            self.ready += self.step()
            if timeout == 0.0:
                break
        ready, self.ready = self.ready, []
        return ready

    @torch.inference_mode()
    def step(self):
        states = list(self.states.values())
        rows = [[*state.request.prompt_ids.tolist(), *state.tokens] for state in states]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
        logits = self.logits(states, ids)[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
        done = []
        for state, row in zip(states, logits.double(), strict=True):
            self.take(state, row)
            finish, stop = self.ends(state)
            if finish:
                del self.states[state.request.request_id]
                done.append(self.completion(state, finish, stop))
        return done

    def logits(self, states, ids):
        of = {target: model(input_ids=ids, use_cache=False).logits for target, model in self.models.items()}
        return torch.stack([of[state.request.target][place] for place, state in enumerate(states)])

    def take(self, state, row):
        temperature = state.request.sampling.temperature
        scaled = row / (temperature or 1.0)
        token = int(scaled.argmax()) if temperature == 0 else self.draw(state, scaled)
        state.tokens.append(token)
        state.logprobs.append(self.score(row, scaled, token))
        state.versions.append(self.version_of(state))

    def draw(self, state, scaled):
        running = scaled.softmax(-1).cumsum(-1)
        return min(int(torch.searchsorted(running, state.draws.random() * running[-1], right=True)), VOCABULARY - 1)

    def score(self, row, scaled, token):
        return float(scaled.log_softmax(-1)[token])

    def version_of(self, state):
        return self.versions[state.request.target]

    def stops(self, request):
        return {*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else self.start_values.eos_token_ids)}

    def ends(self, state):
        sampling, count = state.request.sampling, len(state.tokens)
        if count >= sampling.min_tokens:
            if state.tokens[-1] in self.stops(state.request):
                return "stop", state.tokens[-1]
            for string in sampling.stop_strings:
                if string in self.tokenizer.decode(state.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False):
                    return "stop", string
        return ("length", None) if count >= sampling.max_tokens else (None, None)

    def completion(self, state, finish, stop=None, error=None):
        versions = np.array(state.versions, dtype=np.int64)
        starts = np.flatnonzero(np.diff(versions, prepend=-1)).astype(np.int32)
        return Completion(
            state.request.request_id,
            np.array(state.tokens, dtype=np.int32),
            np.array(state.logprobs, dtype=np.float32),
            VersionSpans(starts, versions[starts]),
            finish,
            stop,
            error,
        )

    def abort(self, request_ids=None):
        for number in list(self.states) if request_ids is None else request_ids:
            if number in self.states:
                self.ready.append(self.completion(self.states.pop(number), "abort"))

    def update(self, weights, version, target="policy"):
        model = self.models.get(target) or load_sampler_model(self.start_values.model, self.start_values.device)
        fill(model, weights.tensors(), "the model")
        self.models[target], self.versions[target] = model, version

    def release(self, target):
        del self.models[target]

    def close(self):
        self.states.clear()


class LogprobsAtOne(Plain):
    """Scores by softmax(logits) at any temperature, as servers return raw log-probabilities."""

    def score(self, row, scaled, token):
        return float(row.log_softmax(-1)[token])


class TopTwenty(Plain):
    """Samples from the 20 most likely tokens, a generation configuration's default, and reports their log-probabilities."""

    def take(self, state, row):
        super().take(state, row.masked_fill(row < row.topk(20).values[-1], -torch.inf))


class ShiftedByOne(Plain):
    def completion(self, state, finish, stop=None, error=None):
        done = super().completion(state, finish, stop, error)
        return evolve(done, logprobs=np.roll(done.logprobs, 1))


class StopTokenLeftOut(Plain):
    def completion(self, state, finish, stop=None, error=None):
        done = super().completion(state, finish, stop, error)
        length = len(done.token_ids) - (isinstance(stop, int))
        starts = done.versions.starts[done.versions.starts < length]
        spans = VersionSpans(starts, done.versions.versions[: len(starts)])
        return evolve(done, token_ids=done.token_ids[:length], logprobs=done.logprobs[:length], versions=spans)


class TemperatureOfTheFirst(Plain):
    """Takes one temperature for all that is sampled together."""

    def take(self, state, row):
        first = next(iter(self.states.values())).request.sampling.temperature
        sampling = evolve(state.request.sampling, temperature=first)
        super().take(evolve(state, request=evolve(state.request, sampling=sampling), tokens=state.tokens), row)


class StopsOfTheFirst(Plain):
    """Takes the stop tokens of one request for those of all."""

    def stops(self, request):
        states = [state for state in self.states.values() if not state.request.sampling.min_tokens]
        return super().stops(states[0].request if states else request)


class CutsLikeTheFirst(Plain):
    """Cuts all that is sampled together by one top_k."""

    description = evolve(Plain.description, capabilities=Plain.description.capabilities | {"filters"})

    def take(self, state, row):
        most = next(iter(self.states.values())).request.sampling.top_k or VOCABULARY
        super().take(state, torch.where(row >= row.topk(most).values[-1], row, -torch.inf))


class OneTooMany(Plain):
    def ends(self, state):
        finish, stop = super().ends(state)
        return (None, None) if finish == "length" and len(state.tokens) == state.request.sampling.max_tokens else (finish, stop)


class GroupsShareASeed(Plain):
    def seed(self, request):
        return request.seed if request.prefix_group is None else request.prefix_group


class SeedOfTheBatch(Plain):
    """One stream of numbers for all that is sampled together."""

    def step(self):
        stream = np.random.default_rng(sum(self.states))
        for state in self.states.values():
            state.draws = stream
        return super().step()


class TakesTheMostLikely(Plain):
    def draw(self, state, scaled):
        return int(scaled.argmax())


class LengthComesFirst(Plain):
    """Ends as "length" where the last of max_tokens stops the request."""

    def ends(self, state):
        finish, stop = super().ends(state)
        return ("length", None) if len(state.tokens) == state.request.sampling.max_tokens else (finish, stop)


class Filtering(Plain):
    """Right: cuts the distribution off."""

    description = evolve(Plain.description, capabilities=Plain.description.capabilities | {"filters"})

    def take(self, state, row):
        super().take(state, self.cut(row, state.request.sampling) if state.request.sampling.temperature else row)

    def cut(self, row, sampling):
        """Return logits of which those that are cut off are minus infinity."""
        temperature = sampling.temperature or 1.0
        row = row / temperature
        order = row.argsort(descending=True)
        left = row[order].softmax(-1)
        if sampling.top_k:
            left[sampling.top_k :] = 0
        left /= left.sum()
        left[left.cumsum(-1) - left >= sampling.top_p] = 0
        left[left < self.least(sampling) * left[0]] = 0
        scores = torch.full_like(row, -torch.inf)
        scores[order] = left.log()
        return scores.log_softmax(-1) * temperature

    def least(self, sampling):
        return sampling.min_p


class LosesMinPBesideTopP(Filtering):
    def least(self, sampling):
        return sampling.min_p if sampling.top_p == 1 else 0.0


class LosesTopKBesideTheOthers(Filtering):
    def take(self, state, row):
        sampling = state.request.sampling
        if sampling.top_k and sampling.top_p < 1:
            sampling = evolve(sampling, top_k=0)
        super().take(evolve(state, request=evolve(state.request, sampling=sampling), tokens=state.tokens), row)


class CutsByTopPFirst(Filtering):
    """Applies top_p to the whole distribution, and then top_k."""

    def take(self, state, row):
        sampling = state.request.sampling
        if sampling.top_k and sampling.top_p < 1:
            order = row.argsort(descending=True)
            left = (row[order] / (sampling.temperature or 1.0)).softmax(-1)
            count = int((left.cumsum(-1) - left < sampling.top_p).sum())
            sampling = evolve(sampling, top_k=min(count, sampling.top_k), top_p=1.0)
        super().take(evolve(state, request=evolve(state.request, sampling=sampling), tokens=state.tokens), row)


class TemperatureAFifthTooHigh(Plain):
    def draw(self, state, scaled):
        return super().draw(state, scaled / 1.25)


class StopsInTheMiddle(Plain):
    """Looks for stop strings in the last token alone."""

    def ends(self, state):
        finish, stop = super().ends(state)
        if isinstance(stop, str) and stop not in self.tokenizer.decode(state.tokens[-1:]):
            return ("length", None) if len(state.tokens) >= state.request.sampling.max_tokens else (None, None)
        return finish, stop


class FirstEndTokenOnly(Plain):
    def stops(self, request):
        return {*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else self.start_values.eos_token_ids[:1])}


class CutsMaxTokensDown(Plain):
    def submit(self, requests):
        room = [LIMIT - len(request.prompt_ids) for request in requests]
        cut = [
            evolve(request, sampling=evolve(request.sampling, max_tokens=min(request.sampling.max_tokens, max(1, left))))
            for request, left in zip(requests, room, strict=True)
        ]
        super().submit(cut)


class TakesAnyToken(Plain):
    def submit(self, requests):
        known = [
            evolve(request, prompt_ids=np.clip(request.prompt_ids, 0, VOCABULARY - 1))
            for request in requests
            if len(request.prompt_ids)
        ]
        super().submit(known)


class SamplesAtZero(Plain):
    def take(self, state, row):
        super().take(state, row)
        if state.request.sampling.temperature == 0:
            state.tokens[-1] = self.draw(state, row)


class DrawsGlobally(Plain):
    def draw(self, state, scaled):
        torch.rand(1)
        return super().draw(state, scaled)


class WrongSpans(Plain):
    def completion(self, state, finish, stop=None, error=None):
        done = super().completion(state, finish, stop, error)
        return evolve(done, versions=VersionSpans(done.versions.starts + 1, done.versions.versions))


class FilterIgnored(Plain):
    description = evolve(Plain.description, capabilities=Plain.description.capabilities | {"filters"})


class PromptScoresFromZero(Plain):
    """Gives the first token a log-probability, and the others those of their successors."""

    description = evolve(Plain.description, capabilities=Plain.description.capabilities | {"prompt_logprobs"})

    def completion(self, state, finish, stop=None, error=None):
        count = len(state.request.prompt_ids)
        return evolve(super().completion(state, finish, stop, error), prompt_logprobs=np.zeros(count, dtype=np.float32))


class NoTopScores(Plain):
    description = evolve(Plain.description, capabilities=Plain.description.capabilities | {"top_logprobs"})


class TopScoresBehindThePlace(Plain):
    """Gives at every place of a prompt what may follow its token, and not what may take its place."""

    description = evolve(Plain.description, capabilities=Plain.description.capabilities | {"top_prompt_logprobs"})

    @torch.inference_mode()
    def completion(self, state, finish, stop=None, error=None):
        ids = torch.from_numpy(state.request.prompt_ids.astype(np.int64))[None]
        scaled = self.logits([state], ids)[0] / (state.request.sampling.temperature or 1.0)
        most = scaled.log_softmax(-1).topk(max(1, state.request.top_prompt_logprobs))
        values = most.values.numpy().astype(np.float32)
        values[0] = np.nan
        top = TopLogprobs(most.indices.numpy().astype(np.int32), values)
        return evolve(super().completion(state, finish, stop, error), top_prompt_logprobs=top)


class SameNumberForEveryToken(Plain):
    """Every token of a request is drawn with the first number of its seed: each follows the distribution, and not the ones before it."""

    def draw(self, state, scaled):
        state.draws = np.random.default_rng(self.seed(state.request))
        return super().draw(state, scaled)


class SeedsOf16Bits(Plain):
    def seed(self, request):
        return request.seed % 2**16


class SeedsOf32Bits(Plain):
    def seed(self, request):
        return request.seed % 2**32


class MinTokensOfEndsAlone(Plain):
    """Stop tokens of a request stop it from the first token on."""

    def ends(self, state):
        if state.tokens[-1] in state.request.sampling.stop_token_ids:
            return "stop", state.tokens[-1]
        return super().ends(state)


class KnowsItsIds(Plain):
    def abort(self, request_ids=None):
        for number in request_ids or ():
            assert number in self.states, "no such request"
        super().abort(request_ids)


class WantsRoomForOneMore(Plain):
    def submit(self, requests):
        super().submit(requests)
        for request in requests:
            state = self.states.get(request.request_id)
            if state is not None and len(request.prompt_ids) + request.sampling.max_tokens == LIMIT:
                del self.states[request.request_id]
                self.ready.append(self.completion(state, "error", error=f"{len(request.prompt_ids)} tokens of {LIMIT}"))


class EightAtMost(Plain):
    """Refuses what it could keep waiting."""

    def submit(self, requests):
        if len(requests) + len(self.states) > 8:
            raise ContractError("there are more than eight requests", remedy="Send fewer")
        super().submit(requests)


class OneRowAtATime(Plain):
    """Odd and right: samples request after request, each to its end."""

    def step(self):
        states, first = self.states, next(iter(self.states))
        self.states = {first: states[first]}
        done = super().step()
        self.states = {**self.states, **{number: state for number, state in states.items() if number != first}}
        return done


class LastComesFirst(Plain):
    """Odd and right: answers in the order opposite to that in which requests came."""

    def step(self):
        self.states = dict(reversed(self.states.items()))
        return super().step()[::-1]


class IgnoresTemperature(Plain):
    """Samples at temperature 1, and reports what is due at the request's."""

    def draw(self, state, scaled):
        return super().draw(state, scaled * state.request.sampling.temperature)


class TemperatureTwice(Plain):
    def draw(self, state, scaled):
        return super().draw(state, scaled / state.request.sampling.temperature)


class IgnoresTemperatureLater(Plain):
    """Samples at temperature 1 in later turns of a session."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def draw(self, state, scaled):
        session, prompt = state.request.session, len(state.request.prompt_ids)
        later = prompt > self.known.setdefault(session, prompt)
        return super().draw(state, scaled * state.request.sampling.temperature if later else scaled)


class ReadsTheLast(Plain):
    """Reads so many tokens of a row, the last ones."""

    window = 64

    def logits(self, states, ids):
        logits = super().logits(states, ids).clone()
        for place, state in enumerate(states):
            end = len(state.request.prompt_ids) + len(state.tokens)
            if end > self.window:
                model = self.models[state.request.target]
                logits[place, end - 1] = model(input_ids=ids[place : place + 1, end - self.window : end], use_cache=False).logits[
                    0, -1
                ]
        return logits


class ReadsTheLast32(ReadsTheLast):
    window = 32


class ReadsTheLast100(ReadsTheLast):
    window = 100


class ReadsTheLast128(ReadsTheLast):
    window = 128


class ReadsTheLast256(ReadsTheLast):
    window = 256


class ReadsTheLast512(ReadsTheLast):
    window = 512
