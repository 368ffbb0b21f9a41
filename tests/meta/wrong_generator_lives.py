"""Generators that are wrong about requests and weights that change on the way: updates, targets, aborts and the end."""

import numpy as np
import torch
from attrs import evolve
from wrong_generators import Plain, State

from skyrl_engine import ContractError, ModelError, UnsupportedError


class VersionOfSubmission(Plain):
    def version_of(self, state):
        return state.submitted


class VersionOfTheEnd(Plain):
    def completion(self, state, finish, stop=None, error=None):
        state.versions = [self.versions[state.request.target]] * len(state.versions)
        return super().completion(state, finish, stop, error)


class AbortLosesPartials(Plain):
    def abort(self, request_ids=None):
        for number in list(self.states) if request_ids is None else request_ids:
            if number in self.states:
                self.ready.append(self.completion(State(self.states.pop(number).request), "abort"))


class Streaming(Plain):
    """Right: it shows the tokens of requests under way."""

    description = evolve(Plain.description, capabilities=Plain.description.capabilities | {"streaming"})

    def read_sampled(self, request_id):
        if request_id not in self.states:
            raise ContractError(f"request {request_id} is not under way", remedy="Ask for another")
        return np.array(self.states[request_id].tokens, dtype=np.int32)


class ShowsTheLastAlone(Streaming):
    def read_sampled(self, request_id):
        return super().read_sampled(request_id)[-1:]


class ShowsNothing(Streaming):
    def read_sampled(self, request_id):
        return super().read_sampled(request_id)[:0]


class ShowsTheAnswered(Streaming):
    def read_sampled(self, request_id):
        return super().read_sampled(request_id) if request_id in self.states else np.ones(1, dtype=np.int32)


class AnswersTwice(Plain):
    def step(self):
        done = super().step()
        return done + done[:1]


class DropsOneOfTwo(Plain):
    """Keeps one completion per step."""

    def step(self):
        return super().step()[-1:]


class StalePrefix(Plain):
    """The logits of a prompt are those of the weights that read it first, for everybody of its group."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def logits(self, states, ids):
        logits = super().logits(states, ids).clone()
        for place, state in enumerate(states):
            group, last = state.request.prefix_group, len(state.request.prompt_ids) - 1
            if group is not None and not state.tokens:
                logits[place, last] = self.known.setdefault((group, state.request.prompt_ids.tobytes()), logits[place, last])
        return logits


class IgnoresUpdates(Plain):
    def update(self, weights, version, target="policy"):
        if target in self.models:
            self.versions[target] = version
        else:
            super().update(weights, version, target)


class TakesEveryTargetForThePolicy(Plain):
    def submit(self, requests):
        super().submit([evolve(request, target="policy") for request in requests])

    def update(self, weights, version, target="policy"):
        super().update(weights, version)

    def release(self, target): ...


class PassesOverUnknownWeights(Plain):
    """Takes the weights whose names it knows."""

    def update(self, weights, version, target="policy"):
        if target not in self.models:
            super().update(weights, version, target)
            return
        known = dict(self.models[target].named_parameters())
        with torch.no_grad():
            for name, weight in weights.tensors():
                if name in known:
                    known[name].copy_(weight)
                else:
                    self.met_unknown(name)
        self.versions[target] = version

    def met_unknown(self, name): ...


class RefusesHalfWay(PassesOverUnknownWeights):
    """Finds a name that it does not know when other weights have changed."""

    def met_unknown(self, name):
        raise ModelError(f"there is no {name}", remedy="Give the weights of this model")


class PolicyAlone(Plain):
    """Odd and right: refuses other weights than the policy's."""

    def update(self, weights, version, target="policy"):
        if target != "policy":
            raise UnsupportedError("there is one set of weights", remedy="Sample from the policy")
        super().update(weights, version)


class TakesSomeBeforeItRefuses(Plain):
    def submit(self, requests):
        for request in requests:
            super().submit([request])


class SlowToClose(Plain):
    """Stands still for as long as the kit's clock says."""

    wait = staticmethod(lambda: None)

    def close(self):
        type(self).wait()


class Silent(Plain):
    """Returns nothing of requests that end at once."""

    def completion(self, state, finish, stop=None, error=None):
        done = super().completion(state, finish, stop, error)
        return evolve(done, logprobs=done.logprobs[:0])


class AbortsEverything(Plain):
    def abort(self, request_ids=None):
        super().abort()


class IgnoresAborts(Plain):
    def abort(self, request_ids=None):
        pass
