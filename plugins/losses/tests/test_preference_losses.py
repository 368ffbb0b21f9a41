"""Losses of preferences against their published formulas, a plain loop over pairs and tokens in float64: value and gradient to 1e-10.

Each oracle writes the formula as the paper does, without the rearrangements that keep floats finite; torch differentiates it. The batch has
pairs whose samples stand apart, answers of one token and of five, and a filler that belongs to nobody.
"""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from skyrl_engine.contracts import LossTokens, Pairs, Sequences, as_loss_output
from skyrl_engine.errors import DataError
from skyrl_engine_losses import plugin
from skyrl_engine_losses.preference import OF_MARGIN, SORTED, CpoConfig, DpoConfig, Form, KtoConfig, OrpoConfig, SimpoConfig
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
        "log_sum_squares": (torch.rand(count, generator=draw, dtype=torch.float64) * -2).to(dtype).requires_grad_(),
        "values": torch.randn(count, generator=draw, dtype=torch.float64).to(dtype).requires_grad_(),
        "margin": MARGINS.to(dtype)[index],
        "step_label": torch.randint(0, 2, (count,), generator=draw).to(dtype),
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


def cut_total(numbers: list[Tensor], shorter: int, alpha: float | None) -> Tensor:
    """The sum of an answer's tokens, of which those beyond the first `shorter` ones count `alpha` times."""
    return total(numbers) if alpha is None else total(numbers[:shorter]) + alpha * total(numbers[shorter:])


def f_prime(ratio: Tensor, c: DpoConfig) -> Tensor:
    """The derivative at u = exp(ratio) of the f of each divergence, up to a constant: table 1 of Wang et al. 2023."""
    u = torch.exp(ratio)
    match c.f_divergence:
        case "reverse_kl":
            return torch.log(u)
        case "forward_kl":
            return -1 / u
        case "js_divergence":
            return torch.log(2 * u / (1 + u))
        case "alpha_divergence":
            return (u ** (c.f_alpha - 1) - 1) / (c.f_alpha - 1)


def dpo(lp: Answers, ref: Answers, w: int, r: int, c: DpoConfig) -> Tensor:
    shorter = min(len(lp[w]), len(lp[r]))
    ratios = [cut_total(lp[y], shorter, c.ld_alpha) - cut_total(ref[y], shorter, c.ld_alpha) for y in (w, r)]
    ratio_w, ratio_l = (
        f_prime(ratio, c) / (len(lp[y]) if c.length_normalized else 1) for ratio, y in zip(ratios, (w, r), strict=True)
    )
    h, e = ratio_w - ratio_l, c.label_smoothing
    log_s = lambda x: torch.log(sigmoid(c.beta * x))  # noqa: E731
    match c.form:
        case "exo_pair":
            p, q = sigmoid(c.beta * h), sigmoid(-c.beta * h)
            return p * (torch.log(p) - math.log(1 - e)) + q * (torch.log(q) - math.log(e))
        case "discopop":
            share = sigmoid(c.beta * h / c.discopop_tau)
            return (1 - share) * -log_s(h) + share * torch.exp(-c.beta * h)
        case "nca_pair":
            return -log_s(ratio_w) - 0.5 * log_s(-ratio_w) - 0.5 * log_s(-ratio_l)
        case "bco_pair":
            return -log_s(ratio_w) - log_s(-ratio_l)
        case "sppo_hard":
            return (ratio_w - 0.5 / c.beta) ** 2 + (ratio_l + 0.5 / c.beta) ** 2
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
        case _:
            raise AssertionError(f"{c.form} compares more than one pair")


def transported(lp: Answers, ref: Answers, c: DpoConfig) -> Tensor:
    """The mean over ranks of -log sigmoid(beta (k-th smallest of one - k-th smallest of the other)), smoothed."""
    if c.form == "aot":
        high = [total(lp[w]) - total(lp[r]) for w, r in PAIRS]
        low = [total(ref[w]) - total(ref[r]) for w, r in PAIRS]
    else:
        high = [total(lp[w]) - total(ref[w]) for w, _ in PAIRS]
        low = [total(lp[r]) - total(ref[r]) for _, r in PAIRS]
    gaps = [a - b for a, b in zip(sorted(high, key=Tensor.item), sorted(low, key=Tensor.item), strict=True)]
    e = c.label_smoothing
    return mean([-(1 - e) * torch.log(sigmoid(c.beta * gap)) - e * torch.log(sigmoid(-c.beta * gap)) for gap in gaps])


def alpha_reward(logprob: Tensor, alpha: float) -> Tensor:
    return (1 - torch.exp(logprob) ** -alpha) / alpha if alpha else logprob


def simpo(lp: Answers, _ref: Answers, w: int, r: int, c: SimpoConfig) -> Tensor:
    m = c.beta * alpha_reward(mean(lp[w]), c.reward_alpha) - c.beta * alpha_reward(mean(lp[r]), c.reward_alpha) - c.gamma
    return -(1 - c.label_smoothing) * torch.log(sigmoid(m)) - c.label_smoothing * torch.log(sigmoid(-m))


def cpo(lp: Answers, _ref: Answers, w: int, r: int, c: CpoConfig) -> Tensor:
    over = mean if c.length_normalized else total
    h = alpha_reward(over(lp[w]), c.reward_alpha) - alpha_reward(over(lp[r]), c.reward_alpha)
    match c.form:
        case "sigmoid":
            e = c.label_smoothing
            preferred = -(1 - e) * torch.log(sigmoid(c.beta * h)) - e * torch.log(sigmoid(-c.beta * h))
        case "hinge":
            preferred = torch.relu(1 - c.beta * h)
        case "ipo":
            preferred = (h - 1 / (2 * c.beta)) ** 2
    return preferred - c.alpha * total(lp[w])


def orpo(lp: Answers, _ref: Answers, w: int, r: int, c: OrpoConfig) -> Tensor:
    odds_w, odds_l = (torch.exp(mean(lp[y])) / (1 - torch.exp(mean(lp[y]))) for y in (w, r))
    return -mean(lp[w]) + c.lam * -torch.log(sigmoid(torch.log(odds_w / odds_l)))


PAIRWISE = tuple(form for form in get_args(Form) if form not in SORTED)

CASES: list[tuple[str, Any, Callable[..., Tensor]]] = [
    *(("dpo", DpoConfig(form=form, beta=0.3, label_smoothing=1e-3 * (form == "exo_pair")), dpo) for form in PAIRWISE),
    *(
        ("dpo", DpoConfig(form=form, f_divergence=divergence, label_smoothing=0.1 * (form in ("robust", "exo_pair"))), dpo)
        for form, divergence in zip(OF_MARGIN, ("forward_kl", "js_divergence", "alpha_divergence") * 2, strict=True)
    ),
    ("dpo", DpoConfig(f_divergence="alpha_divergence", f_alpha=1.5, length_normalized=True), dpo),
    ("dpo", DpoConfig(form="discopop", discopop_tau=0.5, beta=2.0), dpo),
    *(("dpo", DpoConfig(form=form, ld_alpha=alpha), dpo) for form, alpha in (("sigmoid", 0.25), ("nca_pair", 0.0), ("ipo", 1.0))),
    ("dpo", DpoConfig(label_smoothing=0.2), dpo),
    ("dpo", DpoConfig(form="robust", label_smoothing=0.2), dpo),
    *(("dpo", DpoConfig(form=form, beta=0.5, length_normalized=True), dpo) for form in ("sigmoid", "ipo")),
    ("simpo", SimpoConfig(), simpo),
    ("simpo", SimpoConfig(beta=10.0, gamma=3.0), simpo),
    ("cpo", CpoConfig(), cpo),
    ("cpo", CpoConfig(beta=0.5, alpha=0.0), cpo),
    ("cpo", CpoConfig(form="hinge", reward_alpha=0.25), cpo),
    ("cpo", CpoConfig(form="ipo", length_normalized=True, alpha=0.5), cpo),
    ("cpo", CpoConfig(label_smoothing=0.1, reward_alpha=-0.1, length_normalized=True), cpo),
    ("simpo", SimpoConfig(reward_alpha=0.25, label_smoothing=0.1), simpo),
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


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("form", SORTED)
def test_sorted_pairs_have_the_published_value_and_gradient(form: Form, smoothing: float) -> None:
    """A value of a rank is at the pair whose number has that rank, so that the mean over pairs is the mean over ranks."""
    config, tokens = DpoConfig(form=form, beta=0.7, label_smoothing=smoothing), batch(3)
    made = run("dpo", config, tokens).token_loss
    due = transported(answers(tokens.logprobs), answers(tokens.ref_logprobs), config)
    got = (made / tokens.sequences.counts.double()[tokens.sequences.index]).sum() / (2 * len(PAIRS))
    assert got.item() == pytest.approx(due.item(), rel=1e-12)
    (got_gradient,) = torch.autograd.grad(got, tokens.logprobs)
    (due_gradient,) = torch.autograd.grad(due, tokens.logprobs)
    torch.testing.assert_close(got_gradient, due_gradient, rtol=1e-10, atol=1e-12)
    assert plugin.dpo.skyrl_engine_make_loss(config).batch_local
    assert not plugin.dpo.skyrl_engine_make_loss(DpoConfig()).batch_local


def test_pairs_of_equal_log_ratios_learn_alike() -> None:
    """Equal numbers have no order, so nothing may depend on how pairs are numbered."""
    tokens = batch(3)
    with torch.no_grad():
        tokens.logprobs.copy_(tokens.ref_logprobs)
        tokens.logprobs[0] += 0.5  # of sample 0, a rejected answer
    values = run("dpo", DpoConfig(form="aot_unpaired"), tokens).token_loss
    assert values.tolist() == pytest.approx([values[0].item()] * len(values), rel=1e-12)
    values.sum().backward()
    assert tokens.logprobs.grad is not None
    of_chosen = [
        tokens.logprobs.grad[token].item() for token, sample in enumerate(tokens.sequences.index.tolist()) if not ROLES[sample]
    ]
    assert of_chosen == pytest.approx([of_chosen[0]] * len(of_chosen), rel=1e-12)


@pytest.mark.parametrize("form", ["sigmoid", "sppo_hard"])
def test_weighted_pairs_count_as_often_as_the_model_writes_them(form: Form) -> None:
    """WPO, equation 2: exp of the mean over tokens of log p - log sum p^2, of both answers, without a gradient."""
    config, tokens = DpoConfig(form=form, weighted=True), batch(3)
    lp, ref, squares = (answers(values) for values in (tokens.logprobs, tokens.ref_logprobs, tokens.log_sum_squares))
    of_pair = {}
    for pair in PAIRS:
        weight = torch.exp(sum(mean([p - s for p, s in zip(lp[y], squares[y], strict=True)]) for y in pair)).detach()
        of_pair[pair[0]] = weight * dpo(lp, ref, *pair, DpoConfig(form=form))
    output = run("dpo", config, tokens)
    require_same(tokens, output.token_loss, of_pair | {r: of_pair[w] for w, r in PAIRS})
    assert torch.autograd.grad(output.token_loss.sum(), tokens.log_sum_squares, allow_unused=True) == (None,)
    needs = [plugin.dpo.skyrl_engine_make_loss(each).needs for each in (config, DpoConfig())]
    assert ["log_sum_squares" in need for need in needs] == [True, False]


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


def test_step_cross_entropy_is_that_of_a_classifier_with_two_labels() -> None:
    """Torch's own cross entropy of the logits (0, v), value and gradient; a label is its column's, 1 for a right step."""
    tokens = batch(11)
    labels = tokens.step_label.long()
    output = run("step_cross_entropy", None, tokens)
    own = tokens.values.detach().clone().requires_grad_()
    logits = torch.stack([torch.zeros_like(own), own], dim=1)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(output.token_loss, expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(0.1, 1.7, len(own), dtype=torch.float64)
    (got,) = torch.autograd.grad((weights * output.token_loss).sum(), tokens.values)
    (wanted,) = torch.autograd.grad((weights * expected).sum(), own)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    metrics = {name: metric.result for name, metric in output.metrics.items()}
    assert metrics["steps/accuracy"] == pytest.approx(((own > 0) == (labels > 0)).double().mean().item())
    assert metrics["steps/right"] == pytest.approx(labels.double().mean().item())
    assert metrics["steps/probability"] == pytest.approx(own.sigmoid().mean().item())


def test_a_shift_of_all_rewards_changes_nothing_but_the_centering() -> None:
    tokens = batch(8)
    plain, centered = (run("bradley_terry", BradleyTerryConfig(center_coefficient=c), tokens).token_loss for c in (0.0, 0.1))
    with torch.no_grad():
        tokens.values.add_(3.0)
    torch.testing.assert_close(run("bradley_terry", BradleyTerryConfig(), tokens).token_loss, plain, rtol=1e-12, atol=1e-12)
    moved = run("bradley_terry", BradleyTerryConfig(center_coefficient=0.1), tokens).token_loss
    assert (moved - centered).abs().min() > 0.1


@pytest.mark.parametrize(
    "config",
    [
        KtoConfig(),
        KtoConfig(beta=0.7, desirable_weight=1.5, undesirable_weight=0.25),
        KtoConfig(form="apo_zero_unpaired", beta=0.7, desirable_weight=1.5, undesirable_weight=0.25),
    ],
    ids=str,
)
def test_kto_has_the_published_value_and_gradient(config: KtoConfig) -> None:
    tokens = batch(4)
    lp, ref = answers(tokens.logprobs), answers(tokens.ref_logprobs)
    of_sample = {}
    z = 0.3 if config.form == "kto" else 0.0
    for sample in (0, 1, 3, 4, 5, 6):
        reward = total(lp[sample]) - total(ref[sample])
        if ROLES[sample] == 0:
            of_sample[sample] = config.desirable_weight * (1 - sigmoid(config.beta * (reward - z)))
        else:
            of_sample[sample] = config.undesirable_weight * (1 - sigmoid(config.beta * (z - reward)))
    output = run("kto", config, tokens)
    require_same(tokens, output.token_loss, of_sample)
    has_baseline = config.form == "kto"
    assert ("kl_baseline" in plugin.kto.skyrl_engine_make_loss(config).needs) is has_baseline
    assert ("kl_baseline" in output.metrics) is has_baseline
    if has_baseline:
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


@pytest.mark.parametrize(
    "config", [DpoConfig(beta=0.3), DpoConfig(beta=0.3, length_normalized=True, f_divergence="js_divergence")], ids=str
)
def test_metrics_are_means_over_pairs(config: DpoConfig) -> None:
    """The filler, a sequence without a token, counts nowhere. Rewards are of whole answers, whatever the loss compares, as in TRL."""
    tokens = batch(3)
    metrics = run("dpo", config, tokens).metrics
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"form": "ipo", "label_smoothing": 0.1}, "belongs to the forms sigmoid, robust"),
        ({"form": "exo_pair"}, "must be above 0"),
        ({"form": "aot", "length_normalized": True}, "sorts log-ratios of whole answers"),
        ({"form": "nca_pair", "f_divergence": "forward_kl"}, "belongs to the forms sigmoid"),
        ({"f_alpha": 0.25}, 'belongs to f_divergence = "alpha_divergence"'),
        ({"f_divergence": "alpha_divergence", "f_alpha": 1.0}, "reverse_kl"),
        ({"discopop_tau": 0.1}, 'belongs to the form "discopop"'),
        ({"form": "discopop", "discopop_tau": 2.0}, "discopop_tau"),
        ({"ld_alpha": 1.5}, "ld_alpha"),
    ],
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DpoConfig(**options)
    with pytest.raises(ValueError, match='belongs to the form "sigmoid"'):
        CpoConfig(form="hinge", label_smoothing=0.1)


def test_ld_metrics_count_the_tail_as_the_loss_does() -> None:
    tokens = batch(3)
    metrics = run("dpo", DpoConfig(ld_alpha=0.5), tokens).metrics
    lp, ref = answers(tokens.logprobs), answers(tokens.ref_logprobs)
    shorter = {y: min(len(lp[w]), len(lp[r])) for w, r in PAIRS for y in (w, r)}
    chosen = [cut_total(lp[w], shorter[w], 0.5) for w, _ in PAIRS]
    gains = [lp_w - cut_total(ref[w], shorter[w], 0.5) for lp_w, (w, _) in zip(chosen, PAIRS, strict=True)]
    assert metrics["logps/chosen"].result == pytest.approx(mean(chosen).item())
    assert metrics["rewards/chosen"].result == pytest.approx(0.1 * mean(gains).item())


def test_a_unit_without_a_rejected_answer_is_refused() -> None:
    chosen = torch.tensor([1])
    with pytest.raises(DataError, match="no rejected sample"):
        Pairs.of(Sequences(torch.tensor([0]), chosen, chosen, chosen, torch.tensor([0])))
