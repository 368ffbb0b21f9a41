"""Losses that look right and are wrong in a way of their own, by family."""

import os
import warnings
from functools import cache

import numpy as np
import torch
import wrong_losses
from attrs import define

from skyrl_engine import LossOutput, Metric
from skyrl_engine.contracts import FunctionLoss

TABLE = torch.linspace(1.0, 2.0, 4, dtype=torch.float64)


class MakesAnArange(wrong_losses.Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * (1 + 0 * torch.arange(len(tokens.logprobs)))


class ThroughNumPy(wrong_losses.Plain):
    def __call__(self, tokens):
        clipped = np.clip(tokens.advantages.numpy(), -5, 5)
        return -tokens.logprobs * torch.from_numpy(clipped)


class LooksUpAModulesTable(wrong_losses.Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * TABLE.to(tokens.logprobs.dtype)[:1]


@cache
def _table():
    return torch.ones(1)


class LooksUpACachedTable(wrong_losses.Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * _table().to(tokens.logprobs.dtype)


class ShiftsTheReference(wrong_losses.Plain):
    """Compares each token with the reference's score of the one before."""

    needs = ("logprobs", "advantages", "ref_logprobs")
    places = 1

    def __call__(self, tokens):
        return super().__call__(tokens) + 0.1 * (tokens.logprobs - torch.roll(tokens.ref_logprobs, self.places))


class ShiftsTheReferenceBack(ShiftsTheReference):
    places = -1


class SkipsWhereFar(wrong_losses.Plain):
    """Leaves the whole micro-batch out where one token is far from the old policy."""

    needs = ("logprobs", "advantages", "old_logprobs")

    def __call__(self, tokens):
        apart = (tokens.logprobs - tokens.old_logprobs).detach().abs()
        return super().__call__(tokens) * float(not bool((apart > 5).any()))


class HoldsATable(wrong_losses.Plain):
    def __init__(self):
        self.scale = torch.ones(1)

    def __call__(self, tokens):
        return super().__call__(tokens) * self.scale.to(tokens.logprobs.dtype)


class CallsACollective(wrong_losses.Plain):
    """Does so in a group; alone it does nothing."""

    def __call__(self, tokens):
        count = tokens.logprobs.new_tensor(1.0)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(count)
        return super().__call__(tokens) / count


class ByHandOnTheCPU(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        context.count = len(values)
        return values * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * torch.full((context.count,), 2.0, dtype=gradient.dtype)


class GradientOfTheCPU(wrong_losses.Plain):
    def __call__(self, tokens):
        return ByHandOnTheCPU.apply(super().__call__(tokens))


class ReturnsFromTheCPU(wrong_losses.Plain):
    def __call__(self, tokens):
        return super().__call__(tokens).cpu()


class AddsUpOnTheCPU(wrong_losses.Plain):
    def __call__(self, tokens):
        sums = torch.zeros(len(tokens.sequences), dtype=tokens.logprobs.dtype).index_add(
            0, tokens.sequences.index, tokens.advantages
        )
        return super().__call__(tokens) + 0 * sums[tokens.sequences.index]


class Measured(wrong_losses.Plain):
    def __call__(self, tokens):
        return LossOutput(super().__call__(tokens), {"measured": self.measured(tokens.advantages)})


class CountsAtLeastOne(Measured):
    def measured(self, values):
        return Metric.mean(values.sum(), max(len(values), 1))


class LeastOfNothing(Measured):
    def measured(self, values):
        return Metric.min(values.abs().min() + 1 if len(values) else 0.0)


class LargestOfNothing(Measured):
    def measured(self, values):
        return Metric.max(-1 - values.abs().min() if len(values) else 0.0)


class SumOfNothing(Measured):
    def measured(self, values):
        return Metric.sum(max(len(values), 1))


class Ratios(wrong_losses.Plain):
    needs = ("logprobs", "old_logprobs", "advantages")

    def ratio(self, tokens):
        return (tokens.logprobs - tokens.old_logprobs).clamp(-20, 20).exp()

    def __call__(self, tokens):
        return -self.ratio(tokens) * tokens.advantages

    oracle = __call__


class HalfDetachedRatio(Ratios):
    def __call__(self, tokens):
        ratio = self.ratio(tokens)
        return -(0.5 * ratio + 0.5 * ratio.detach()) * tokens.advantages


class StraightThrough(Ratios):
    """The value of a bound with the slope of what is bounded."""

    def __call__(self, tokens):
        ratio = self.ratio(tokens)
        return -(ratio.clamp(0.8, 1.2).detach() + ratio - ratio.detach()) * tokens.advantages

    def oracle(self, tokens):
        return -self.ratio(tokens).clamp(0.8, 1.2) * tokens.advantages


class TurnedGradient(Ratios):
    def __call__(self, tokens):
        values = super().__call__(tokens)
        return 2 * values.detach() - values


class TripledGradient(Ratios):
    def __call__(self, tokens):
        values = super().__call__(tokens)
        return values.detach() + 3 * (values - values.detach())


class UndetachedAdvantage(wrong_losses.Plain):
    """An advantage made of the critic's values, through which the policy's loss teaches the critic."""

    needs = ("logprobs", "values", "returns")

    def __call__(self, tokens):
        return -tokens.logprobs * (tokens.returns - tokens.values)

    def oracle(self, tokens):
        return -tokens.logprobs * (tokens.returns - tokens.values.detach())


class UnboundedRatio(Ratios):
    def ratio(self, tokens):
        return (tokens.logprobs - tokens.old_logprobs).exp()


class SquaresItsRatio(Ratios):
    def ratio(self, tokens):
        return (tokens.logprobs - tokens.old_logprobs).clamp(-50, 50).exp() ** 2


class WeighsByExpAdvantage(wrong_losses.Plain):
    def __call__(self, tokens):
        return -tokens.logprobs * tokens.advantages.exp()


class RoomForEight(wrong_losses.Plain):
    def __call__(self, tokens):
        counts = tokens.logprobs.new_zeros(8).index_add(0, tokens.sequences.index, torch.ones_like(tokens.logprobs))
        return super().__call__(tokens) + 0 * counts[tokens.sequences.index]


class NanInAUnit(wrong_losses.Plain):
    """The mean over a unit's sequences of each one's mean, which an empty member makes NaN, and no other unit."""

    def __call__(self, tokens):
        sequences = tokens.sequences
        _, unit = torch.unique(sequences.unit_ids, return_inverse=True)
        means = sequences.sum(tokens.advantages) / sequences.counts
        return super().__call__(tokens) + 0 * torch.zeros_like(means).index_add(0, unit, means)[unit][sequences.index]


class UnitsAsFloats(wrong_losses.Plain):
    def __call__(self, tokens):
        ids = tokens.sequences.unit_ids.to(tokens.logprobs.dtype)
        size = (ids[:, None] == ids).sum(1).to(tokens.logprobs.dtype)
        return super().__call__(tokens) / size[tokens.sequences.index]


class UnitsIn32Bits(wrong_losses.Plain):
    def __call__(self, tokens):
        ids = tokens.sequences.unit_ids.int()
        size = (ids[:, None] == ids).sum(1).to(tokens.logprobs.dtype)
        return super().__call__(tokens) / size[tokens.sequences.index]


class DrawsUndeclared(wrong_losses.Plain):
    """Weighs tokens by random numbers, and does not say that it depends on the cut."""

    def __call__(self, tokens):
        numbers = torch.rand(len(tokens.logprobs), generator=tokens.generator, device=tokens.logprobs.device)
        return super().__call__(tokens) * (numbers + 0.5).to(tokens.logprobs.dtype)


class HashesAText(wrong_losses.Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * (1 + hash("a salt") % 97)


@define
class Counter:
    calls: int = 0


def counting(tokens, config):
    config.calls += 1
    return -tokens.logprobs * tokens.advantages


COUNTER = Counter()


def counts_in_its_options():
    return FunctionLoss("counting", counting, COUNTER, wrong_losses.NEEDS)


class LearnsOtherThanItScores(wrong_losses.Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * (1 if tokens.logprobs.requires_grad else 2)


class AsksForTheGradientMode(wrong_losses.Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) + (0 if torch.is_grad_enabled() else 1)


class DifferentiatesInside(wrong_losses.Plain):
    """A penalty on its own slope, which cannot be had where nothing is differentiated."""

    def __call__(self, tokens):
        values = super().__call__(tokens)
        (slope,) = torch.autograd.grad(values.sum(), [tokens.logprobs], create_graph=True)
        return values + 0 * slope


class SetsMatmulPrecision(wrong_losses.Plain):
    def __call__(self, tokens):
        torch.set_float32_matmul_precision("medium")
        return super().__call__(tokens)


class TurnsAnomalyModeOn(wrong_losses.Plain):
    def __call__(self, tokens):
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        return super().__call__(tokens)


class SilencesWarnings(wrong_losses.Plain):
    def __call__(self, tokens):
        warnings.filterwarnings("ignore", "nothing that anybody says")
        return super().__call__(tokens)


class SetsErrorsOfNumPy(wrong_losses.Plain):
    def __call__(self, tokens):
        np.seterr(under="raise")
        return super().__call__(tokens)


class WritesTheEnvironment(wrong_losses.Plain):
    def __call__(self, tokens):
        os.environ["LOSS_WAS_HERE"] = "1"
        return super().__call__(tokens)


class MakesOnesForMany(wrong_losses.Plain):
    """Pads long micro-batches with a tensor of the CPU."""

    def __call__(self, tokens):
        output = super().__call__(tokens)
        return output * torch.ones(len(output)) if len(tokens.sequences) > 20 else output


class HalvesMany(wrong_losses.Plain):
    """Halves what a micro-batch of more than 1,000 tokens adds."""

    def __call__(self, tokens):
        return super().__call__(tokens) * (0.5 if len(tokens.logprobs) > 1_000 else 1.0)


class DeviationOfSeveral(wrong_losses.Plain):
    """A deviation counts once for a micro-batch of two tokens or more, and a single token reports nothing."""

    def __call__(self, tokens):
        worth = tokens.advantages.detach()
        spread = {"spread": Metric.mean(worth.std(), 1)} if len(worth) > 1 else {}
        return LossOutput(super().__call__(tokens), spread)


class MeasuresTheFewest(wrong_losses.Plain):
    """A metric of micro-batches of three tokens at most, which the whole does not have."""

    def __call__(self, tokens):
        count = len(tokens.logprobs)
        return LossOutput(super().__call__(tokens), {"few": Metric.sum(count)} if 0 < count <= 3 else {})


class MeasuresInTrainingAlone(wrong_losses.Plain):
    """Its metrics are missing from evaluations."""

    def __call__(self, tokens):
        values = super().__call__(tokens)
        if not tokens.logprobs.requires_grad:
            return values
        return LossOutput(values, {"worth": Metric.mean(tokens.advantages.sum(), len(tokens.advantages))})


class DividesTheTeachersRest(wrong_losses.Plain):
    """KL over k tokens and all others as one, where k tokens may have all of the probability."""

    needs = ("logprobs_at:teacher_ids", "teacher_logprobs[k]")

    def __call__(self, tokens):
        teacher, model = tokens.teacher_logprobs, tokens.logprobs_at("teacher_ids")
        rest, others = (self.rest(side) for side in (teacher, model))
        return (teacher.exp() * (teacher - model)).sum(-1) + rest * (rest.log() - others.log())

    def rest(self, logprobs):
        return 1 - logprobs.exp().sum(-1)


class BoundsTheTeachersRest(DividesTheTeachersRest):
    """Right."""

    def rest(self, logprobs):
        return super().rest(logprobs).clamp(min=1e-6)


class RemembersItsMeans(wrong_losses.Plain):
    """Keeps a tensor of one number of every call."""

    def __init__(self):
        self.means = []

    def __call__(self, tokens):
        values = super().__call__(tokens)
        self.means.append(values.detach().mean())
        return values


class DividesByTheLongest(wrong_losses.Plain):
    def __call__(self, tokens):
        counts = tokens.sequences.counts
        longest = counts.max().clamp(min=1) if len(counts) else 1
        return super().__call__(tokens) * (counts / longest)[tokens.sequences.index].to(tokens.logprobs.dtype)


class SubtractsTheLargest(wrong_losses.Plain):
    def __call__(self, tokens):
        values = super().__call__(tokens)
        return values - (tokens.advantages.max() if len(values) else 0)


class BoundedForward(torch.autograd.Function):
    """The backward forgets the bound of the forward."""

    @staticmethod
    def forward(context, values):
        context.save_for_backward(values)
        return values.exp().clamp(max=0.2)

    @staticmethod
    def backward(context, gradient):
        (values,) = context.saved_tensors
        return gradient * values.exp()


class ForgetsItsBound(wrong_losses.Plain):
    def __call__(self, tokens):
        return -BoundedForward.apply(tokens.logprobs) * tokens.advantages
