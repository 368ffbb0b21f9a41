"""Divergences from a teacher over the whole vocabulary, chunk by chunk, against their definition in whole softmaxes of float64."""

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_engine.contracts.kinds.needs import DIVERGENCE, TOP_1_AGREEMENT, Divergence, model_score
from skyrl_engine.errors import ModelError
from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine.modeling.chunked_head import ChunkedHead, RequestedScores
from skyrl_engine.modeling.teaching import TeacherStates
from skyrl_engine.proof.plain_model import divergence as defined

POSITIONS, WIDTH, VOCABULARY = 13, 6, 40
KINDS = [
    Divergence("forward"),
    Divergence("reverse"),
    Divergence("jensen_shannon", beta=0.5),
    Divergence("jensen_shannon", beta=0.1),
]
RULES = [LogitRule(), LogitRule(scale=0.25), LogitRule(softcap=2.0)]


def head(draw: torch.Generator, width: int = WIDTH, dtype: torch.dtype = torch.float64, *, bias: bool = True) -> torch.nn.Linear:
    linear = torch.nn.Linear(width, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return linear


def labels_of(draw: torch.Generator) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (POSITIONS,), generator=draw)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=["plain", "scale", "soft-cap"])
def test_value_and_gradient_are_those_of_whole_softmaxes(kind: Divergence, rule: LogitRule) -> None:
    """With the pass's temperature and the divergence's own, with log-probabilities and alone, in one chunk and in seven."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = head(draw), head(draw, width=9)
    hidden = torch.randn(POSITIONS, WIDTH, generator=draw, dtype=torch.float64, requires_grad=True)
    known = TeacherStates(torch.randn(POSITIONS, 9, generator=draw, dtype=torch.float64), teacher.weight, teacher.bias, LogitRule())
    labels, upstream = labels_of(draw), torch.randn(POSITIONS, generator=draw, dtype=torch.float64)
    wanted = [hidden, student.weight, student.bias]
    for temperature, own, beside, chunk in product((1.0, 0.7), (1.0, 2.5), (0.0, 1.5), (2, 4 * POSITIONS)):
        divergence = Divergence(kind.kind, kind.beta, own)
        p, q = ((rule_(logits) / temperature) for rule_, logits in ((LogitRule(), known.logits(1.0)), (rule, student(hidden))))
        exact = defined(divergence, q, p)
        logprobs = q.log_softmax(-1)[torch.arange(POSITIONS), labels]
        expected = torch.autograd.grad((upstream * exact).sum() + beside * logprobs.sum(), wanted)

        scores = RequestedScores.of((divergence.need, TOP_1_AGREEMENT), labels, {})
        got = scores.name_values(
            ChunkedHead(student, rule, chunk * VOCABULARY)(hidden, scores.tokens, temperature, scores.scores, known)
        )
        torch.testing.assert_close(got[divergence.need], exact, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(got[TOP_1_AGREEMENT], (p.argmax(-1) == q.argmax(-1)).double(), rtol=0, atol=0)
        assert not got[TOP_1_AGREEMENT].requires_grad
        total = (upstream * got[divergence.need]).sum() + (beside * got["logprobs"].sum() if beside else 0.0)
        for one, right in zip(torch.autograd.grad(total, wanted), expected, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(kind: Divergence, dtype: torch.dtype) -> None:
    """To the last bit: both sides of every difference are computed by the same operations on the same numbers."""
    draw = torch.Generator().manual_seed(1)
    student = head(draw, dtype=dtype, bias=False)
    hidden = torch.randn(POSITIONS, WIDTH, generator=draw).to(dtype).requires_grad_()
    known = TeacherStates.of(ChunkedHead(student, LogitRule(), 10**6), hidden)
    need = Divergence(kind.kind, kind.beta, temperature=2.0).need
    scores = RequestedScores.of((need, TOP_1_AGREEMENT), labels_of(draw), {})
    got = scores.name_values(ChunkedHead(student, LogitRule(), 3 * VOCABULARY)(hidden, scores.tokens, 0.7, scores.scores, known))
    got[need].sum().backward()
    assert not got[need].any()
    assert got[TOP_1_AGREEMENT].all()
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert student.weight.grad is not None
    assert not student.weight.grad.any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_far_apart_distributions_stay_finite(kind: Divergence) -> None:
    """Probabilities of e^-300: log-probabilities differ where float32 has no number for the probability itself."""
    student, teacher = torch.zeros(2, 3), torch.zeros(2, 3)
    student[0, 0], teacher[0, 1] = 300.0, 300.0
    eye = torch.nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        eye.weight.copy_(torch.eye(3))
    hidden = student.requires_grad_()
    scores = RequestedScores.of((kind.need,), torch.zeros(2, dtype=torch.int64), {})
    known = TeacherStates(teacher, eye.weight.detach(), None, LogitRule())
    got = scores.name_values(ChunkedHead(eye, LogitRule(), 30)(hidden, scores.tokens, 1.0, scores.scores, known))[kind.need]
    right = {
        "forward": 300.0,
        "reverse": 300.0,
        "jensen_shannon": -(kind.beta * torch.tensor(kind.beta).log() + (1 - kind.beta) * torch.tensor(1 - kind.beta).log()),
    }
    torch.testing.assert_close(got[0], torch.as_tensor(right[kind.kind]))
    assert got[1] == 0
    got.sum().backward()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # torch's own signature
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_no_tensor_holds_the_vocabulary_at_every_position(kind: Divergence) -> None:
    """Take 512 positions and 40 tokens: the largest tensor is half a chunk's, in forward and backward."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = head(draw), head(draw)
    hidden = torch.randn(512, WIDTH, generator=draw, dtype=torch.float64, requires_grad=True)
    known = TeacherStates(torch.randn(512, WIDTH, generator=draw, dtype=torch.float64), teacher.weight, teacher.bias, LogitRule())
    scores = RequestedScores.of((kind.need, TOP_1_AGREEMENT), torch.zeros(512, dtype=torch.int64), {})
    with Largest() as largest:
        values = ChunkedHead(student, LogitRule(), 200 * VOCABULARY)(hidden, scores.tokens, 1.0, scores.scores, known)
        values[scores.scores.index(kind.need)].sum().backward()
    assert largest.elements == 100 * VOCABULARY
    assert largest.elements > 512 * WIDTH


def test_a_teacher_with_another_number_of_logits_is_refused() -> None:
    draw = torch.Generator().manual_seed(0)
    known = TeacherStates(torch.zeros(3, WIDTH), torch.zeros(VOCABULARY + 1, WIDTH), None, LogitRule())
    scores = RequestedScores.of((KINDS[0].need,), torch.zeros(3, dtype=torch.int64), {})
    with pytest.raises(ModelError, match="the teacher has 41 logits at a position, and the trained model 40"):
        ChunkedHead(head(draw, dtype=torch.float32), LogitRule(), 99)(
            torch.zeros(3, WIDTH), scores.tokens, 1.0, scores.scores, known
        )


def test_a_need_says_the_whole_divergence() -> None:
    for divergence in (*KINDS, Divergence("forward", temperature=1e-5), Divergence("reverse", beta=0.1 + 0.2)):
        assert Divergence.of(divergence.need) == divergence
        assert model_score(divergence.need) == DIVERGENCE
