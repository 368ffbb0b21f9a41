"""Losses, corrections and reducers that look right and are wrong in a way of their own, by family; and odd ones that are right."""

import os
import warnings

import numpy as np
import torch
import wrong_corrections
import wrong_losses
import wrong_reducers
from attrs import define

from skyrl_engine import DataError, LossOutput, Metric
from skyrl_engine.contracts import FunctionLoss

# --- losses: works on the CPU alone ------------------------------------------------------------------------------------------------

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


# --- losses: metrics of empty micro-batches ----------------------------------------------------------------------------------------


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


# --- losses: the oracle's values with another gradient -----------------------------------------------------------------------------


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


# --- losses: far from the old policy -----------------------------------------------------------------------------------------------


class UnboundedRatio(Ratios):
    def ratio(self, tokens):
        return (tokens.logprobs - tokens.old_logprobs).exp()


class SquaresItsRatio(Ratios):
    def ratio(self, tokens):
        return (tokens.logprobs - tokens.old_logprobs).clamp(-50, 50).exp() ** 2


class WeighsByExpAdvantage(wrong_losses.Plain):
    def __call__(self, tokens):
        return -tokens.logprobs * tokens.advantages.exp()


# --- losses: structures that random batches do not hold ----------------------------------------------------------------------------


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


# --- losses: other processes, options, evaluation ----------------------------------------------------------------------------------


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


# --- settings of the process: of any of these kinds --------------------------------------------------------------------------------


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


# --- corrections -------------------------------------------------------------------------------------------------------------------


class UpsideDown(wrong_corrections.Plain):
    def __call__(self, tokens):
        return 1 / self.ratio(tokens)

    def oracle(self, tokens):
        return self.ratio(tokens)


class OfAnotherToken(wrong_corrections.Plain):
    """The ratio of the whole sequence where the token's own is due."""

    def __call__(self, tokens):
        return tokens.sequences.broadcast(tokens.sequences.mean(self.ratio(tokens)))

    def oracle(self, tokens):
        return self.ratio(tokens)


class Halves(wrong_corrections.Plain):
    def __call__(self, tokens):
        return super().__call__(tokens).half().to(tokens.old_logprobs.dtype)


class CorrectionInAByte(wrong_corrections.Plain):
    def __call__(self, tokens):
        places = torch.arange(len(tokens.old_logprobs), device=tokens.old_logprobs.device)
        first = tokens.sequences.offsets[:-1][tokens.sequences.index]
        return super().__call__(tokens) * 0.99 ** (places - first).to(torch.uint8)


class FarFromTheSampler(wrong_corrections.Plain):
    def ratio(self, tokens):
        return (tokens.old_logprobs - tokens.rollout_logprobs).clamp(-90, 90).exp()

    def __call__(self, tokens):
        return self.ratio(tokens)


class MaskOfTheCPU(wrong_corrections.Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * torch.ones(len(tokens.old_logprobs))


class CorrectionByNumPy(wrong_corrections.Plain):
    def __call__(self, tokens):
        return torch.from_numpy(np.minimum(self.ratio(tokens).numpy(), 2))


class MeanOverRanks(wrong_corrections.Plain):
    def __call__(self, tokens):
        factors = super().__call__(tokens)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return factors


class MakesOnesForMany(wrong_losses.Plain):
    """Pads long micro-batches with a tensor of the CPU."""

    def __call__(self, tokens):
        made = super().__call__(tokens)
        return made * torch.ones(len(made)) if len(tokens.sequences) > 20 else made


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


class MeasuresPairsOfTokens(wrong_losses.Plain):
    """Odd and right: a number of each sequence of two tokens or more."""

    def __call__(self, tokens):
        several = int((tokens.sequences.counts > 1).sum())
        return LossOutput(super().__call__(tokens), {"several": Metric.sum(several)} if several else {})


class CorrectionForEight(wrong_corrections.Plain):
    def __call__(self, tokens):
        room = tokens.old_logprobs.new_zeros(8)[tokens.sequences.index]
        return super().__call__(tokens) + 0 * room


class CorrectionOfFloatIds(wrong_corrections.Plain):
    def __call__(self, tokens):
        ids = tokens.sequences.unit_ids.to(tokens.old_logprobs.dtype)
        return super().__call__(tokens) / (ids[:, None] == ids).sum(1)[tokens.sequences.index].to(tokens.old_logprobs.dtype)


class CorrectionByHash(wrong_corrections.Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * (1 + hash(b"a salt") % 97)


# --- reducers ----------------------------------------------------------------------------------------------------------------------


class ReducerForEight(wrong_reducers.Plain):
    def of(self, structure, weight):
        room = np.zeros(8)
        return super().of(structure, weight) + 0 * room[structure.sequence_index]


class GroupsAsFloats(wrong_reducers.Plain):
    def of(self, structure, weight):
        _, part = np.unique(structure.group_ids.astype(np.float64), return_inverse=True)
        mass = np.bincount(part, weights=structure.mass)
        return weight / (len(mass) * np.where(mass == 0, 1, mass))[part][structure.sequence_index]


class FailsWithoutGroups(wrong_reducers.Plain):
    def of(self, structure, weight):
        if not structure.grouped:
            raise KeyError("group_ids")
        return super().of(structure, weight)


class NoMoreThanSix(wrong_reducers.Plain):
    def of(self, structure, weight):
        return super().of(structure, weight) * len(structure) / min(len(structure), 6)


class MassOfBytes(wrong_reducers.Plain):
    """Adds up a mask in the byte that it is made of."""

    def of(self, structure, weight):
        mass = np.array([each.sum(dtype=each.dtype) for each in np.split(structure.loss_weight, structure.action_offsets[1:-1])])
        return weight / (len(structure) * np.where(mass == 0, 1.0, mass))[structure.sequence_index]


# --- odd, and right ----------------------------------------------------------------------------------------------------------------


class MakesItsPlaces(wrong_losses.Plain):
    """Positions made where its tokens are, and a discount by them."""

    def __call__(self, tokens):
        places = torch.arange(len(tokens.logprobs), device=tokens.logprobs.device)
        places = places - tokens.sequences.offsets[:-1][tokens.sequences.index]
        return super().__call__(tokens) * 0.99**places


class HoldsANumber(wrong_losses.Plain):
    """A single number of the CPU, which may stand beside tensors of any device."""

    def __init__(self):
        self.scale = torch.tensor(2.0, dtype=torch.float64)

    def __call__(self, tokens):
        return super().__call__(tokens) * self.scale


class MeasuresExtremes(Measured):
    """The least of nothing is infinite."""

    def measured(self, values):
        return Metric.min(values.min() if len(values) else float("inf"))


class MeasuresSometimes(wrong_losses.Plain):
    """Reports nothing of nothing."""

    def __call__(self, tokens):
        measured = {"largest": Metric.max(tokens.advantages.max())} if len(tokens.advantages) else {}
        return LossOutput(super().__call__(tokens), measured)


class DrawsNumbers(wrong_losses.Plain):
    """Drops tokens at random, the same ones on every replica; so it depends on the cut."""

    batch_local = True

    def __call__(self, tokens):
        generator = tokens.generator
        noise = torch.rand(len(tokens.logprobs), generator=generator, device=tokens.logprobs.device, dtype=torch.float64)
        return super().__call__(tokens) * (noise.to(tokens.logprobs.dtype) + 0.5)


class ByHandAnywhere(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        context.save_for_backward(values)
        return values * values.abs()

    @staticmethod
    def backward(context, gradient):
        (values,) = context.saved_tensors
        return 2 * gradient * values.abs() * gradient.new_ones(len(values))


class RightGradientByHand(wrong_losses.Plain):
    def __call__(self, tokens):
        return ByHandAnywhere.apply(tokens.logprobs) * tokens.advantages


class ReadsItsLengths(wrong_losses.Plain):
    """Asks the device for lengths, which is slow and right."""

    def __call__(self, tokens):
        parts = tokens.logprobs.split(tokens.sequences.counts.tolist())
        return -torch.cat([part * 1 for part in parts] or [tokens.logprobs]) * tokens.advantages


class CatchesWarnings(wrong_losses.Plain):
    def __call__(self, tokens):
        with warnings.catch_warnings(), np.errstate(all="ignore"), torch.autograd.set_detect_anomaly(False):
            warnings.simplefilter("ignore")
            return super().__call__(tokens)


class HashesNumbers(wrong_losses.Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * (1 + hash((3, 5)) % 2)


class CorrectionByUnits(wrong_corrections.Plain):
    """One factor for a unit, whatever its size and however it is called."""

    def __call__(self, tokens):
        sequences = tokens.sequences
        _, unit = torch.unique(sequences.unit_ids, return_inverse=True)
        sums = sequences.sum((tokens.old_logprobs - tokens.rollout_logprobs).clamp(-20, 20))
        return torch.zeros_like(sums).index_add(0, unit, sums).clamp(-20, 20).exp().clamp(max=2)[unit][sequences.index]


class RefusesDataWithoutGroups(wrong_reducers.Plain):
    def of(self, structure, weight):
        if not structure.grouped:
            raise DataError("the data has no group ids", remedy="Give every sample a group id")
        return super().of(structure, weight)
