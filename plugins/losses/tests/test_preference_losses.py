"""Losses of preferences against their published formulas, a plain loop over pairs and tokens in float64: value and gradient to 1e-10.

Each oracle writes the formula as the paper does, without the rearrangements that keep floats finite; torch differentiates it. The batch has
pairs whose samples stand apart, answers of one token and of five, and a filler that belongs to nobody.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_engine.contracts import LossTokens, Pairs, Sequences, as_loss_output
from skyrl_engine.errors import DataError
from skyrl_engine_losses import plugin
from skyrl_engine_losses.preference import FORMS, CpoConfig, DpoConfig, KtoConfig, OrpoConfig, SimpoConfig
from skyrl_engine_losses.reward_model import BradleyTerryConfig

LENGTHS = (2, 5, 0, 1, 3, 4, 1)
UNITS = (7, 3, 90, 7, 3, 1, 1)
ROLES = (1, 0, 0, 0, 1, 0, 1)
PAIRS = ((1, 4), (3, 0), (5, 6))
"""Samples of the pairs, chosen first."""

MARGINS = torch.tensor([0.5, 1.5, 0.0, 0.25, 1.5, 2.0, 2.0], dtype=torch.float64)
"""One per sample: the halves of two pairs have the same, and those of the pair (3, 0) differ, so that it shows whose is read."""

Answers = list[list[Tensor]]
"""A number per token of each sample."""


def batch(seed: int, dtype: torch.dtype = torch.float64) -> LossTokens:
    draw = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    reference = torch.rand(count, generator=draw, dtype=torch.float64) * -3 - 0.05
    logprobs = (reference + 0.4 * torch.randn(count, generator=draw, dtype=torch.float64)).clamp(max=-0.01)
    counts = torch.tensor(LENGTHS)
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), counts)
    sequences = Sequences(index, counts, torch.tensor(UNITS), torch.arange(len(LENGTHS)), torch.tensor(ROLES))
    needs = {
        "logprobs": logprobs.to(dtype).requires_grad_(),
        "ref_logprobs": reference.to(dtype),
        "kl_baseline": torch.full((count,), 0.3, dtype=dtype),
        "values": torch.randn(count, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(),
        "margin": MARGINS.to(dtype)[index],
    }
    return LossTokens(needs, sequences, torch.Generator, Pairs.of(sequences))


def answers(values: Tensor) -> Answers:
    split, start = [], 0
    for length in LENGTHS:
        split.append([values[place] for place in range(start, start + length)])
        start += length
    return split


def total(numbers: list[Tensor]) -> Tensor:
    added = torch.zeros((), dtype=torch.float64)
    for number in numbers:
        added = added + number
    return added


def mean(numbers: list[Tensor]) -> Tensor:
    return total(numbers) / len(numbers)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def dpo(lp: Answers, ref: Answers, w: int, r: int, c: DpoConfig) -> Tensor:
    over = mean if c.length_normalized else total
    ratio_w, ratio_l = (over(lp[y]) - over(ref[y]) for y in (w, r))
    h, e = ratio_w - ratio_l, c.label_smoothing
    match c.form:
        case "sigmoid":
            return -(1 - e) * torch.log(sigmoid(c.beta * h)) - e * torch.log(sigmoid(-c.beta * h))
        case "robust":
            return (-(1 - e) * torch.log(sigmoid(c.beta * h)) + e * torch.log(sigmoid(-c.beta * h))) / (1 - 2 * e)
        case "ipo":
            return (h - 1 / (2 * c.beta)) ** 2
        case "hinge":
            return torch.relu(1 - c.beta * h)
        case "apo_zero":
            return 1 - sigmoid(c.beta * ratio_w) + sigmoid(c.beta * ratio_l)
        case "apo_down":
            return sigmoid(c.beta * ratio_w) + 1 - sigmoid(c.beta * h)


def simpo(lp: Answers, _ref: Answers, w: int, r: int, c: SimpoConfig) -> Tensor:
    return -torch.log(sigmoid(c.beta / len(lp[w]) * total(lp[w]) - c.beta / len(lp[r]) * total(lp[r]) - c.gamma))


def cpo(lp: Answers, _ref: Answers, w: int, r: int, c: CpoConfig) -> Tensor:
    return -torch.log(sigmoid(c.beta * total(lp[w]) - c.beta * total(lp[r]))) - c.alpha * total(lp[w])


def orpo(lp: Answers, _ref: Answers, w: int, r: int, c: OrpoConfig) -> Tensor:
    odds_w, odds_l = (torch.exp(mean(lp[y])) / (1 - torch.exp(mean(lp[y]))) for y in (w, r))
    return -mean(lp[w]) + c.lam * -torch.log(sigmoid(torch.log(odds_w / odds_l)))


CASES: list[tuple[str, Any, Callable[..., Tensor]]] = [
    *(("dpo", DpoConfig(form=form, beta=0.3), dpo) for form in FORMS),
    ("dpo", DpoConfig(label_smoothing=0.2), dpo),
    ("dpo", DpoConfig(form="robust", label_smoothing=0.2), dpo),
    *(("dpo", DpoConfig(form=form, beta=0.5, length_normalized=True), dpo) for form in ("sigmoid", "ipo")),
    ("simpo", SimpoConfig(), simpo),
    ("simpo", SimpoConfig(beta=10.0, gamma=3.0), simpo),
    ("cpo", CpoConfig(), cpo),
    ("cpo", CpoConfig(beta=0.5, alpha=0.0), cpo),
    ("orpo", OrpoConfig(), orpo),
    ("orpo", OrpoConfig(lam=1.5), orpo),
]


def run(name: str, config: Any, tokens: LossTokens) -> Any:
    return as_loss_output(name, getattr(plugin, name).skyrl_engine_make_loss(config)(tokens), len(tokens.sequences.index))


def require_same(tokens: LossTokens, token_loss: Tensor, of_sample: dict[int, Tensor], scores: Tensor | None = None) -> None:
    """Each token has its sample's value; the weights of sequence_mean make one number of it, whose gradient in `scores` (None: the
    log-probabilities) is the formula's.
    """
    scores = tokens.logprobs if scores is None else scores
    for token, sample in enumerate(tokens.sequences.index.tolist()):
        assert token_loss[token].item() == pytest.approx(of_sample[sample].item(), rel=1e-10, abs=1e-10)
    weights = 1.0 / tokens.sequences.counts.double()[tokens.sequences.index] / len(of_sample)
    (got,) = torch.autograd.grad((weights * token_loss).sum(), scores, retain_graph=True)
    (due,) = torch.autograd.grad(mean(list(of_sample.values())), scores)
    assert due.any()
    torch.testing.assert_close(got, due, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "config", "formula"), CASES, ids=[f"{name}-{config}" for name, config, _ in CASES])
def test_pairs_have_the_published_value_and_gradient(name: str, config: Any, formula: Callable[..., Tensor]) -> None:
    tokens = batch(3)
    lp, ref = answers(tokens.logprobs), answers(tokens.ref_logprobs)
    of_pair = {w: formula(lp, ref, w, r, config) for w, r in PAIRS}
    require_same(tokens, run(name, config, tokens).token_loss, of_pair | {r: of_pair[w] for w, r in PAIRS})


@pytest.mark.parametrize(
    "config",
    [BradleyTerryConfig(), BradleyTerryConfig(margins=True), BradleyTerryConfig(margins=True, center_coefficient=0.3)],
    ids=str,
)
def test_bradley_terry_has_the_published_value_and_gradient(config: BradleyTerryConfig) -> None:
    """Llama 2, equation 2, and the mean of (r_w + r_l)^2; the margin is the chosen answer's row's."""
    tokens = batch(7)
    values = answers(tokens.values)
    of_pair = {}
    for w, r in PAIRS:
        reward_w, reward_l = mean(values[w]), mean(values[r])
        margin = MARGINS[w] if config.margins else 0.0
        of_pair[w] = -torch.log(sigmoid(reward_w - reward_l - margin)) + config.center_coefficient * (reward_w + reward_l) ** 2
    output = run("bradley_terry", config, tokens)
    require_same(tokens, output.token_loss, of_pair | {r: of_pair[w] for w, r in PAIRS}, tokens.values)
    metrics = {name: metric.result for name, metric in output.metrics.items()}
    pairs = [[mean(values[y]).item() for y in pair] for pair in PAIRS]
    assert metrics == pytest.approx(
        {
            "rewards/chosen": sum(w for w, _ in pairs) / 3,
            "rewards/rejected": sum(r for _, r in pairs) / 3,
            "rewards/margins": sum(w - r for w, r in pairs) / 3,
            "rewards/accuracies": sum(w > r for w, r in pairs) / 3,
            "rewards/mean": sum(w + r for w, r in pairs) / 6,
            "rewards/min": min(map(min, pairs)),
            "rewards/max": max(map(max, pairs)),
        }
    )


def test_a_shift_of_all_rewards_changes_nothing_but_the_centering() -> None:
    tokens = batch(8)
    plain, centered = (run("bradley_terry", BradleyTerryConfig(center_coefficient=c), tokens).token_loss for c in (0.0, 0.1))
    with torch.no_grad():
        tokens.values.add_(3.0)
    torch.testing.assert_close(run("bradley_terry", BradleyTerryConfig(), tokens).token_loss, plain, rtol=1e-12, atol=1e-12)
    moved = run("bradley_terry", BradleyTerryConfig(center_coefficient=0.1), tokens).token_loss
    assert (moved - centered).abs().min() > 0.1


@pytest.mark.parametrize("config", [KtoConfig(), KtoConfig(beta=0.7, desirable_weight=1.5, undesirable_weight=0.25)], ids=str)
def test_kto_has_the_published_value_and_gradient(config: KtoConfig) -> None:
    tokens = batch(4)
    lp, ref = answers(tokens.logprobs), answers(tokens.ref_logprobs)
    of_sample = {}
    for sample in (0, 1, 3, 4, 5, 6):
        reward = total(lp[sample]) - total(ref[sample])
        if ROLES[sample] == 0:
            of_sample[sample] = config.desirable_weight * (1 - sigmoid(config.beta * (reward - 0.3)))
        else:
            of_sample[sample] = config.undesirable_weight * (1 - sigmoid(config.beta * (0.3 - reward)))
    output = run("kto", config, tokens)
    require_same(tokens, output.token_loss, of_sample)
    assert output.metrics["kl_baseline"].result == pytest.approx(0.3)
    assert output.metrics["rewards/chosen"].count == 3


def test_at_the_reference_the_loss_is_log_two() -> None:
    """Log-ratios of exactly 0 give -log sigmoid(0), with the slope -beta / 2 of a chosen token: the first step of every run."""
    tokens = batch(5)
    tokens.needs["ref_logprobs"].copy_(tokens.logprobs.detach())  # type: ignore[index]
    output = run("dpo", DpoConfig(), tokens)
    assert output.token_loss.tolist() == pytest.approx([torch.log(torch.tensor(2.0, dtype=torch.float64)).item()] * 16, rel=1e-15)
    weights = 1.0 / tokens.sequences.counts.double()[tokens.sequences.index]
    (weights * output.token_loss).sum().backward()
    assert tokens.logprobs.grad is not None
    slopes = [2 * 0.1 / 2 * (1 if ROLES[sample] else -1) for sample in tokens.sequences.index.tolist()]
    assert tokens.logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-12)
    assert output.metrics["rewards/margins"].result == 0.0
    assert output.metrics["implicit_kl"].result == 0.0


def test_metrics_are_means_over_pairs() -> None:
    """The filler, a sequence without a token, counts nowhere."""
    tokens = batch(3)
    metrics = run("dpo", DpoConfig(beta=0.3), tokens).metrics
    lp, ref = answers(tokens.logprobs), answers(tokens.ref_logprobs)
    rewards = [[0.3 * (total(lp[y]) - total(ref[y])).item() for y in pair] for pair in PAIRS]
    assert metrics["rewards/chosen"].result == pytest.approx(sum(w for w, _ in rewards) / 3)
    assert metrics["rewards/rejected"].result == pytest.approx(sum(r for _, r in rewards) / 3)
    assert metrics["rewards/margins"].result == pytest.approx(sum(w - r for w, r in rewards) / 3)
    assert metrics["rewards/accuracies"].result == pytest.approx(sum(w > r for w, r in rewards) / 3)
    assert metrics["logps/chosen"].result == pytest.approx(sum(total(lp[w]).item() for w, _ in PAIRS) / 3)
    assert metrics["implicit_kl"].result == pytest.approx(sum(w + r for w, r in rewards) / 0.3 / 6)
    assert metrics["rewards/chosen"].count == 3


@pytest.mark.parametrize(("name", "config"), [(name, config) for name, config, _ in CASES], ids=str)
def test_margins_of_a_thousand_nats_stay_finite(name: str, config: Any) -> None:
    tokens = batch(6, torch.float32)
    with torch.no_grad():
        tokens.logprobs.copy_(torch.tensor([-1000.0, 0.0, -1e-4, -1.0] * 4))
    output = run(name, config, tokens)
    output.token_loss.sum().backward()
    assert output.token_loss.dtype == torch.float32
    assert output.token_loss.isfinite().all()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.isfinite().all()


def test_smoothing_belongs_to_two_forms() -> None:
    with pytest.raises(ValueError, match="belongs to the forms"):
        DpoConfig(form="ipo", label_smoothing=0.1)


def test_a_unit_without_a_rejected_answer_is_refused() -> None:
    chosen = torch.tensor([1])
    with pytest.raises(DataError, match="no rejected sample"):
        Pairs.of(Sequences(torch.tensor([0]), chosen, chosen, chosen, torch.tensor([0])))
