"""Generators that keep keys and values of a session until its next turn, all but one of them wrongly."""

import inspect
from copy import deepcopy
from itertools import pairwise

import torch
from attrs import define, evolve
from transformers import DynamicCache
from wrong_generators import Plain


@define(eq=False)
class Kept:
    """A row that was read, and its keys and values."""

    ids: list
    cache: object


class KeepsCaches(Plain):
    """Odd and right: a row that begins with all that is kept of its session reads what comes after that."""

    description = evolve(Plain.description, capabilities=Plain.description.capabilities | {"prefix_reuse"})

    def __init__(self):
        super().__init__()
        self.kept = {}

    def key(self, request):
        return request.target, request.session

    def logits(self, states, ids):
        logits = torch.zeros(*ids.shape, self.models["policy"].config.vocab_size)
        for place, state in enumerate(states):
            row = [*state.request.prompt_ids.tolist(), *state.tokens]
            logits[place, len(row) - 1] = self.read(state.request, row)
        return logits

    def read(self, request, row):
        key = self.key(request)
        kept = self.kept.get(key)
        if kept is None or not self.continues(kept, row):
            kept = Kept([], DynamicCache())
        new = torch.tensor([row[len(kept.ids) :]])
        model = self.models[request.target]
        # its name before transformers 5.24
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        logits = model(input_ids=new, use_cache=True, **{name: kept.cache}).logits[0, -1]
        self.kept[key] = Kept(row, kept.cache)
        return logits

    def continues(self, kept, row):
        return len(kept.ids) < len(row) and row[: len(kept.ids)] == kept.ids

    def update(self, weights, version, target="policy"):
        super().update(weights, version, target)
        self.kept = {key: kept for key, kept in self.kept.items() if key[0] != target}

    def end_sessions(self, sessions):
        self.kept = {key: kept for key, kept in self.kept.items() if key[1] not in sessions}


class Sleeps(KeepsCaches):
    """Odd and right: it sleeps, and forgets its weights and all that it kept."""

    description = evolve(KeepsCaches.description, capabilities=KeepsCaches.description.capabilities | {"sleep"})

    def sleep(self):
        self.kept = {}
        self.models = dict.fromkeys(self.models)


class WakesWithWhatItHad(Sleeps):
    """Its first update after sleep gives it the weights again that it had."""

    slept = None

    def sleep(self):
        self.slept = dict(self.models)
        super().sleep()

    def update(self, weights, version, target="policy"):
        super().update(weights, version, target)
        if self.slept is not None:
            self.models, self.slept = self.slept, None


class OneTokenShort(KeepsCaches):
    """Its kept rows count the last sampled token, which no step has read."""

    def completion(self, state, finish, stop=None, error=None):
        kept = self.kept.get(self.key(state.request))
        if kept is not None and state.tokens:
            kept.ids = [*kept.ids, state.tokens[-1]]
        return super().completion(state, finish, stop, error)


class KeepsOneShort(KeepsCaches):
    """Its kept rows lack the keys and values of their last token: the next turn's are one place too early."""

    def completion(self, state, finish, stop=None, error=None):
        kept = self.kept.get(self.key(state.request))
        if kept is not None:
            kept.cache.crop(-1)
        return super().completion(state, finish, stop, error)


class OfItsNeighbour(KeepsCaches):
    """Rows that end in one step at one length keep one another's keys and values: the first took another slot before they were saved."""

    def step(self):
        sent = {state.request.request_id: state.request for state in self.states.values()}
        done = super().step()
        ended = [self.kept[self.key(sent[completion.request_id])] for completion in done]
        for one, other in pairwise(ended):
            if len(one.ids) == len(other.ids):
                one.cache, other.cache = other.cache, one.cache
        return done


class GoesOnByLength(KeepsCaches):
    """Asks neither for the tokens of what is kept nor whether its session ended."""

    def continues(self, kept, row):
        return len(kept.ids) < len(row)

    end_sessions = None


class OfPreviousWeights(KeepsCaches):
    """Reads rows under way again after an update; what it keeps of sessions between their turns stays."""

    def update(self, weights, version, target="policy"):
        kept = self.kept
        super().update(weights, version, target)
        under_way = {self.key(state.request) for state in self.states.values()}
        self.kept = {key: row for key, row in kept.items() if key not in under_way}


class OfTheWeightsBefore(KeepsCaches):
    """Reads rows under way again after an update, and keeps for their next turns what had been read before it."""

    def __init__(self):
        super().__init__()
        self.before = {}

    def update(self, weights, version, target="policy"):
        under_way = {self.key(state.request) for state in self.states.values()}
        self.before |= {key: deepcopy(kept) for key, kept in self.kept.items() if key in under_way}
        super().update(weights, version, target)

    def completion(self, state, finish, stop=None, error=None):
        key = self.key(state.request)
        if key in self.before:
            self.kept[key] = self.before.pop(key)
        return super().completion(state, finish, stop, error)


class OfAnyTarget(KeepsCaches):
    """Its kept sessions serve every weight set."""

    def key(self, request):
        return "policy", request.session
