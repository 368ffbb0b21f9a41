"""Promises of a backend about a second model on the same ranks, such as a reference or a teacher: neither changes the other."""

from skyrl_engine.testing.backends.bench import Model
from skyrl_engine.testing.backends.gradient_comparison import require_same_weights
from skyrl_engine.testing.backends.ranks import BackendRanks
from skyrl_engine.testing.backends.step_promises import SPEC
from skyrl_engine.testing.backends.subject import NUMBERS, BackendCase, BackendSubject, backend_promise, is_right_loss
from skyrl_engine.testing.promise import Broken, Promise

SECOND: Model = "llama"
OWN = "Keep model, gradients, moments and process groups in the product, and nothing of them in its class or module"


def _exempt_without_second_model(subject: BackendSubject) -> str | None:
    return None if subject.declares("second_model") else "the backend does not declare 'second_model'"


@backend_promise(
    "A second model on the same ranks scores as it does alone, before and after steps of the first, which learns bit for bit as alone",
    exempt=_exempt_without_second_model,
)
def second_model(subject: BackendSubject, case: BackendCase) -> None:
    if "second_model" not in subject.describe(case.sizes.options, case.sizes.ranks).capabilities:
        return
    with subject.open_ranks(case, optimizer=SPEC) as first:
        alone = [_call(first, case), _step(first), _call(first, case), _step(first)]
        weights_alone = first.weights()[0]
    with subject.open_ranks(case, optimizer=SPEC) as first:
        together = [_call(first, case)]
        with first.second_model(subject.bench.model(SECOND)) as second:
            _require_its_own(subject, case, second, "where the first has a gradient")
            together.append(_step(first))
            _require_its_own(subject, case, second, "after a step of the first")
            together.append(_call(first, case))
        together.append(_step(first))
        weights = first.weights()[0]
    for number, (got, due) in enumerate(zip(together, alone, strict=True)):
        if got != due:
            what = "gradient norm" if number % 2 else "objective"
            raise Broken(
                f"of the first model, the {what} of step {1 + number // 2} is {got!r} beside a second, and {due!r} alone", OWN
            )
    require_same_weights(weights, weights_alone, "of the first model", OWN)


def _call(first: BackendRanks, case: BackendCase) -> float:
    return first.loss(first.forward_backward(case.whole()))


def _step(first: BackendRanks) -> float:
    return first.optim_step()[0].grad_norm


def _require_its_own(subject: BackendSubject, case: BackendCase, second: BackendRanks, when: str) -> None:
    got = second.loss(second.forward(case.whole()))
    if not is_right_loss(subject, BackendCase(case.layout, SECOND), got):
        due = subject.bench.definition(SECOND, NUMBERS).loss
        raise Broken(f"of the second model, the objective is {got:.6g} {when}, where it gives {due:.6g} alone", OWN)


SECOND_MODEL_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (second_model,)
