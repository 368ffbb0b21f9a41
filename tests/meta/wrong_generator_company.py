"""Generators whose log-probabilities tell what was sampled before or with a request, or on how many ranks."""

import numpy as np
import torch
import torch.distributed as dist
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


class OnRanks(Plain):
    """Right: each rank of those that sample together computes the scores of its part of the vocabulary."""

    description = evolve(Plain.description, capabilities=Plain.description.capabilities | {"tensor_parallel"})

    @property
    def rank(self):
        return self.start_values.together.rank if self.start_values.together else 0

    def logits(self, states, ids):
        together, logits = self.start_values.together, super().logits(states, ids)
        return logits if together is None else self.join(logits.chunk(together.size, -1)[together.rank].contiguous(), together)

    def join(self, own, together):
        parts = [torch.empty_like(own) for _ in range(together.size)]
        dist.all_gather(parts, own, group=together.process_group)
        return torch.cat(parts, -1)


class JoinsNothing(OnRanks):
    """A rank samples from its part of the vocabulary."""

    def join(self, own, together):
        parts = [torch.full_like(own, -1e4) for _ in range(together.size)]
        parts[together.rank] = own
        return torch.cat(parts, -1)


class OtherRanksStay(OnRanks):
    """The first rank alone takes updates."""

    def update(self, weights, version, target="policy"):
        if self.rank == 0 or target not in self.models:
            super().update(weights, version, target)


class FirstAloneAnswers(OnRanks):
    """Other ranks compute and return nothing."""

    def poll(self, timeout):
        done = super().poll(timeout)
        return done if self.rank == 0 else []


class SeedOfTheGroup(OnRanks):
    """Draws from a seed that tells how many ranks there are."""

    def seed(self, request):
        return request.seed + (0 if self.start_values.together is None else self.start_values.together.size)
