"""Generators that claim batch invariance, with log-probabilities that tell what was sampled before or with a request."""

import numpy as np
from attrs import evolve
from wrong_generators import OneRowAtATime, Plain

CLAIM = evolve(Plain.description, capabilities=Plain.description.capabilities | {"batch_invariant"})


class AloneAndInvariant(OneRowAtATime):
    """Right: computes every row by itself."""

    description = CLAIM


class RoundsOtherwise(AloneAndInvariant):
    """Log-probabilities of some rows are off in the last bit, as sums are that are added up in another order."""

    def completion(self, state, finish, stop=None, error=None):
        done = super().completion(state, finish, stop, error)
        if len(done.logprobs) and self.differs(state):
            done.logprobs[-1] = np.nextafter(done.logprobs[-1], np.float32(-1e9))
        return done


class TellsTheCount(RoundsOtherwise):
    """Its kernel follows from how many rows are computed together."""

    def step(self):
        self.count = len(self.states)
        return super().step()

    def differs(self, state):
        return self.count > 8


class TellsTheLongest(RoundsOtherwise):
    """Rows are computed at the width of the longest, from 192 places on by another kernel."""

    def step(self):
        self.widest = max(len(state.request.prompt_ids) for state in self.states.values())
        return super().step()

    def differs(self, state):
        return len(state.request.prompt_ids) < 192 <= self.widest


class TellsTheFirstTurn(RoundsOtherwise):
    """A session that it knows goes on from what it computed then, one that it does not know is read again."""

    def __init__(self):
        super().__init__()
        self.lengths = {}

    def differs(self, state):
        length = len(state.request.prompt_ids)
        return length > self.lengths.setdefault(state.request.session, length)


class TellsTheOrder(RoundsOtherwise):
    """The first of several requests that are sent together is read by another kernel."""

    first = None

    def submit(self, requests):
        self.first = requests[0].request_id if len(requests) > 1 else None
        super().submit(requests)

    def differs(self, state):
        return state.request.request_id == self.first


class TellsThePrompt(RoundsOtherwise):
    """A prompt that another row has too is copied, and not read."""

    def __init__(self):
        super().__init__()
        self.copied = set()

    def submit(self, requests):
        prompts = [state.request.prompt_ids.tobytes() for state in self.states.values()]
        for request in requests:
            if (prompt := request.prompt_ids.tobytes()) in prompts:
                self.copied.add(request.request_id)
            prompts.append(prompt)
        super().submit(requests)

    def differs(self, state):
        return state.request.request_id in self.copied


class OtherTokens(AloneAndInvariant):
    """Draws with other numbers where several requests are sent together."""

    def submit(self, requests):
        super().submit([evolve(request, seed=request.seed + 1) for request in requests] if len(requests) > 4 else requests)


class InOneBatch(Plain):
    """Claims it, and reads all rows together in float32, at the width of the longest."""

    description = CLAIM
