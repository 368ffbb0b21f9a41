"""Losses of distillation against their published formulas over whole distributions, in float64: value and gradient to 1e-10.

The oracles are loops over a vocabulary of seven tokens and write each formula as its paper does; torch differentiates them by the student's
logits. Expectations over the student's samples are sums over the vocabulary, so that nothing is drawn.
"""

from typing import Any

import pytest
import torch
from loss_oracles import sequences_of
from test_preference_losses import total
from torch import Tensor

from skyrl_engine.contracts import TOP_1_AGREEMENT, AlignedDivergence, LossOutput, LossTokens, as_loss_output
from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine.modeling.chunked_head import ChunkedHead, RequestedScores
from skyrl_engine.modeling.teaching import TeacherStates
from skyrl_engine_losses import plugin
from skyrl_engine_losses.distillation import DivergenceConfig, GoldConfig, TeacherKlConfig, TopKDivergenceConfig, UldConfig

VOCABULARY, TOKENS = 7, 5


def logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 1.5 * torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def divergence(
    student: Tensor, k: int, config: TopKDivergenceConfig, teacher: Tensor | None = None
) -> tuple[LossOutput, Tensor, Tensor]:
    """The loss of a student's logits [n, V] at the teacher's k likeliest tokens; those tokens' ids, and the teacher's distribution."""
    teacher = (logits(1) if teacher is None else teacher).log_softmax(-1)
    chosen, ids = teacher.topk(k, -1)
    needs = {"logprobs_at:teacher_ids": student.log_softmax(-1).gather(-1, ids), "teacher_logprobs": chosen.to(student.dtype)}
    loss = plugin.top_k_divergence.skyrl_engine_make_loss(config)
    tokens = LossTokens(needs, sequences_of([2, 0, 3]), torch.Generator)
    return as_loss_output("top_k_divergence", loss(tokens), TOKENS), ids, teacher.exp()


def kl(first: list[Tensor], second: list[Tensor]) -> Tensor:
    return total([f * (torch.log(f) - torch.log(s)) for f, s in zip(first, second, strict=True)])


def outcomes(distribution: Tensor, ids: list[int], rest: str) -> list[Tensor]:
    """The probabilities that a divergence is taken over."""
    named = [distribution[token_id] for token_id in ids]
    if rest == "one":
        return [*named, total([distribution[token_id] for token_id in range(VOCABULARY) if token_id not in ids])]
    return named if rest == "none" else [probability / total(named) for probability in named]


def oracle(p: list[Tensor], q: list[Tensor], config: TopKDivergenceConfig) -> Tensor:
    match config.divergence:
        case "forward":
            return kl(p, q)
        case "reverse":
            return kl(q, p)
        case "jensen_shannon":
            mixture = [config.beta * a + (1 - config.beta) * b for a, b in zip(p, q, strict=True)]
            return config.beta * kl(p, mixture) + (1 - config.beta) * kl(q, mixture)


CONFIGS = [
    TopKDivergenceConfig(form, beta, rest)
    for form, beta in (("forward", 0.5), ("reverse", 0.5), ("jensen_shannon", 0.5), ("jensen_shannon", 0.1))
    for rest in ("one", "none", "normalize")
]


def require_equal(output: LossOutput, due: list[torch.Tensor], student: torch.Tensor) -> None:
    """Values, the gradient of their weighted sum by the student's logits, and the metric are those of the definition, `due` by token."""
    assert output.token_loss.tolist() == pytest.approx([value.item() for value in due], rel=1e-10, abs=1e-10)
    weights = torch.linspace(0.2, 1.0, TOKENS, dtype=torch.float64)
    (got,) = torch.autograd.grad((weights * output.token_loss).sum(), student)
    (expected,) = torch.autograd.grad(total([w * value for w, value in zip(weights, due, strict=True)]), student)
    assert expected.any()
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert output.metrics["divergence"].result == pytest.approx(sum(value.item() for value in due) / TOKENS)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.divergence}-{config.beta}-{config.rest}")
def test_top_k_has_the_published_value_and_gradient(config: TopKDivergenceConfig) -> None:
    student = logits(2).requires_grad_()
    output, ids, teacher = divergence(student, 3, config)
    q = student.softmax(-1)
    due = [
        oracle(outcomes(teacher[t], ids[t].tolist(), config.rest), outcomes(q[t], ids[t].tolist(), config.rest), config)
        for t in range(TOKENS)
    ]
    require_equal(output, due, student)


@pytest.mark.parametrize("form", ["forward", "reverse", "jensen_shannon"])
def test_all_tokens_give_the_divergence_of_whole_distributions(form: Any) -> None:
    """As torch's kl_div has it, which takes the second argument's logarithm first."""
    student = logits(2)
    output, *_ = divergence(student, VOCABULARY, TopKDivergenceConfig(form, rest="none"))
    p, q = logits(1).log_softmax(-1), student.log_softmax(-1)

    def torchs(first: Tensor, second: Tensor) -> Tensor:
        return torch.nn.functional.kl_div(second, first, reduction="none", log_target=True).sum(-1)

    mixture = ((p.exp() + q.exp()) / 2).log()
    due = {"forward": torchs(p, q), "reverse": torchs(q, p), "jensen_shannon": (torchs(p, mixture) + torchs(q, mixture)) / 2}
    torch.testing.assert_close(output.token_loss, due[form], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("beta", "form", "scale"), [(1e-6, "forward", 1e-6), (1 - 1e-6, "reverse", 1e-6)])
def test_jensen_shannon_points_to_either_side(beta: float, form: Any, scale: float) -> None:
    """JS(beta) / beta goes to the forward divergence as beta goes to 0, and JS / (1 - beta) to the reverse one as it goes to 1."""
    gradients = []
    for config in (TopKDivergenceConfig("jensen_shannon", beta), TopKDivergenceConfig(form)):
        student = logits(2).requires_grad_()
        output, *_ = divergence(student, 3, config)
        gradients.append(torch.autograd.grad(output.token_loss.sum(), student)[0])
    torch.testing.assert_close(gradients[0] / scale, gradients[1], rtol=1e-4, atol=1e-5)


def test_a_student_equal_to_its_teacher_learns_nothing() -> None:
    for config in CONFIGS:
        if config.rest == "none" and config.divergence != "jensen_shannon":
            continue
        student = logits(1).requires_grad_()
        output, *_ = divergence(student, 3, config)
        (gradient,) = torch.autograd.grad(output.token_loss.sum(), student)
        assert output.token_loss.abs().max() < 1e-12
        assert gradient.abs().max() < 1e-12
        assert output.metrics["top_1_agreement"].result == 1.0


def test_without_the_rest_the_reverse_divergence_drives_probability_away_from_the_k() -> None:
    """The page warns of this: at q = p the gradient of sum q log(q / p) is that of the k tokens' mass, which descent lowers."""
    student = logits(1).requires_grad_()
    output, ids, _ = divergence(student, 3, TopKDivergenceConfig("reverse", rest="none"))
    (gradient,) = torch.autograd.grad(output.token_loss.sum(), student)
    mass = student.softmax(-1).gather(-1, ids).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(mass, student)[0], rtol=1e-10, atol=1e-10)


def test_agreement_is_between_the_likeliest_of_the_k() -> None:
    student = logits(1)
    best = student.argmax(-1)
    student[0, best[0]] = -9.0
    student[3, best[3]] = -9.0
    output, *_ = divergence(student, 3, TopKDivergenceConfig())
    assert (output.metrics["top_1_agreement"].value, output.metrics["top_1_agreement"].count) == (3, TOKENS)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_certain_distributions_stay_finite(config: TopKDivergenceConfig) -> None:
    """In float32 the k of a certain model add up to 1, or to a little more."""
    student = (40 * logits(2, torch.float32)).requires_grad_()
    output, *_ = divergence(student, 3, config, teacher=40 * logits(1, torch.float32))
    (gradient,) = torch.autograd.grad(output.token_loss.sum(), student)
    assert output.token_loss.dtype == torch.float32
    assert output.token_loss.isfinite().all()
    assert gradient.isfinite().all()


def expected_gradient(estimator: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The mean gradient of `teacher_kl` over all tokens that the student may sample, by its logits [V]; those logits, and the teacher's."""
    student, teacher = logits(2)[0].requires_grad_(), logits(1)[0].log_softmax(-1)
    logprobs = student.log_softmax(-1)
    loss = plugin.teacher_kl.skyrl_engine_make_loss(TeacherKlConfig(estimator))
    output = as_loss_output(
        "teacher_kl", loss(LossTokens({"logprobs": logprobs, "teacher_logprobs": teacher}, sequences_of([7]), torch.Generator)), 7
    )
    (gradient,) = torch.autograd.grad((logprobs.detach().exp() * output.token_loss).sum(), student)
    return gradient, student, teacher


def test_the_mean_gradient_of_k2_is_that_of_the_reverse_divergence() -> None:
    gradient, student, teacher = expected_gradient("k2")
    q = student.log_softmax(-1)
    (due,) = torch.autograd.grad((q.exp() * (q - teacher)).sum(), student)
    torch.testing.assert_close(gradient, due, rtol=1e-10, atol=1e-10)


def test_the_mean_gradient_of_k1_is_nothing() -> None:
    """E_q[grad log q] = sum grad q = grad 1 = 0, wherever the teacher is: as a loss it is noise alone."""
    gradient, *_ = expected_gradient("k1")
    assert gradient.abs().max() < 1e-15


def test_the_mean_gradient_of_k3_is_that_of_the_forward_divergence() -> None:
    gradient, student, teacher = expected_gradient("k3")
    (due,) = torch.autograd.grad((teacher.exp() * (teacher - student.log_softmax(-1))).sum(), student)
    torch.testing.assert_close(gradient, due, rtol=1e-10, atol=1e-10)


def estimated(estimator: Any, student: float, teacher: float) -> LossOutput:
    """`teacher_kl` of one token with these log-probabilities."""
    loss = plugin.teacher_kl.skyrl_engine_make_loss(TeacherKlConfig(estimator))
    needs = {
        "logprobs": torch.tensor([student], dtype=torch.float64),
        "teacher_logprobs": torch.tensor([teacher], dtype=torch.float64),
    }
    return as_loss_output("teacher_kl", loss(LossTokens(needs, sequences_of([1]), torch.Generator)), 1)


@pytest.mark.parametrize(("estimator", "due"), [("k1", 0.5), ("abs", 0.5), ("k2", 0.125), ("k3", 0.10653065971263342)])
def test_estimates_of_one_token(estimator: Any, due: float) -> None:
    """D = 0.5: exp(-0.5) + 0.5 - 1 for k3. The metric is d itself, whatever is trained on."""
    output = estimated(estimator, -1.0, -1.5)
    assert output.token_loss.item() == pytest.approx(due, rel=1e-12)
    assert output.metrics["divergence"].result == 0.5


def whole(student: Tensor, config: DivergenceConfig, temperature: float = 1.0) -> LossOutput:
    """The loss `divergence` of a student's logits [n, V], which are its hidden states before a head that changes nothing."""
    eye = torch.nn.Linear(VOCABULARY, VOCABULARY, bias=False, dtype=student.dtype)
    with torch.no_grad():
        eye.weight.copy_(torch.eye(VOCABULARY))
    loss = plugin.divergence.skyrl_engine_make_loss(config)
    requested = RequestedScores.of(loss.needs, torch.zeros(TOKENS, dtype=torch.int64), {})
    known = TeacherStates(logits(1, student.dtype), eye.weight.detach(), None, LogitRule())
    scores = requested.name_values(
        ChunkedHead(eye, LogitRule(), 4 * VOCABULARY)(student, requested.tokens, temperature, requested.scores, known)
    )
    needs = {"divergence": scores[config.score.need], TOP_1_AGREEMENT: scores[TOP_1_AGREEMENT]}
    return as_loss_output("divergence", loss(LossTokens(needs, sequences_of([2, 0, 3]), torch.Generator)), TOKENS)


@pytest.mark.parametrize("form", ["forward", "reverse", "jensen_shannon"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_whole_vocabulary_has_the_published_value_and_gradient(form: Any, temperature: float) -> None:
    student = logits(2).requires_grad_()
    config = DivergenceConfig(form, 0.3, temperature)
    output = whole(student, config)
    p, q = ((values / temperature).softmax(-1) for values in (logits(1), student))
    due = [oracle(list(p[t]), list(q[t]), TopKDivergenceConfig(form, 0.3)) for t in range(TOKENS)]
    require_equal(output, due, student)
    assert output.metrics["top_1_agreement"].value == int((p.argmax(-1) == q.argmax(-1)).sum())


def aligned(name: str, config: UldConfig | GoldConfig) -> LossOutput:
    """A loss that aligns tokens, of distances as the model gives them: one per token, 0 where no group ends."""
    distances = torch.tensor([0.0, 0.4, 0.0, 0.1, 0.3], dtype=torch.float64)
    loss = getattr(plugin, name).skyrl_engine_make_loss(config)
    assert loss.needs == (config.score.need,)
    tokens = LossTokens({"divergence": distances}, sequences_of([2, 0, 3]), torch.Generator)
    output = as_loss_output(name, loss(tokens), TOKENS)
    assert torch.equal(output.token_loss, distances)
    return output


@pytest.mark.parametrize(("name", "config"), [("uld", UldConfig()), ("gold", GoldConfig(0.3, 1.0, 0.5)), ("gold", GoldConfig())])
def test_aligned_distances_are_the_loss_and_their_need_says_all_options(name: str, config: UldConfig | GoldConfig) -> None:
    assert aligned(name, config).metrics["divergence"].result == pytest.approx(0.8 / TOKENS)
    assert AlignedDivergence.of(config.score.need) == config.score
    with pytest.raises(ValueError, match="must be given together"):
        GoldConfig(matched_weight=1.0)


METRICS = {
    "gold": lambda: aligned("gold", GoldConfig()).metrics,
    "uld": lambda: aligned("uld", UldConfig()).metrics,
    "divergence": lambda: whole(logits(2), DivergenceConfig()).metrics,
    "top_k_divergence": lambda: divergence(logits(2), 3, TopKDivergenceConfig())[0].metrics,
    "teacher_kl": lambda: estimated("k2", -1.0, -1.5).metrics,
}
"""Metrics that each reports."""
