"""Corrections that are wrong on purpose, one fault each."""

import os

import numpy as np
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


class CrashesInTheWordsOfTheEngine(Plain):
    """Its message is one that the engine has for what was returned: verdicts go by types."""

    def __call__(self, tokens):
        raise ValueError("the table returned a factor that declares needs")


class ReadsUndeclared(Plain):
    needs = ("old_logprobs",)


class ShiftsAndBack(Plain):
    def __call__(self, tokens):
        return (super().__call__(tokens) + 1e5) - 1e5


class DrawsGlobally(Plain):
    def __call__(self, tokens):
        torch.rand(1)
        return super().__call__(tokens)


class DropsByChance(Plain):
    """Odd and right: drops tokens by numbers that replicas share."""

    def __call__(self, tokens):
        numbers = torch.rand(len(tokens.old_logprobs), generator=tokens.generator, device=tokens.old_logprobs.device)
        return super().__call__(tokens) * (numbers < 0.9)


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


class UpsideDown(Plain):
    def __call__(self, tokens):
        return 1 / self.ratio(tokens)

    def oracle(self, tokens):
        return self.ratio(tokens)


class OfAnotherToken(Plain):
    """The ratio of the whole sequence where the token's own is due."""

    def __call__(self, tokens):
        return tokens.sequences.broadcast(tokens.sequences.mean(self.ratio(tokens)))

    def oracle(self, tokens):
        return self.ratio(tokens)


class Halves(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens).half().to(tokens.old_logprobs.dtype)


class CorrectionInAByte(Plain):
    def __call__(self, tokens):
        places = torch.arange(len(tokens.old_logprobs), device=tokens.old_logprobs.device)
        first = tokens.sequences.offsets[:-1][tokens.sequences.index]
        return super().__call__(tokens) * 0.99 ** (places - first).to(torch.uint8)


class FarFromTheSampler(Plain):
    def ratio(self, tokens):
        return (tokens.old_logprobs - tokens.rollout_logprobs).clamp(-90, 90).exp()

    def __call__(self, tokens):
        return self.ratio(tokens)


class MaskOfTheCPU(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * torch.ones(len(tokens.old_logprobs))


class CorrectionByNumPy(Plain):
    def __call__(self, tokens):
        return torch.from_numpy(np.minimum(self.ratio(tokens).numpy(), 2))


class MeanOverRanks(Plain):
    def __call__(self, tokens):
        factors = super().__call__(tokens)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return factors


class CorrectionForEight(Plain):
    def __call__(self, tokens):
        room = tokens.old_logprobs.new_zeros(8)[tokens.sequences.index]
        return super().__call__(tokens) + 0 * room


class CorrectionOfFloatIds(Plain):
    def __call__(self, tokens):
        ids = tokens.sequences.unit_ids.to(tokens.old_logprobs.dtype)
        return super().__call__(tokens) / (ids[:, None] == ids).sum(1)[tokens.sequences.index].to(tokens.old_logprobs.dtype)


class CorrectionByHash(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * (1 + hash(b"a salt") % 97)


class CorrectionByUnits(Plain):
    """One factor for a unit, whatever its size and however it is called."""

    def __call__(self, tokens):
        sequences = tokens.sequences
        _, unit = torch.unique(sequences.unit_ids, return_inverse=True)
        sums = sequences.sum((tokens.old_logprobs - tokens.rollout_logprobs).clamp(-20, 20))
        return torch.zeros_like(sums).index_add(0, unit, sums).clamp(-20, 20).exp().clamp(max=2)[unit][sequences.index]


class VetoesTheMicroBatch(Plain):
    """Drops all tokens where one is far from the sampler."""

    def __call__(self, tokens):
        apart = (tokens.old_logprobs - tokens.rollout_logprobs).abs()
        return super().__call__(tokens) * float(not bool((apart > 5).any()))


class DrawsInItsPrecision(Plain):
    """Odd and right: keeps a token with its ratio for a probability; a float64 draws other numbers than a float32."""

    def __call__(self, tokens):
        drawn = torch.rand(
            tokens.old_logprobs.shape,
            generator=tokens.generator,
            dtype=tokens.old_logprobs.dtype,
            device=tokens.old_logprobs.device,
        )
        return (drawn < self.ratio(tokens)).to(tokens.old_logprobs.dtype)
