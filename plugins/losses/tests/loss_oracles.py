"""Every loss a second time, as the definition: one token after the other, in Python floats, from the published formula.

What a formula takes out of the gradient is computed from `frozen`, so that finite differences of an oracle (which move `logprobs` and
leave `frozen` alone) are the gradient that the formula prescribes.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen

from skyrl_engine import LossOutput
from skyrl_engine.contracts import FunctionLoss, LossTokens, Sequences, as_loss_output
from skyrl_engine_losses import plugin
from skyrl_engine_losses.clipping import ClipConfig, DualClipConfig
from skyrl_engine_losses.covariance import ClipCovConfig, KlCovConfig
from skyrl_engine_losses.critic import ValueClipConfig
from skyrl_engine_losses.cross_entropy import LabelSmoothingConfig
from skyrl_engine_losses.off_policy import DroConfig
from skyrl_engine_losses.policy_gradient import CispoConfig, VespoConfig
from skyrl_engine_losses.regularizers import KlConfig
from skyrl_engine_losses.sequence_level import LogClipConfig
from skyrl_engine_losses.trust_region import DppoConfig, SapoConfig

SCORES = ("logprobs", "entropy", "values", "logsumexp", "mean_logprob")
COLUMNS = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "old_values", "returns")
Floats = Sequence[float]


@frozen
class Batch:
    """n tokens of sequences with `lengths`, as plain floats."""

    lengths: Sequence[int]
    logprobs: Floats
    entropy: Floats
    values: Floats
    old_logprobs: Floats
    rollout_logprobs: Floats
    ref_logprobs: Floats
    advantages: Floats
    old_values: Floats
    returns: Floats
    logsumexp: Floats
    mean_logprob: Floats
    frozen: Floats = field()

    @frozen.default
    def _as_they_are(self) -> Floats:
        return self.logprobs

    def __len__(self) -> int:
        return sum(self.lengths)

    def mates(self, token: int) -> range:
        """The tokens of this token's sequence."""
        start = 0
        for length in self.lengths:
            if token < start + length:
                return range(start, start + length)
            start += length
        raise IndexError(token)


def random_batch(seed: int, lengths: Sequence[int] = (3, 0, 1, 5, 2), spread: float = 0.3) -> Batch:
    """Policies that differ by about `spread` nats per token; a few advantages are 0."""
    draw = random.Random(seed)
    count = sum(lengths)
    old = [draw.uniform(-4.0, -0.05) for _ in range(count)]

    def near(values: Floats) -> list[float]:
        return [min(value + draw.gauss(0, spread), -1e-3) for value in values]

    def normal() -> list[float]:
        return [draw.gauss(0, 1) for _ in range(count)]

    return Batch(
        lengths=lengths,
        logprobs=near(old),
        entropy=[draw.uniform(0, 3) for _ in range(count)],
        values=normal(),
        old_logprobs=old,
        rollout_logprobs=near(old),
        ref_logprobs=near(old),
        advantages=[0.0 if draw.random() < 0.1 else advantage for advantage in normal()],
        old_values=normal(),
        returns=normal(),
        logsumexp=normal(),
        mean_logprob=[draw.uniform(-12.0, -2.0) for _ in range(count)],
    )


def sequences_of(lengths: Sequence[int]) -> Sequences:
    counts = torch.tensor(list(lengths), dtype=torch.int64)
    ids = torch.arange(len(counts))
    return Sequences(torch.repeat_interleave(ids, counts), counts, ids, ids)


def tokens_of(batch: Batch, needs: Sequence[str], dtype: torch.dtype = torch.float64, seed: int = 0) -> LossTokens:
    """Input of a loss; model scores are leaves to differentiate."""
    tensors = {name: torch.tensor(list(getattr(batch, name)), dtype=dtype) for name in needs}
    for name in set(needs) & set(SCORES):
        tensors[name].requires_grad_()
    return LossTokens(tensors, sequences_of(batch.lengths), lambda: torch.Generator().manual_seed(seed))


def ratio(logprob: float, anchor: float) -> float:
    return math.exp(within(logprob - anchor, -20.0, 20.0))


def within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def cross_entropy(b: Batch, t: int, _: None) -> float:
    return -b.logprobs[t]


def surrogate(r: float, a: float, low: float, high: float) -> float:
    return -min(r * a, within(r, 1 - low, 1 + high) * a)


def ppo(b: Batch, t: int, c: ClipConfig) -> float:
    return surrogate(ratio(b.logprobs[t], b.old_logprobs[t]), b.advantages[t], c.clip_low, c.clip_high)


def ppo_dual_clip(b: Batch, t: int, c: DualClipConfig) -> float:
    single = ppo(b, t, c)
    return min(-c.dual_clip * b.advantages[t], single) if b.advantages[t] < 0 else single


def gspo(b: Batch, t: int, c: ClipConfig) -> float:
    log_ratio = mean([b.frozen[i] - b.old_logprobs[i] for i in b.mates(t)])
    s = math.exp(min(b.logprobs[t] - b.frozen[t] + log_ratio, 10.0))
    return surrogate(s, b.advantages[t], c.clip_low, c.clip_high)


def gmpo(b: Batch, t: int, c: LogClipConfig) -> float:
    clipped = []
    for i in b.mates(t):
        d = b.logprobs[i] - b.old_logprobs[i]
        if b.advantages[i] > 0:
            clipped.append(min(d, c.clip_high))
        elif b.advantages[i] < 0:
            clipped.append(max(d, -c.clip_low))
        else:
            clipped.append(0.0)
    return -b.advantages[t] * math.exp(min(mean(clipped), 20.0))


def reinforce(b: Batch, t: int, _: None) -> float:
    return -b.advantages[t] * b.logprobs[t]


def cispo(b: Batch, t: int, c: CispoConfig) -> float:
    anchor = b.old_logprobs if c.anchor == "old" else b.rollout_logprobs
    weight = within(ratio(b.frozen[t], anchor[t]), 1 - c.clip_low, 1 + c.clip_high)
    return -b.advantages[t] * weight * b.logprobs[t]


def rollout_is(b: Batch, t: int, c: ClipConfig) -> float:
    q = ratio(b.frozen[t], b.rollout_logprobs[t])
    return -q * b.advantages[t] * b.logprobs[t] if 1 - c.clip_low < q < 1 + c.clip_high else 0.0


def dppo(b: Batch, t: int, c: DppoConfig) -> float:
    anchor = b.old_logprobs[t] if c.anchor == "old" else b.rollout_logprobs[t]
    p, mu, a = math.exp(b.frozen[t]), math.exp(anchor), b.advantages[t]
    if c.kind == "tv":
        divergence = abs(p - mu)
    else:
        complements = (-math.expm1(anchor), -math.expm1(b.frozen[t]))  # 1 - mu and 1 - p, also where 1 - exp(...) is all rounding
        divergence = sum(x * math.log(x / y) if y > 0 else math.inf for x, y in ((mu, p), complements) if x > 0)
    if (a > 0 and p > mu and divergence > c.delta_high) or (a < 0 and p < mu and divergence > c.delta_low):
        return 0.0
    return -ratio(b.logprobs[t], anchor) * a


def sapo(b: Batch, t: int, c: SapoConfig) -> float:
    tau = c.tau_pos if b.advantages[t] > 0 else c.tau_neg
    z = tau * (ratio(b.logprobs[t], b.old_logprobs[t]) - 1)
    return -b.advantages[t] * (4 / tau) / (1 + math.exp(-z))


def covariances(b: Batch) -> list[float]:
    a_mean, lp_mean = mean(b.advantages), mean(b.frozen)
    return [(a - a_mean) * (lp - lp_mean) for a, lp in zip(b.advantages, b.frozen, strict=True)]


def clip_cov(b: Batch, t: int, c: ClipCovConfig) -> float:
    """For a `fraction` that silences every candidate; which ones are drawn otherwise is a test of its own."""
    assert c.fraction == 1.0
    r, a = ratio(b.frozen[t], b.old_logprobs[t]), b.advantages[t]
    clipped = (a > 0 and r > 1 + c.clip_high) or (a < 0 and r < 1 - c.clip_low)
    return 0.0 if c.lower < covariances(b)[t] < c.upper and not clipped else ppo(b, t, c)


def kl_cov(b: Batch, t: int, c: KlCovConfig) -> float:
    cov = covariances(b)
    rank = sum(value > cov[t] or (value == cov[t] and i < t) for i, value in enumerate(cov))
    penalty = c.coef * abs(b.logprobs[t] - b.old_logprobs[t]) if rank < max(1, int(len(b) * c.fraction)) else 0.0
    return -b.advantages[t] * ratio(b.logprobs[t], b.old_logprobs[t]) + penalty


def importance_sampling(b: Batch, t: int, _: None) -> float:
    return -math.exp(b.logprobs[t] - b.old_logprobs[t]) * b.advantages[t]


def dro(b: Batch, t: int, c: DroConfig) -> float:
    return -(b.logprobs[t] * b.advantages[t] - c.beta / 2 * (b.logprobs[t] - b.old_logprobs[t]) ** 2)


def value_clip(b: Batch, t: int, c: ValueClipConfig) -> float:
    near = within(b.values[t], b.old_values[t] - c.clip, b.old_values[t] + c.clip)
    return 0.5 * max((b.values[t] - b.returns[t]) ** 2, (near - b.returns[t]) ** 2)


def kl(b: Batch, t: int, c: KlConfig) -> float:
    d = b.logprobs[t] - b.ref_logprobs[t]
    match c.estimator:
        case "k1":
            return d
        case "abs":
            return abs(d)
        case "k2":
            return d * d / 2
        case "k3":
            limit = math.inf if c.limit is None else c.limit
            return within(math.exp(within(-d, -20.0, 20.0)) + d - 1, -limit, limit)
    raise AssertionError(c.estimator)


def corrected_kl(b: Batch, t: int, c: KlConfig) -> float:
    return math.exp(b.logprobs[t] - b.old_logprobs[t]) * kl(b, t, c)


def vespo(b: Batch, t: int, c: VespoConfig) -> float:
    anchor = b.old_logprobs if c.anchor == "old" else b.rollout_logprobs
    total = sum(within(b.frozen[mate] - anchor[mate], -20.0, 20.0) for mate in b.mates(t))
    w = math.exp(within(total, math.log(1e-8), 20.0))
    k, rate = (c.k_pos, c.lambda_pos) if b.advantages[t] >= 0 else (c.k_neg, c.lambda_neg)
    if k * math.log(w) + rate * (1 - w) < math.log(1e-30):
        return 0.0
    return -(w**k) * math.exp(rate * (1 - w)) * b.advantages[t] * b.logprobs[t]


def label_smoothing(b: Batch, t: int, c: LabelSmoothingConfig) -> float:
    return -b.logprobs[t] + c.smoothing * (b.logprobs[t] - b.mean_logprob[t])


def z_loss(b: Batch, t: int, _: None) -> float:
    return b.logsumexp[t] ** 2


def entropy(b: Batch, t: int, _: None) -> float:
    return -b.entropy[t]


@frozen
class Case:
    """A loss with options, and its oracle."""

    name: str
    config: Any
    oracle: Callable[[Batch, int, Any], float]

    def __str__(self) -> str:
        options = "" if self.config is None else repr(self.config).partition("(")[2].rstrip(")")
        return f"{self.name}({options})"

    @property
    def loss(self) -> FunctionLoss:
        loss: FunctionLoss = getattr(plugin, self.name).skyrl_engine_make_loss(self.config)
        return loss

    def run(self, batch: Batch, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[LossOutput, LossTokens]:
        tokens = tokens_of(batch, self.loss.needs, dtype, seed)
        return as_loss_output(self.name, self.loss(tokens), len(batch)), tokens

    def expected(self, batch: Batch) -> list[float]:
        return [self.oracle(batch, token, self.config) for token in range(len(batch))]

    def expected_gradient(self, batch: Batch, score: str, weights: Floats, step: float = 1e-6) -> list[float]:
        """Central differences of the sum of weight times oracle; exact up to about 1e-9 away from kinks."""

        def total(values: Floats) -> float:
            moved = evolve(batch, **{score: values}, frozen=batch.frozen)
            return math.fsum(weight * value for weight, value in zip(weights, self.expected(moved), strict=True))

        gradient = []
        for token in range(len(batch)):
            sides = []
            for sign in (1, -1):
                values = list(getattr(batch, score))
                values[token] += sign * step
                sides.append(total(values))
            gradient.append((sides[0] - sides[1]) / (2 * step))
        return gradient


CASES = [
    Case("cross_entropy", None, cross_entropy),
    Case("ppo", ClipConfig(), ppo),
    Case("ppo", ClipConfig(clip_low=0.05, clip_high=0.4), ppo),
    Case("ppo_dual_clip", DualClipConfig(), ppo_dual_clip),
    Case("ppo_dual_clip", DualClipConfig(dual_clip=1.1), ppo_dual_clip),
    Case("gspo", ClipConfig(), gspo),
    Case("gspo", ClipConfig(clip_low=3e-4, clip_high=4e-4), gspo),
    Case("gmpo", LogClipConfig(), gmpo),
    Case("gmpo", LogClipConfig(clip_low=0.05, clip_high=0.15), gmpo),
    Case("reinforce", None, reinforce),
    Case("cispo", CispoConfig(), cispo),
    Case("cispo", CispoConfig(clip_low=0.1, clip_high=0.2, anchor="rollout"), cispo),
    Case("rollout_is", ClipConfig(), rollout_is),
    Case("rollout_is", ClipConfig(clip_low=0.5, clip_high=4.0), rollout_is),
    Case("dppo", DppoConfig(), dppo),
    Case("dppo", DppoConfig(kind="tv", delta_low=0.03, delta_high=0.02, anchor="rollout"), dppo),
    Case("dppo", DppoConfig(kind="kl", delta_low=0.004, delta_high=0.003), dppo),
    Case("sapo", SapoConfig(), sapo),
    Case("sapo", SapoConfig(tau_pos=2.0, tau_neg=0.5), sapo),
    Case("clip_cov", ClipCovConfig(fraction=1.0, lower=-0.0437, upper=0.3911), clip_cov),
    Case("clip_cov", ClipCovConfig(clip_low=0.05, clip_high=0.1, fraction=1.0, lower=-9.0, upper=0.1237), clip_cov),
    Case("kl_cov", KlCovConfig(), kl_cov),
    Case("kl_cov", KlCovConfig(fraction=1.0, coef=0.3), kl_cov),
    Case("importance_sampling", None, importance_sampling),
    Case("dro", DroConfig(), dro),
    Case("dro", DroConfig(beta=2.0), dro),
    Case("value_clip", ValueClipConfig(), value_clip),
    Case("value_clip", ValueClipConfig(clip=1.0), value_clip),
    *(Case("kl", KlConfig(estimator), kl) for estimator in ("k1", "abs", "k2", "k3")),
    Case("kl", KlConfig("k3", corrected=True), corrected_kl),
    Case("kl", KlConfig("k1", corrected=True), corrected_kl),
    Case("kl", KlConfig("k3", limit=None), kl),
    Case("kl", KlConfig("k3", limit=0.01), kl),
    Case("vespo", VespoConfig(), vespo),
    Case("vespo", VespoConfig(k_pos=1.0, lambda_pos=0.5, k_neg=0.0, lambda_neg=1.5, anchor="rollout"), vespo),
    Case("entropy", None, entropy),
    Case("label_smoothing", LabelSmoothingConfig(), label_smoothing),
    Case("label_smoothing", LabelSmoothingConfig(smoothing=0.5), label_smoothing),
    Case("z_loss", None, z_loss),
]
