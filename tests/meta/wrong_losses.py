"""Losses that are wrong on purpose, one fault each; what a person could write and not notice."""

import os

import torch
from attrs import define, field

from skyrl_engine import LossOutput, Metric, loss
from skyrl_engine.contracts import FunctionLoss

NEEDS = ("logprobs", "advantages")


class Plain:
    """A loss with an object's freedom, right in everything; spoilt below."""

    needs = NEEDS
    reducers = None
    advised_reducers = None
    batch_local = False
    homogeneous = False

    def __call__(self, tokens):
        return -tokens.logprobs * tokens.advantages


class Pairs(Plain):
    """Right: preference pairs, the first of a unit chosen, the second rejected (DPO, Rafailov et al. 2023, equation 7)."""

    needs = ("logprobs", "ref_logprobs")

    def __call__(self, tokens):
        sequences = tokens.sequences
        gains = sequences.sum(tokens.logprobs - tokens.ref_logprobs)
        _, unit = torch.unique(sequences.unit_ids, return_inverse=True)
        earlier = torch.ones(len(unit), len(unit)).tril(-1).to(gains) * (unit[:, None] == unit)
        margins = torch.zeros_like(gains).index_add(0, unit, gains * (1 - 2 * earlier.sum(1)))
        return sequences.broadcast(-torch.nn.functional.logsigmoid(margins)[unit])


class PairsByRole(Plain):
    """Right: pairs by the roles of their samples, which may come in any order."""

    needs = ("logprobs", "ref_logprobs", "sample:role")
    unit_size = 2

    def __call__(self, tokens):
        gains = tokens.logprobs - tokens.ref_logprobs
        chosen, rejected = self.halves(tokens.pairs)
        return tokens.pairs.broadcast(-torch.nn.functional.logsigmoid(chosen.sum(gains) - rejected.sum(gains)))

    def halves(self, pairs):
        return pairs.chosen, pairs.rejected


class PairsByPlace(PairsByRole):
    """Takes the first sequence of all for a chosen one, and with it the first of every unit."""

    def halves(self, pairs):
        halves = pairs.chosen, pairs.rejected
        first = pairs.chosen.places.sum() <= pairs.rejected.places.sum()
        return halves if first else halves[::-1]


class Whitened(Plain):
    """Right, since it says so: advantages less their mean over the micro-batch."""

    batch_local = True

    def __call__(self, tokens):
        return -tokens.logprobs * (tokens.advantages - tokens.advantages.sum() / max(len(tokens.advantages), 1))


class SignFlipped(Plain):
    def __call__(self, tokens):
        return tokens.logprobs * tokens.advantages


class MeanOverItsMask(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) / max(len(tokens.logprobs), 1)


class TimesTheTokens(Plain):
    """As if the reducer divided per micro-batch."""

    def __call__(self, tokens):
        return super().__call__(tokens) * len(tokens.logprobs)


class DividesByLoadedSequences(Plain):
    """Counts only sequences with loss, so that padding cannot tell."""

    def __call__(self, tokens):
        return super().__call__(tokens) / (tokens.sequences.counts > 0).sum().clamp(min=1)


class DividesByAllSequences(Plain):
    """Padding is counted; declared to depend on the cut, it would be right, so that only padding tells in one micro-batch."""

    def __call__(self, tokens):
        return super().__call__(tokens) / max(len(tokens.sequences), 1)


class Whitens(Plain):
    """Whitens its advantages over the micro-batch."""

    def __call__(self, tokens):
        return -tokens.logprobs * (tokens.advantages - tokens.advantages.sum() / max(len(tokens.advantages), 1))


class ReachesOverTheEnd(Plain):
    """Takes the previous token's log-probability, which is another sequence's at the start of one."""

    def __call__(self, tokens):
        return -(tokens.logprobs + 0.5 * tokens.logprobs.roll(1)) * tokens.advantages


class SkipsTheFirstSequence(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * (tokens.sequences.index != 0)


class RemembersCalls(Plain):
    """Warms up from call to call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, tokens):
        self.calls += 1
        return -tokens.logprobs * tokens.advantages * self.calls


class NanBesideEmptySequences(Plain):
    """Divides by a sequence's number of tokens; the NaN reaches the others through a mean over sequences times 0."""

    def __call__(self, tokens):
        means = tokens.sequences.sum(tokens.advantages) / tokens.sequences.counts
        return super().__call__(tokens) + 0 * means.mean()


class FailsWithoutTokens(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) + 0 * tokens.logprobs.max()


class NanMetricWithoutTokens(Plain):
    def __call__(self, tokens):
        metric = Metric.mean(tokens.advantages.sum(), len(tokens.advantages))
        least = Metric.max(tokens.advantages.mean() * 0)
        return LossOutput(super().__call__(tokens), {"advantage": metric, "nothing": least})


class InfiniteAtCertainty(Plain):
    """The logarithm of the probability of everything else, which is 0 where the token is certain."""

    def __call__(self, tokens):
        return super().__call__(tokens) + 0.1 * torch.log(1 - tokens.logprobs.exp())


class InfiniteGradient(Plain):
    """The root of a distance that may be 0: finite, with an infinite slope."""

    needs = ("logprobs", "old_logprobs")

    def __call__(self, tokens):
        return (tokens.logprobs - tokens.old_logprobs).abs().sqrt()


class Detached(Plain):
    def __call__(self, tokens):
        return -tokens.logprobs.detach() * tokens.advantages


class ScalarLoss(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens).sum()


class Crashes(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * a_name_nobody_defined  # noqa: F821 - the fault


class CrashesInTheWordsOfTheEngine(Plain):
    """Its message is one that the engine has for what was returned: verdicts go by types."""

    def __call__(self, tokens):
        raise ValueError("the table returned values that do not depend on the model")


class ReadsUndeclared(Plain):
    """Only where an advantage is negative, which a quick test may not have."""

    def __call__(self, tokens):
        values = super().__call__(tokens)
        return values - 0.1 * tokens.entropy if (tokens.advantages < 0).any() else values


class WrongByHand(torch.autograd.Function):
    @staticmethod
    def forward(context, logprobs):
        context.save_for_backward(logprobs)
        return logprobs * logprobs

    @staticmethod
    def backward(context, gradient):
        (logprobs,) = context.saved_tensors
        return gradient * logprobs  # forgets the 2


class GradientByHand(Plain):
    def __call__(self, tokens):
        return WrongByHand.apply(tokens.logprobs)


class HalfPrecision(Plain):
    def __call__(self, tokens):
        return -(tokens.logprobs.bfloat16() * tokens.advantages).to(tokens.logprobs.dtype)


class HalfPrecisionAdvantages(Plain):
    """Rounds what it is given, in every precision alike."""

    def __call__(self, tokens):
        return -tokens.logprobs * tokens.advantages.half().to(tokens.logprobs.dtype)


class CountsInAByte(Plain):
    """A discount by position, which is back at 0 after 255."""

    def __call__(self, tokens):
        sequences = tokens.sequences
        places = torch.arange(len(tokens.logprobs), device=tokens.logprobs.device) - sequences.offsets[:-1][sequences.index]
        return super().__call__(tokens) * 0.99 ** places.to(torch.uint8)


class BoundByDtype(Plain):
    """Clamps more tightly where it computes in float32."""

    needs = ("logprobs", "old_logprobs", "advantages")

    def __call__(self, tokens):
        bound = 20 if tokens.logprobs.dtype == torch.float64 else 10
        return -(tokens.logprobs - tokens.old_logprobs).clamp(-bound, bound).exp() * tokens.advantages


class ShiftsAndBack(Plain):
    """A large number comes and goes, and the digits of float32 go with it."""

    def __call__(self, tokens):
        return -((tokens.logprobs + 1e5) - 1e5) * tokens.advantages


class WrongDtype(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens).float()


class FalselyHomogeneous(Plain):
    homogeneous = True

    def __call__(self, tokens):
        return -tokens.logprobs * tokens.advantages.clamp(-1, 1)


class GradientBesideTheAdvantage(Plain):
    """Its values are homogeneous: what is added is 0, and has a gradient of 1."""

    homogeneous = True

    def __call__(self, tokens):
        return super().__call__(tokens) + (tokens.logprobs - tokens.logprobs.detach())


class NearlyHomogeneous(Plain):
    """A small number keeps the advantage from being 0, less than any comparison of sums allows for."""

    homogeneous = True

    def __call__(self, tokens):
        return -tokens.logprobs * (tokens.advantages + 1e-13)


class MeanOfMeans(Plain):
    def __call__(self, tokens):
        mean = tokens.advantages.sum() / max(len(tokens.advantages), 1)
        return LossOutput(super().__call__(tokens), {"advantage": Metric.mean(mean, 1)})


class DrawsGlobally(Plain):
    def __call__(self, tokens):
        torch.rand(1)
        return super().__call__(tokens)


class DrawsFromTheMachine(Plain):
    """Replicas would each drop other tokens; it says that it depends on the cut, as random losses do."""

    batch_local = True

    def __call__(self, tokens):
        noise = torch.tensor([1 + byte / 256 for byte in os.urandom(len(tokens.logprobs))]).to(tokens.logprobs)
        return super().__call__(tokens) * noise


class WritesInPlace(Plain):
    def __call__(self, tokens):
        return -tokens.logprobs * tokens.advantages.clamp_(-1, 1)


class LearnsNothing(Plain):
    """Depends on the model by a factor of 0."""

    def __call__(self, tokens):
        return -tokens.logprobs.detach() * tokens.advantages + 0 * tokens.logprobs


class ChangesAfterAWhile(Plain):
    """Warms up late, as a controller does that looks every so many calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, tokens):
        self.calls += 1
        return super().__call__(tokens) * (2 if self.calls > 50 else 1)


class WarmsUpTheProcess(Plain):
    """Counts calls for all losses of the process, so that new ones are no younger; it tires soon."""

    calls = 0

    def __call__(self, tokens):
        WarmsUpTheProcess.calls += 1
        return super().__call__(tokens) * min(WarmsUpTheProcess.calls / 8, 1)


class AsksForItsRank(Plain):
    def __call__(self, tokens):
        return super().__call__(tokens) * (1 + int(os.environ.get("RANK", "0")))


class DividesByManyTokens(Plain):
    """Only where there are more than anybody tries."""

    def __call__(self, tokens):
        return super().__call__(tokens) / max(len(tokens.logprobs) / 64, 1)


class TakesGroupsForPlaces(Plain):
    def __call__(self, tokens):
        sequences = tokens.sequences
        members = tokens.logprobs.new_zeros(len(sequences))
        members = members.index_add(0, sequences.group_ids[sequences.index] % 1_000_003, torch.ones_like(tokens.logprobs))
        return super().__call__(tokens) + 0 * members.sum()


class WritesAndUndoes(Plain):
    def __call__(self, tokens):
        tokens.advantages.mul_(2)
        values = -tokens.logprobs * tokens.advantages.clone() / 2
        tokens.advantages.div_(2)
        return values


class FailsInBackward(Plain):
    """Writes over what its gradient is made of."""

    def __call__(self, tokens):
        advantages = tokens.advantages.clone()
        values = -tokens.logprobs * advantages
        advantages.zero_()
        return values


class SetsTheDefaultDtype(Plain):
    def __call__(self, tokens):
        torch.set_default_dtype(torch.float64)
        return super().__call__(tokens)


class KeepsItsValues(Plain):
    def __init__(self):
        self.history = []

    def __call__(self, tokens):
        self.history.append(super().__call__(tokens))
        return self.history[-1]


class HomogeneousInSmallNumbers(Plain):
    homogeneous = True

    def __call__(self, tokens):
        return -tokens.logprobs * tokens.advantages.clamp(-100, 100)


class HoldsALambda(Plain):
    def __init__(self):
        self.scale = lambda values: values * 1.0

    def __call__(self, tokens):
        return self.scale(super().__call__(tokens))


@define
class PercentConfig:
    """Takes per cent and keeps the share: what is written down is taken for per cent again."""

    strength: float = field(default=50.0, converter=lambda percent: percent / 100)


@loss(needs=NEEDS, config=PercentConfig)
def percent(tokens, config):
    return -tokens.logprobs * tokens.advantages * config.strength


def closure_loss(scale):
    """A product whose function only this call knows."""

    def scaled(tokens, config):
        return -tokens.logprobs * tokens.advantages * scale

    return FunctionLoss("scaled", scaled, None, NEEDS)


class CrossEntropyOfCandidates(Plain):
    """A right one, of the most likely tokens of a teacher."""

    needs = ("logprobs_at:teacher_ids", "teacher_logprobs[k]")

    def __call__(self, tokens):
        return LossOutput(self.mean(tokens.logprobs_at("teacher_ids"), tokens.teacher_logprobs.exp()))

    def mean(self, scores, weights):
        return -(scores * weights).sum(-1)


class CandidatesInAWord(CrossEntropyOfCandidates):
    """Marks candidates in the bits of a word."""

    def mean(self, scores, weights):
        return super().mean(scores[:, :64], weights[:, :64])


class DetachesACandidate(CrossEntropyOfCandidates):
    def mean(self, scores, weights):
        first = scores[:, :1].detach()
        return super().mean(torch.cat([first, scores[:, 1:]], dim=1), weights)
