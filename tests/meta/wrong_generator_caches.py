"""Generators that reuse what was computed of other tokens or other weights, and lose what a cache does not hold."""

import numpy as np
import torch
from attrs import evolve
from wrong_generators import Plain

from skyrl_engine.contracts import TopLogprobs


class ReusesByLength(Plain):
    """A prompt that it computed under a key stands for the beginning of every later row of that key, whatever its tokens are."""

    def __init__(self):
        super().__init__()
        self.known, self.reused = {}, {}

    def key(self, request):
        return len(request.prompt_ids)

    def logits(self, states, ids):
        ids = ids.clone()
        for place, state in enumerate(states):
            key, length = self.key(state.request), len(state.request.prompt_ids)
            if key is None:
                continue
            row = ids[place, : length + len(state.tokens)].clone()
            if not state.tokens and key in self.known:
                self.reused[state.request.request_id] = self.known[key][: length - 1]
            reused = self.reused.get(state.request.request_id, row[:0])
            ids[place, : len(reused)] = reused
            self.known[key] = row
        return super().logits(states, ids)


class ReusesBySession(ReusesByLength):
    def key(self, request):
        return request.session


class ReusesByGroup(ReusesByLength):
    def key(self, request):
        return request.prefix_group


class KeepsOneStale(Plain):
    """Takes an update but for the parameters whose names end so."""

    stale = ""

    def update(self, weights, version, target="policy"):
        model = self.models.get(target)
        copies = (
            {name: parameter.detach().clone() for name, parameter in model.named_parameters() if name.endswith(self.stale)}
            if model
            else {}
        )
        super().update(weights, version, target)
        with torch.no_grad():
            for name, weight in copies.items():
                self.models[target].get_parameter(name).copy_(weight)


class StaleQueries(KeepsOneStale):
    stale = "1.self_attn.q_proj.weight"


class StaleHead(Plain):
    """Goes on with the head of the first weights: a tied one, which is the embedding too, is copied at the start."""

    def update(self, weights, version, target="policy"):
        super().update(weights, version, target)
        model = self.models[target]
        if not hasattr(self, "head"):
            self.head = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)

    def logits(self, states, ids):
        found = []
        for place, state in enumerate(states):
            model = self.models[state.request.target]
            found.append(model.model(input_ids=ids[place : place + 1], use_cache=False).last_hidden_state[0] @ self.head.T)
        return torch.stack(found)


class TakesTheFirstUpdateAlone(Plain):
    def update(self, weights, version, target="policy"):
        if self.versions.get(target, 0) > 0:
            self.versions[target] = version
        else:
            super().update(weights, version, target)


class CountsVersionsItself(Plain):
    """Adds 1 for every update."""

    def update(self, weights, version, target="policy"):
        super().update(weights, self.versions[target] + 1 if target in self.versions else version, target)


class UpdatesReachEveryTarget(Plain):
    """The policy's new weights are written into the other sets too."""

    def update(self, weights, version, target="policy"):
        super().update(weights, version, target)
        if target == "policy":
            for other in self.models.keys() - {"policy"}:
                self.models[other] = self.models["policy"]


class ScoresOfAbortedLost(Plain):
    def completion(self, state, finish, stop=None, error=None):
        done = super().completion(state, finish, stop, error)
        return evolve(done, logprobs=np.zeros_like(done.logprobs)) if finish == "abort" else done


class EndScoreLost(Plain):
    """Gives the token that stops a request no log-probability."""

    def completion(self, state, finish, stop=None, error=None):
        done = super().completion(state, finish, stop, error)
        if finish == "stop" and isinstance(stop, int):
            done.logprobs[-1] = 0.0
        return done


class StringScoreLost(Plain):
    """Gives the token that completes a stop string no log-probability."""

    def completion(self, state, finish, stop=None, error=None):
        done = super().completion(state, finish, stop, error)
        if isinstance(stop, str):
            done.logprobs[-1] = 0.0
        return done


class StringsComeFirst(Plain):
    """Stop strings stop before min_tokens."""

    def ends(self, state):
        text = self.tokenizer.decode(state.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        stopping = next((each for each in state.request.sampling.stop_strings if each in text), None)
        return ("stop", stopping) if stopping is not None else super().ends(state)


class HearsThePrompt(Plain):
    """Looks for stop strings in the text of prompt and tokens."""

    def ends(self, state):
        row = [*state.request.prompt_ids.tolist(), *state.tokens]
        text = self.tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if len(state.tokens) >= state.request.sampling.min_tokens:
            for string in state.request.sampling.stop_strings:
                if string in text:
                    return "stop", string
        return super().ends(state)


class PromptScores(Plain):
    """Right: scores prompts."""

    description = evolve(Plain.description, capabilities=Plain.description.capabilities | {"prompt_logprobs"})

    @torch.inference_mode()
    def completion(self, state, finish, stop=None, error=None):
        done = super().completion(state, finish, stop, error)
        if not state.request.prompt_logprobs or finish == "error":
            return done
        ids = torch.from_numpy(state.request.prompt_ids.astype(np.int64))[None]
        scaled = self.logits([state], ids)[0] / (state.request.sampling.temperature or 1.0)
        own = scaled.double().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        return evolve(done, prompt_logprobs=self.scored(state.request, np.append(np.nan, own).astype(np.float32)))

    def scored(self, request, scores):
        return scores


class ScoresOfKnownPromptsLost(PromptScores):
    """Has no scores of a prompt that it has read before: its cache holds none."""

    def __init__(self):
        super().__init__()
        self.read = set()

    def submit(self, requests):
        self.new = {}
        for request in requests:
            self.new[request.request_id] = request.prompt_ids.tobytes() not in self.read
            self.read.add(request.prompt_ids.tobytes())
        super().submit(requests)

    def scored(self, request, scores):
        return scores if self.new.get(request.request_id) else np.full_like(scores, np.nan)


class TopScoresAtOne(Plain):
    """Gives the most likely tokens with their log-probabilities at temperature 1."""

    description = evolve(Plain.description, capabilities=Plain.description.capabilities | {"top_logprobs"})

    def __init__(self):
        super().__init__()
        self.top = {}

    def take(self, state, row):
        super().take(state, row)
        if state.request.top_logprobs:
            most = self.scaled(state, row).log_softmax(-1).topk(state.request.top_logprobs)
            self.top.setdefault(state.request.request_id, []).append((most.indices.numpy(), most.values.numpy()))

    def scaled(self, state, row):
        return row

    def completion(self, state, finish, stop=None, error=None):
        done = super().completion(state, finish, stop, error)
        if not state.request.top_logprobs:
            return done
        ids, values = zip(*self.top.pop(state.request.request_id), strict=True)
        return evolve(done, top_logprobs=TopLogprobs(np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32)))


class TopScores(TopScoresAtOne):
    """Right."""

    def scaled(self, state, row):
        return row / (state.request.sampling.temperature or 1.0)
