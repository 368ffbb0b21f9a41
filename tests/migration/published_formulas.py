"""Losses and reductions as other engines publish them, in NumPy and plain loops, in float64, and the batch that they are tried on.

A formula takes the log-probabilities twice: `p` is what is differentiated, `frozen` what its stop-gradients hold, equal in value. So
central differences over `p` are the gradient that the other engine's autograd finds.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
from attrs import frozen

LENGTHS = (5, 3, 1, 4, 2, 6)
EMPTY = 3
GROUPS = (0, 1, 0, 1, 1, 1)
MICRO_BATCH = 2
LONGEST = 8


@frozen(eq=False)
class Batch:
    """Per sequence the tokens that carry loss (none in one of them): arrays by name. `frozen` is the policy that stop-gradients hold."""

    columns: dict[str, list[np.ndarray]]

    def __getattr__(self, name: str) -> list[np.ndarray]:
        if name.startswith("_") or name not in self.columns:
            raise AttributeError(name)
        return self.columns[name]


def make_batch(*, one_advantage: bool) -> tuple[Batch, list[np.ndarray]]:
    """The batch, and per sequence the bool mask of all its response tokens; ratios from 1/6 to 6, so that every clip takes effect."""
    random = np.random.default_rng(11)
    masks = [np.ones(length, dtype=bool) for length in LENGTHS]
    masks[EMPTY][:] = False
    masks[0][2] = False
    counts = [int(mask.sum()) for mask in masks]
    old = [-random.uniform(0.3, 2.5, count) for count in counts]
    p = [(values + random.uniform(-1.8, 1.8, len(values))).clip(-2.2, -0.05) for values in old]
    advantages = [random.uniform(-0.8, 0.8, count) for count in counts]
    old[5][:3], p[5][:3] = (-2.2, -2.0, -0.1), (-0.06, -0.07, -2.0)  # ratios of 8 and 7, for bounds far from 1, and of 0.15
    advantages[5][:3] = (-0.7, 0.6, -0.5)
    old[4][0], p[4][0], advantages[4][0] = -1.0, -0.2, 0.6  # clipped from above in a sequence of positive advantage
    old[1][0], p[1][0], advantages[1][0] = -3.9, -4.0, -1.5  # the one token whose covariance is above 1
    if one_advantage:
        advantages = [np.full(count, values[0] if count else 0.0) for count, values in zip(counts, advantages, strict=True)]
    near = {name: [values + random.normal(scale=0.3, size=len(values)) for values in old] for name in ("rollout", "ref")}
    values = {name: [random.normal(size=count) for count in counts] for name in ("returns", "old_values")}
    return Batch({"p": p, "frozen": p, "old": old, "a": advantages, **near, **values}), masks


# ---------------------------------------------------------------- losses of a token


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ppo(low: float = 0.2, high: float = 0.2) -> Callable[..., float]:
    return lambda b, s, t, a: (
        -min(math.exp(b.p[s][t] - b.old[s][t]) * a, clip(math.exp(b.p[s][t] - b.old[s][t]), 1 - low, 1 + high) * a)
    )


def dual_clip(bound: float = 3.0) -> Callable[..., float]:
    def token(b: Batch, s: int, t: int, a: float) -> float:
        plain = ppo()(b, s, t, a)
        return min(-bound * a, plain) if a < 0 else plain

    return token


def two_sided(delta: float) -> Callable[..., float]:
    """TRL's `delta`: the unclipped ratio is itself bounded from above."""

    def token(b: Batch, s: int, t: int, a: float) -> float:
        ratio = math.exp(b.p[s][t] - b.old[s][t])
        return -min(min(ratio, delta) * a, clip(ratio, 0.8, 1.2) * a)

    return token


def gspo_token(low: float = 0.2, high: float = 0.2) -> Callable[..., float]:
    """SkyRL and verl: the sequence's ratio in value, the token's own gradient."""

    def token(b: Batch, s: int, t: int, a: float) -> float:
        mean = sum(b.frozen[s][u] - b.old[s][u] for u in range(len(b.p[s]))) / len(b.p[s])
        ratio = math.exp(min(b.p[s][t] - b.frozen[s][t] + mean, 10.0))
        return -min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)

    return token


def gspo_sequence(low: float, high: float) -> Callable[..., float]:
    """TRL: the sequence's ratio, with its whole gradient, at every token."""

    def token(b: Batch, s: int, t: int, a: float) -> float:
        ratio = math.exp(sum(b.p[s][u] - b.old[s][u] for u in range(len(b.p[s]))) / len(b.p[s]))
        return -min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)

    return token


def sapo(b: Batch, s: int, t: int, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(b.p[s][t] - b.old[s][t]) - 1)))


def cispo(low: float, high: float, anchor: str = "old") -> Callable[..., float]:
    return lambda b, s, t, a: -clip(math.exp(b.frozen[s][t] - getattr(b, anchor)[s][t]), low, high) * a * b.p[s][t]


def rollout_is(b: Batch, s: int, t: int, a: float) -> float:
    ratio = math.exp(b.frozen[s][t] - b.rollout[s][t])
    return -(ratio if 0.8 < ratio < 1.2 else 0.0) * a * b.p[s][t]


def dppo(kind: str, delta: float) -> Callable[..., float]:
    """SkyRL, measured from the rollout policy."""

    def token(b: Batch, s: int, t: int, a: float) -> float:
        now, then = math.exp(b.frozen[s][t]), math.exp(b.rollout[s][t])
        if kind == "tv":
            distance = abs(now - then)
        else:
            distance = then * (b.rollout[s][t] - b.frozen[s][t]) + (1 - then) * math.log((1 - then + 1e-8) / (1 - now + 1e-8))
        masked = distance > delta and ((a > 0 and now > then) or (a < 0 and now < then))
        return 0.0 if masked else -math.exp(b.p[s][t] - b.rollout[s][t]) * a

    return token


def verl_dppo_tv(b: Batch, s: int, t: int, a: float) -> float:
    moved = math.exp(b.frozen[s][t]) - math.exp(b.old[s][t])
    valid = moved <= 0.2 if a > 0 else moved >= -0.2
    return -a * min(math.exp(b.frozen[s][t] - b.old[s][t]), 20.0) * b.p[s][t] * valid


def importance_sampling(b: Batch, s: int, t: int, a: float) -> float:
    return -math.exp(b.p[s][t] - b.old[s][t]) * a


def cross_entropy(b: Batch, s: int, t: int, a: float) -> float:
    return -b.p[s][t]


def reinforce(b: Batch, s: int, t: int, a: float) -> float:
    return -b.p[s][t] * a


def dro(b: Batch, s: int, t: int, a: float) -> float:
    return -(b.p[s][t] * a - 0.5 * 0.05 * (b.p[s][t] - b.old[s][t]) ** 2)


def kl(estimate: Callable[[float], float]) -> Callable[..., float]:
    def token(b: Batch, s: int, t: int, _a: float) -> float:
        return estimate(b.p[s][t] - b.ref[s][t])

    return token


def corrected(divergence: Callable[..., float]) -> Callable[..., float]:
    return lambda b, s, t, a: math.exp(b.p[s][t] - b.old[s][t]) * divergence(b, s, t, a)


def vespo(b: Batch, s: int, t: int, a: float) -> float:
    total = sum(now - before for now, before in zip(b.frozen[s], b.old[s], strict=True))
    w = math.exp(clip(total, math.log(1e-8), 20.0))
    k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    return -(w**k) * math.exp(rate - rate * w) * a * b.p[s][t]


def value(b: Batch, s: int, t: int, a: float) -> float:
    """Verl's critic; what is differentiated takes the place of log-probabilities."""
    now, before, wanted = b.p[s][t], b.old_values[s][t], b.returns[s][t]
    return 0.5 * max((now - wanted) ** 2, (clip(now, before - 0.5, before + 0.5) - wanted) ** 2)


def covariances(b: Batch) -> dict[tuple[int, int], float]:
    places = list(tokens(b))
    mean_a = sum(b.a[s][t] for s, t in places) / len(places)
    mean_p = sum(b.frozen[s][t] for s, t in places) / len(places)
    return {(s, t): (b.a[s][t] - mean_a) * (b.frozen[s][t] - mean_p) for s, t in places}


def clip_cov(b: Batch, s: int, t: int, a: float) -> float:
    """One candidate alone, so that verl's random choice among them has one outcome."""

    def cut(place: tuple[int, int]) -> bool:
        ratio, advantage = math.exp(b.frozen[place[0]][place[1]] - b.old[place[0]][place[1]]), b.a[place[0]][place[1]]
        return clip(ratio, 0.8, 1.2) * advantage < ratio * advantage

    candidates = [place for place, cov in covariances(b).items() if 1.0 < cov < 5.0 and not cut(place)]
    assert len(candidates) == 1
    return 0.0 if (s, t) in candidates else ppo()(b, s, t, a)


def kl_cov(b: Batch, s: int, t: int, a: float) -> float:
    of_all = covariances(b)
    penalty = 0.1 * abs(b.p[s][t] - b.old[s][t]) if (s, t) == max(of_all, key=of_all.__getitem__) else 0.0
    return importance_sampling(b, s, t, a) + penalty


# ---------------------------------------------------------------- reductions


def tokens(b: Batch) -> Iterator[tuple[int, int]]:
    return ((s, t) for s in range(len(LENGTHS)) for t in range(len(b.p[s])))


def skyrl(token: Callable[..., float], reduction: str = "token_mean") -> Callable[[Batch], float]:
    """The sum of losses with scaled advantages: `apply_loss_reduction_to_advantages_minibatch`, then `reduce_loss`."""

    def scale(b: Batch, s: int) -> float:
        count = [len(sequence) for sequence in b.p]
        if reduction == "token_mean":
            return 1 / max(sum(count), 1)
        if reduction == "token_mean_legacy":
            start = s // MICRO_BATCH * MICRO_BATCH
            return 1 / max(sum(count[start : start + MICRO_BATCH]), 1) / (len(count) // MICRO_BATCH)
        if reduction == "sequence_mean":
            return 1 / (len(count) * max(count[s], 1))
        if reduction == "seq_mean_token_sum_norm":
            return 1 / (len(count) * LONGEST)
        assert reduction == "prompt_mean"
        return 1 / (len(set(GROUPS)) * max(sum(n for n, group in zip(count, GROUPS, strict=True) if group == GROUPS[s]), 1))

    return lambda b: sum(token(b, s, t, b.a[s][t] * scale(b, s)) for s, t in tokens(b))


def verl(token: Callable[..., float], mode: str = "token-mean", factor: float = 1.0) -> Callable[[Batch], float]:
    """`agg_loss` over the whole batch."""

    def aggregate_rows(b: Batch) -> float:
        rows = [[token(b, s, t, b.a[s][t]) for t in range(len(b.p[s]))] for s in range(len(LENGTHS))]
        filled = [row for row in rows if row]
        if mode == "token-mean":
            return sum(map(sum, rows)) / sum(map(len, rows))
        if mode == "token-sum":
            return sum(map(sum, rows))
        if mode == "seq-mean-token-sum":
            return sum(map(sum, filled)) / len(filled) / factor
        assert mode == "seq-mean-token-mean"
        return sum(sum(row) / (len(row) + 1e-8) for row in filled) / len(filled)

    return aggregate_rows


def verl_geo_mean(b: Batch) -> float:
    """One value per sequence; the mean is over all rows, those without a token too."""
    rows = []
    for s in range(len(LENGTHS)):
        count, total = len(b.p[s]), 0.0
        for t in range(count):
            sign, difference = float(np.sign(b.a[s][t])), b.p[s][t] - b.old[s][t]
            total += sign * min(sign * difference, sign * clip(difference, -0.2, 0.2))
        rows.append(-sum(b.a[s]) / (count + 1e-8) * math.exp(total / (count + 1e-8)))
    return sum(rows) / len(rows)


def trl(token: Callable[..., float], loss_type: str) -> Callable[[Batch], float]:
    def reduce_parts(b: Batch) -> float:
        rows = [[token(b, s, t, b.a[s][t]) for t in range(len(b.p[s]))] for s in range(len(LENGTHS))]
        if loss_type in ("grpo", "sapo"):
            return sum(sum(row) / max(len(row), 1) for row in rows) / len(rows)
        if loss_type in ("dapo", "cispo"):
            return sum(map(sum, rows)) / sum(map(len, rows))
        if loss_type == "dr_grpo":
            return sum(map(sum, rows)) / (len(rows) * LONGEST)
        if loss_type == "luspo":
            return sum(map(sum, rows)) / len(rows)
        assert loss_type == "bnpo"
        parts = [rows[start : start + MICRO_BATCH] for start in range(0, len(rows), MICRO_BATCH)]
        return sum(sum(map(sum, part)) / max(sum(map(len, part)), 1) for part in parts) / len(parts)

    return reduce_parts


def tinker(token: Callable[..., float]) -> Callable[[Batch], float]:
    return lambda b: sum(token(b, s, t, b.a[s][t]) for s, t in tokens(b))


PUBLISHED: dict[tuple[str, str], Callable[[Batch], float]] = {
    ("SkyRL", "policy_loss_type=regular"): skyrl(ppo()),
    ("SkyRL", "policy_loss_type=dual_clip"): skyrl(dual_clip()),
    ("SkyRL", "policy_loss_type=gspo"): skyrl(gspo_token(), "sequence_mean"),
    ("SkyRL", "policy_loss_type=sapo"): skyrl(sapo, "sequence_mean"),
    ("SkyRL", "policy_loss_type=cispo"): skyrl(cispo(0.0, 5.0)),
    ("SkyRL", "policy_loss_type=cispo, cispo_anchor=rollout"): skyrl(cispo(0.0, 5.0, "rollout")),
    ("SkyRL", "policy_loss_type=rollout_is"): skyrl(rollout_is),
    ("SkyRL", "policy_loss_type=dppo, dppo_type=binary_tv"): skyrl(dppo("tv", 0.2)),
    ("SkyRL", "policy_loss_type=dppo, dppo_type=binary_kl"): skyrl(dppo("kl", 0.05)),
    ("SkyRL", "policy_loss_type=importance_sampling"): tinker(importance_sampling),
    ("SkyRL", "policy_loss_type=cross_entropy"): tinker(cross_entropy),
    ("SkyRL", "loss_reduction=token_mean"): skyrl(ppo()),
    ("SkyRL", "loss_reduction=token_mean_legacy"): skyrl(ppo(), "token_mean_legacy"),
    ("SkyRL", "loss_reduction=sequence_mean"): skyrl(ppo(), "sequence_mean"),
    ("SkyRL", "loss_reduction=seq_mean_token_sum_norm, max_seq_len=8"): skyrl(ppo(), "seq_mean_token_sum_norm"),
    ("SkyRL", "loss_reduction=prompt_mean"): skyrl(ppo(), "prompt_mean"),
    ("verl", "loss_mode=vanilla"): verl(dual_clip()),
    ("verl", "loss_mode=gpg"): verl(reinforce),
    ("verl", "loss_mode=cispo"): verl(cispo(0.8, 1.2)),
    ("verl", "loss_mode=dppo_tv, clip_ratio_c=20"): verl(verl_dppo_tv),
    ("verl", "loss_mode=clip_cov"): verl(clip_cov),
    ("verl", "loss_mode=kl_cov"): verl(kl_cov),
    ("verl", "loss_mode=gspo"): verl(gspo_token(), "seq-mean-token-mean"),
    ("verl", "loss_mode=sapo"): verl(sapo, "seq-mean-token-mean"),
    ("verl", "loss_mode=geo_mean"): verl_geo_mean,
    ("verl", "loss_agg_mode=token-mean"): verl(ppo()),
    ("verl", "loss_agg_mode=token-sum"): verl(ppo(), "token-sum"),
    ("verl", "loss_agg_mode=seq-mean-token-mean"): verl(ppo(), "seq-mean-token-mean"),
    ("verl", "loss_agg_mode=seq-mean-token-sum"): verl(ppo(), "seq-mean-token-sum"),
    ("verl", "loss_agg_mode=seq-mean-token-sum-norm, loss_scale_factor=8"): verl(ppo(), "seq-mean-token-sum", LONGEST),
    ("verl", "kl_loss_type=kl"): verl(kl(lambda d: d)),
    ("verl", "kl_loss_type=abs"): verl(kl(abs)),
    ("verl", "kl_loss_type=mse"): verl(kl(lambda d: d * d / 2)),
    ("verl", "kl_loss_type=low_var_kl"): verl(kl(lambda d: clip(math.exp(clip(-d, -20, 20)) + d - 1, -10, 10))),
    ("verl", "cliprange_value=0.5"): verl(value),
    ("TRL", "loss_type=grpo"): trl(ppo(), "grpo"),
    ("TRL", "loss_type=dapo, epsilon_high=0.28"): trl(ppo(0.2, 0.28), "dapo"),
    ("TRL", "loss_type=bnpo"): trl(ppo(), "bnpo"),
    ("TRL", "loss_type=dr_grpo, max_completion_length=8"): trl(ppo(), "dr_grpo"),
    ("TRL", "loss_type=sapo"): trl(sapo, "sapo"),
    ("TRL", "loss_type=cispo, epsilon_high=5.0"): trl(cispo(-math.inf, 5.0), "cispo"),
    ("TRL", "loss_type=grpo, importance_sampling_level=sequence, epsilon=3e-4, epsilon_high=4e-4"): trl(
        gspo_sequence(3e-4, 4e-4), "grpo"
    ),
    ("TRL", "loss_type=luspo, importance_sampling_level=sequence"): trl(gspo_sequence(0.2, 0.2), "luspo"),
    ("TRL", "loss_type=grpo, delta=3.0"): trl(two_sided(3.0), "grpo"),
    ("TRL", "loss_type=vespo"): trl(vespo, "dapo"),
    ("TRL", "loss_type=dapo, beta=1.0, use_bias_correction_kl=False"): trl(kl(lambda d: math.exp(-d) + d - 1), "dapo"),
    ("TRL", "loss_type=dapo, beta=1.0"): trl(corrected(kl(lambda d: math.exp(-d) + d - 1)), "dapo"),
    ("Tinker", "loss_fn=cross_entropy"): tinker(cross_entropy),
    ("Tinker", "loss_fn=importance_sampling"): tinker(importance_sampling),
    ("Tinker", "loss_fn=ppo"): tinker(ppo()),
    ("Tinker", "loss_fn=cispo"): tinker(cispo(0.8, 1.2)),
    ("Tinker", "loss_fn=dro, beta=0.05"): tinker(dro),
}
ONE_ADVANTAGE = {key for key in PUBLISHED if key[0] == "TRL" or key == ("verl", "loss_mode=geo_mean")}
