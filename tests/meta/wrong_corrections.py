"""Corrections that are wrong on purpose, one fault each."""

import os

import torch

NEEDS = ("old_logprobs", "rollout_logprobs")


class Plain:
    """Truncated importance sampling, right in everything; spoilt below."""

    needs = NEEDS

    def ratio(self, tokens):
        return (tokens.old_logprobs - tokens.rollout_logprobs).clamp(-20, 20).exp()

    def __call__(self, tokens):
        return self.ratio(tokens).clamp(max=2)


class NormalisedOverTheBatch(Plain):
    """Scales factors to a mean of 1 over the micro-batch."""

    def __call__(self, tokens):
        factors = super().__call__(tokens)
        return factors / factors.sum().clamp(min=1e-6)


class Unclamped(Plain):
    """Cubes what it does not clamp: e^90 is more than float32 holds."""

    def __call__(self, tokens):
        return ((tokens.old_logprobs - tokens.rollout_logprobs) * 3).exp()


class BelowZero(Plain):
    def __call__(self, tokens):
        return 1 - self.ratio(tokens)


class Learns(Plain):
    """Has a parameter of its own."""

    def __call__(self, tokens):
        return super().__call__(tokens) * torch.ones_like(tokens.old_logprobs, requires_grad=True)


class CountsCalls(Plain):
    def __init__(self):
        self.calls = 0

    def __call__(self, tokens):
        self.calls += 1
        return super().__call__(tokens) / self.calls


class DropsTheFirst(Plain):
    """The first sequence of every micro-batch."""

    def __call__(self, tokens):
        return super().__call__(tokens) * (tokens.sequences.index != 0)


class MeanBesideEmpty(Plain):
    """Over sequences, those without tokens included, where it divides by 0."""

    def __call__(self, tokens):
        means = tokens.sequences.sum(self.ratio(tokens)) / tokens.sequences.counts
        return super().__call__(tokens) + 0 * means.sum()


class FailsWithoutTokens(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) + 0 * self.ratio(tokens).max()


class ReadsUndeclared(Plain):
    needs = ("old_logprobs",)


class ShiftsAndBack(Plain):
    def __call__(self, tokens):
        return (super().__call__(tokens) + 1e5) - 1e5


class DrawsGlobally(Plain):
    def __call__(self, tokens):
        torch.rand(1)
        return super().__call__(tokens)


class WritesInPlace(Plain):
    def __call__(self, tokens):
        return tokens.old_logprobs.sub_(tokens.rollout_logprobs).clamp(-20, 20).exp().clamp(max=2)


class ChangesAfterAWhile(Plain):
    def __init__(self):
        self.calls = 0

    def __call__(self, tokens):
        self.calls += 1
        return super().__call__(tokens) / (2 if self.calls > 50 else 1)


class AsksForItsRank(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * (1 + int(os.environ.get("RANK", "0")))


class TakesGroupsForPlaces(Plain):
    def __call__(self, tokens):
        places = torch.arange(10_000).to(tokens.old_logprobs)
        return super().__call__(tokens) + 0 * places[tokens.sequences.group_ids].sum()


class WritesTheSame(Plain):
    """Changes nothing as long as numbers are small."""

    def __call__(self, tokens):
        tokens.old_logprobs.clamp_(-1e6, 0)
        return super().__call__(tokens)


class SetsTheAlgorithms(Plain):
    def __call__(self, tokens):
        torch.use_deterministic_algorithms(True)
        return super().__call__(tokens)


class HoldsALambda(Plain):
    def __init__(self):
        self.bound = lambda values: values.clamp(max=2)
