"""Generators that are wrong about what they draw: temperatures, filters, seeds, and what a row holds."""

import numpy as np
import torch
from attrs import evolve
from wrong_generators import Filtering, Plain, ReadsTheLast

# --- temperatures ------------------------------------------------------------------------------------------------------------------


class ClampsTemperature(Plain):
    """Draws at temperatures between `least` and `most`, and reports what is due."""

    least, most = 0.5, 2.0

    def at(self, temperature):
        return min(max(temperature, self.least), self.most)

    def draw(self, state, scaled):
        temperature = state.request.sampling.temperature
        return super().draw(state, scaled * temperature / self.at(temperature))


class ClampsTemperatureBelow(ClampsTemperature):
    most = np.inf


class ClampsTemperatureAbove(ClampsTemperature):
    least = 0.0


class RoundsTemperature(ClampsTemperature):
    def at(self, temperature):
        return round(temperature, 1) or temperature


class ReportsAtQuarters(Plain):
    """Draws as asked, and reports log-probabilities at temperatures that are rounded to quarters."""

    def take(self, state, row):
        self.asked = state.request.sampling.temperature
        super().take(state, row)

    def score(self, row, scaled, token):
        return float((row / (max(1, round(self.asked * 4)) / 4 if self.asked else 1.0)).log_softmax(-1)[token])


class PenalizesRepeats(Plain):
    """Draws with the repetition penalty of a generation configuration, and reports what is due."""

    def draw(self, state, scaled):
        held = torch.tensor(sorted({*state.request.prompt_ids.tolist(), *state.tokens}))
        penalized = scaled.clone()
        penalized[held] = torch.where(scaled[held] > 0, scaled[held] / 1.15, scaled[held] * 1.15)
        return super().draw(state, penalized)


class NeverTheLastToken(Plain):
    """Draws from all tokens but the last one of the vocabulary."""

    def draw(self, state, scaled):
        return super().draw(state, torch.cat([scaled[:-1], scaled.new_full((1,), -torch.inf)]))


class ReadsTheLastToDraw(ReadsTheLast):
    """Draws from what follows the last 64 tokens of long rows, and is right about log-probabilities and greedy requests."""

    def logits(self, states, ids):
        self.windowed = super().logits(states, ids)
        self.places = {state.request.request_id: place for place, state in enumerate(states)}
        return Plain.logits(self, states, ids)

    def draw(self, state, scaled):
        request = state.request
        windowed = self.windowed[self.places[request.request_id], len(request.prompt_ids) + len(state.tokens) - 1]
        return super().draw(state, windowed.double() / request.sampling.temperature)


class LongScoresAtOne(Plain):
    """Reports log-probabilities at temperature 1 in rows of more than 100 tokens."""

    def take(self, state, row):
        super().take(state, row)
        if len(state.request.prompt_ids) > 100:
            state.logprobs[-1] = float(row.log_softmax(-1)[state.tokens[-1]])


# --- filters -----------------------------------------------------------------------------------------------------------------------


class GreedyUnderFilters(Filtering):
    """Takes the most likely token of what is left, and reports the right log-probability."""

    def draw(self, state, scaled):
        return int(scaled.argmax()) if state.request.sampling.filtered else super().draw(state, scaled)


class TakesAllAlike(Filtering):
    """Draws each token of what is left as often as any other."""

    def draw(self, state, scaled):
        return super().draw(state, torch.where(scaled > -1e9, 0.0, -torch.inf) if state.request.sampling.filtered else scaled)


class NotRenormalised(Filtering):
    """Draws from what is left as if its mass was 1: what lacks goes to the last token."""

    def take(self, state, row):
        self.whole = (row / (state.request.sampling.temperature or 1.0)).softmax(-1)
        super().take(state, row)

    def draw(self, state, scaled):
        if not state.request.sampling.filtered:
            return super().draw(state, scaled)
        order = scaled.argsort(descending=True)[: int((scaled > -1e9).sum())]
        running = self.whole[order].cumsum(-1)
        return int(order[min(int(torch.searchsorted(running, state.draws.random(), right=True)), len(order) - 1)])


class CutsByMinPFirst(Filtering):
    """Applies min_p before top_p, as vLLM does."""

    def take(self, state, row):
        sampling = state.request.sampling
        if sampling.min_p and sampling.top_p < 1:
            scaled = row / (sampling.temperature or 1.0)
            row = row.masked_fill(scaled < scaled.max() + np.log(sampling.min_p), -torch.inf)
            sampling = evolve(sampling, min_p=0.0)
        super().take(evolve(state, request=evolve(state.request, sampling=sampling), tokens=state.tokens), row)


class CutsBeforeItDivides(Filtering):
    """Cuts softmax(logits) off where the temperature is below 1, and divides by it then."""

    def take(self, state, row):
        sampling = state.request.sampling
        if not sampling.filtered or not 0 < sampling.temperature < 1:
            super().take(state, row)
            return
        candidates = self.cut(row, evolve(sampling, temperature=1.0))
        Plain.take(self, state, row.masked_fill(candidates == -torch.inf, -torch.inf))


class CutsAtZero(Filtering):
    """Reports, at temperature 0, log-probabilities of what filters would leave."""

    def take(self, state, row):
        Plain.take(self, state, self.cut(row, state.request.sampling))


# --- seeds -------------------------------------------------------------------------------------------------------------------------


class SeedPlusPlace(Plain):
    """Draws the n-th token of seed s as the first one of seed s + n."""

    def draw(self, state, scaled):
        state.draws = np.random.default_rng((self.seed(state.request) + len(state.tokens)) % 2**64)
        return super().draw(state, scaled)


class SeedsOfFloat64(Plain):
    def seed(self, request):
        return int(float(request.seed))


class SeedsOfFloat32(Plain):
    def seed(self, request):
        return int(np.float32(request.seed))


class SeedsOf61Bits(Plain):
    def seed(self, request):
        return request.seed % 2**61


class SeedWithTheId(Plain):
    def seed(self, request):
        return (request.seed + request.request_id * 2**32) % 2**64


class SeedWithTheSession(Plain):
    def seed(self, request):
        return (request.seed + request.session * 2**32) % 2**64


class SeedWithTheVersion(Plain):
    def seed(self, request):
        return (request.seed + self.versions[request.target] * 2**32) % 2**64


class SeedWithTheStep(Plain):
    """Counts the steps that it has made: what is drawn depends on when."""

    made = 0

    def step(self):
        self.made += 1
        return super().step()

    def draw(self, state, scaled):
        state.draws = np.random.default_rng((self.seed(state.request) + self.made) % 2**64)
        return super().draw(state, scaled)
