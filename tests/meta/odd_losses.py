"""Losses that are odd, and right."""

import warnings

import numpy as np
import torch
import wrong_losses
from wrong_losses_by_family import Measured

from skyrl_engine import LossOutput, Metric


class MeasuresPairsOfTokens(wrong_losses.Plain):
    """Odd and right: a number of each sequence of two tokens or more."""

    def __call__(self, tokens):
        several = int((tokens.sequences.counts > 1).sum())
        return LossOutput(super().__call__(tokens), {"several": Metric.sum(several)} if several else {})


class MakesItsPlaces(wrong_losses.Plain):
    """Positions made where its tokens are, and a discount by them."""

    def __call__(self, tokens):
        places = torch.arange(len(tokens.logprobs), device=tokens.logprobs.device)
        places = places - tokens.sequences.offsets[:-1][tokens.sequences.index]
        return super().__call__(tokens) * 0.99**places


class HoldsANumber(wrong_losses.Plain):
    """A single number of the CPU, which may occur with tensors of any device."""

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


TABLES = {}


class HoldsATablePerDevice(wrong_losses.Plain):
    def __call__(self, tokens):
        key = (tokens.logprobs.device, tokens.logprobs.dtype)
        if key not in TABLES:
            TABLES[key] = torch.ones(64).to(*key)
        return super().__call__(tokens) * TABLES[key][0 * tokens.sequences.index]


class DetachesInPlace(wrong_losses.Plain):
    def __call__(self, tokens):
        held = tokens.logprobs.clone().detach_()
        return -(tokens.logprobs - held).exp() * tokens.advantages
