"""Promises of a backend's optimizer step: torch's own over the gradient that it reports, clipped only on request."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from attrs import evolve
from torch import nn

from skyrl_engine.contracts.kinds.backend import OptimStep
from skyrl_engine.contracts.kinds.optimizer_settings import (
    AdafactorSettings,
    AdamW8BitSettings,
    AdamWSettings,
    LionSettings,
    MuonSettings,
    OptimizerSettings,
    SgdSettings,
)
from skyrl_engine.errors import EngineError
from skyrl_engine.modeling.optimizer import build_optimizer, parameter_groups, use_settings
from skyrl_engine.testing.backends.gradient_comparison import TOLERANCE, norm_of
from skyrl_engine.testing.backends.held_backend import Arrays, PassOrder
from skyrl_engine.testing.backends.ranks import BackendRanks
from skyrl_engine.testing.backends.subject import (
    NUMBERS,
    BackendCase,
    BackendSubject,
    backend_promise,
    exempt_with,
    exempt_without,
    require_words,
)
from skyrl_engine.testing.promise import Broken, Promise, Undecidable

STEP = 1e-3
"""Relative to how far a weight matrix moves: float32 rounds the weights themselves, which move by a hundredth of their size."""

SPEC = AdamWSettings(
    learning_rate=1e-2,
    betas=(0.8, 0.95),
    epsilon=1e-2,  # of the size of gradients, so that AdamW is not blind to their scale
    weight_decay=0.1,
    max_grad_norm=None,
)
SMALL, LARGE = 0.5, 50.0
"""Norms of gradients: within any usual limit, and far beyond."""


class ReferenceOptimizer:
    """The reference step: torch.optim.AdamW, or SGD, over whole weights in this process, in float32."""

    def __init__(self, weights: Arrays, settings: OptimizerSettings) -> None:
        self.parameters = {name: nn.Parameter(torch.tensor(weight)) for name, weight in weights.items()}
        kind = {AdamWSettings.use: torch.optim.AdamW, SgdSettings.use: torch.optim.SGD}.get(settings.use)
        self._optimizer = (
            build_optimizer(self.parameters, settings)
            if kind is None
            else kind(parameter_groups(self.parameters, 0.0), foreach=False)
        )

    def step(self, gradients: Mapping[str, object], settings: OptimizerSettings, *, factor: float = 1.0) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = torch.tensor(gradients[name]) * factor
        use_settings(self._optimizer, settings)
        self._optimizer.step()

    def weights(self) -> Arrays:
        return {name: parameter.detach().numpy().copy() for name, parameter in self.parameters.items()}


def _scale(subject: BackendSubject, case: BackendCase, norm: float) -> float:
    """Return the scale of the objective that makes its gradient norm about `norm`."""
    return norm / norm_of(subject.bench.definition(case.model, NUMBERS).gradients)


def _gradients(ranks: BackendRanks, reference: ReferenceOptimizer) -> Arrays:
    gradients = ranks.gradients()[0]
    if missing := reference.parameters.keys() - gradients.keys():
        raise Undecidable(f"there is no gradient of {min(missing)}")
    return gradients


def _compare_updates(got: Arrays, due: Arrays, before: Arrays) -> tuple[float, str, float]:
    """Return the worst parameter's error relative to its due update, its name, and the norm of all updates over that of the due ones."""
    worst, name = max(
        (float(np.linalg.norm(got[name] - due[name])) / max(float(np.linalg.norm(due[name] - before[name])), 1e-12), name)
        for name in due
    )
    due_update = {key: due[key] - before[key] for key in due}
    update = {key: got[key] - before[key] for key in due}
    return worst, name, norm_of(update) / max(norm_of(due_update), 1e-300)


def _require_step(got: Arrays, due: Arrays, before: Arrays, what: str, remedy: str) -> None:
    worst, name, ratio = _compare_updates(got, due, before)
    if worst > STEP:
        raise Broken(f"weights move x{ratio:.2f} as far as {what}: {name} ends {worst:.1e} of its way off", remedy, factor=ratio)


SETTINGS: tuple[AdamWSettings | None, ...] = (
    None,
    evolve(SPEC, learning_rate=2e-2),
    evolve(SPEC, betas=(0.5, 0.9), epsilon=3e-2),
    evolve(SPEC, learning_rate=5e-3, weight_decay=0.5),
    evolve(SPEC, max_grad_norm=0.05),
    None,
)
"""Some steps get these, one after the other, and no step may remember what an earlier one got; None: nothing."""
SGD = SgdSettings(learning_rate=0.5, weight_decay=0.1, max_grad_norm=None)
SGD_SETTINGS: tuple[SgdSettings | None, ...] = (
    None,
    evolve(SGD, learning_rate=1.0),
    evolve(SGD, weight_decay=0.5),
    evolve(SGD, max_grad_norm=0.05),
    None,
)


@backend_promise(
    "optim_step is a step of AdamW with the numbers of the call, else of setup, decaying matrices only, and reports the rate"
)
def step(subject: BackendSubject, case: BackendCase) -> None:
    _require_steps(subject, case, SPEC, SETTINGS, "AdamW")


@backend_promise(
    "Where setup is given the numbers of SGD, optim_step is a step of SGD without momentum, decaying matrices only",
    exempt=exempt_without("sgd"),
)
def sgd_step(subject: BackendSubject, case: BackendCase) -> None:
    _require_steps(subject, case, SGD, SGD_SETTINGS, "SGD")


@backend_promise("SGD, which it does not declare, is refused in words", exempt=exempt_with("sgd"))
def undeclared_sgd(subject: BackendSubject, case: BackendCase) -> None:
    _require_refusal(subject, case, SGD)


FURTHER = (
    AdamW8BitSettings(learning_rate=1e-2, epsilon=1e-2, weight_decay=0.1, max_grad_norm=None),
    AdafactorSettings(learning_rate=0.05, weight_decay=0.1, max_grad_norm=None),
    LionSettings(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=None),
    MuonSettings(learning_rate=1e-2, epsilon=1e-2, weight_decay=0.1, max_grad_norm=None),
)


@backend_promise(
    "Where setup is given the numbers of a further optimizer, optim_step is a step of it, decaying matrices only, or setup refuses in words "
    "what it does not declare"
)
def further_steps(subject: BackendSubject, case: BackendCase) -> None:
    declared = subject.describe(case.sizes.options, case.sizes.ranks).capabilities
    for spec in FURTHER:
        if spec.use in declared:
            _require_steps(subject, case, spec, (None, evolve(spec, learning_rate=2e-2), evolve(spec, weight_decay=0.5)), spec.use)
        else:
            _require_refusal(subject, case, spec)


def _require_refusal(subject: BackendSubject, case: BackendCase, spec: OptimizerSettings) -> None:
    try:
        with subject.open_ranks(case, optimizer=spec):
            pass
    except EngineError as error:
        require_words(error)
        return
    raise Broken(
        f"takes the numbers of {spec.use}, and does not declare {spec.use!r}", "Declare it, or raise UnsupportedError in setup"
    )


def _require_steps(
    subject: BackendSubject, case: BackendCase, spec: OptimizerSettings, calls: Sequence[OptimizerSettings | None], name: str
) -> None:
    """Require that steps with these numbers, one after the other, move weights as torch's optimizer does."""
    work = case.whole(scale=_scale(subject, case, SMALL))
    with subject.open_ranks(case, optimizer=spec) as ranks:
        reference = ReferenceOptimizer(ranks.weights()[0], spec)
        for number, settings in enumerate(calls):
            before = reference.weights()
            due = settings or spec
            ranks.forward_backward(work)
            gradients = _gradients(ranks, reference)
            limit = float("inf") if due.max_grad_norm is None else due.max_grad_norm
            reference.step(gradients, due, factor=min(1.0, limit / norm_of(gradients)))
            applied = ranks.optim_step(settings)[0]
            if abs(applied.learning_rate - due.learning_rate) > 1e-6 * due.learning_rate:
                raise Broken(
                    f"step {number + 1} reports the learning rate {applied.learning_rate:g}, where the call says {due.learning_rate:g}",
                    "Take the numbers of every step from the settings that optim_step is given",
                )
            _require_step(
                ranks.weights()[0],
                reference.weights(),
                before,
                f"{name} moves them in step {number + 1}",
                f"Hand the numbers of the call to {name} as they are, the limit of the norm too, and step once",
            )


@backend_promise("optim_step reports the norm of the summed gradient, of all parameters, before clipping")
def gradient_norm(subject: BackendSubject, case: BackendCase) -> None:
    limit = LARGE / 10
    with subject.open_ranks(case, optimizer=evolve(SPEC, max_grad_norm=limit)) as ranks:
        ranks.forward_backward(case.whole(scale=_scale(subject, case, LARGE)))
        due = norm_of(ranks.gradients()[0])
        reported = [each.grad_norm for each in ranks.optim_step()]
    if max(abs(each - due) for each in reported) <= 1e-4 * due:
        return
    worst = max(reported, key=lambda each: abs(each - due))
    is_clipped = abs(worst - limit) < 1e-3 * limit
    why = f": that is max_grad_norm, the norm after clipping to {limit:g}" if is_clipped else ""
    where = "" if len(set(reported)) == 1 else f" on rank {reported.index(worst)}"
    raise Broken(
        f"reports the gradient norm {worst:.6g}{where}, where gradients have the norm {due:.6g}{why}",
        "Report the norm over all parameters and ranks as it was before clipping",
        factor=worst / due,
    )


@backend_promise("Gradients are clipped to max_grad_norm where one is set, and never otherwise: their sum, and no part of it")
def clipping(subject: BackendSubject, case: BackendCase) -> None:
    """Two calls of two micro-batches each: what clips a part of the sum, or a call, gives another sum than the definition."""
    scale = _scale(subject, case, LARGE)
    calls = [PassOrder(case.cut(numbers, micro_batches=2), scale=scale) for numbers in (NUMBERS[::2], NUMBERS[1::2])]
    for limit in (None, LARGE / 10):
        # What setup says is another limit, which the call's replaces. Weights do not decay: that is the business of `step`.
        spec = evolve(SPEC, weight_decay=0.0, max_grad_norm=limit)
        with subject.open_ranks(case, optimizer=evolve(SPEC, max_grad_norm=LARGE / 20)) as ranks:
            reference = ReferenceOptimizer(ranks.weights()[0], spec)
            before = reference.weights()
            for call in calls:
                ranks.forward_backward(call)
            gradients = _gradients(ranks, reference)
            norm = norm_of(gradients)
            reference.step(gradients, spec, factor=1.0 if limit is None else min(1.0, limit / norm))
            ranks.optim_step(spec)
            got = ranks.weights()[0]
        if limit is None:
            _require_unclipped_sum(subject, case, gradients, calls, scale)
        condition = "without a limit" if limit is None else f"where max_grad_norm is {limit:g}"
        _require_step(
            got,
            reference.weights(),
            before,
            f"AdamW moves them {condition}, for a gradient of norm {norm:.3g}",
            "Turn off the library's own clipping, and clip the sum over all ranks by its global norm",
        )


def _require_unclipped_sum(
    subject: BackendSubject, case: BackendCase, gradients: Arrays, calls: Sequence[PassOrder], scale: float
) -> None:
    """Raise Broken where a large gradient is not the sum that it is by definition, and a small one of the same samples is."""
    due = subject.bench.definition(case.model, NUMBERS).gradients
    if _measure_distance(gradients, due, scale) <= TOLERANCE:
        return
    small = _scale(subject, case, SMALL)
    with subject.open_ranks(case, optimizer=SPEC) as ranks:
        for call in calls:
            ranks.forward_backward(evolve(call, scale=small))
        is_right_when_small = _measure_distance(ranks.gradients()[0], due, small) <= TOLERANCE
    if not is_right_when_small:
        raise Undecidable("the gradient is not the right one whatever its size")
    raise Broken(
        f"a gradient of norm {LARGE:g}, over two calls of two micro-batches, has the norm {norm_of(gradients):.3g} before optim_step, and a "
        "small one its own",
        "Leave gradients as they are until optim_step, and clip their sum once",
    )


def _measure_distance(gradients: Arrays, due: Arrays, scale: float) -> float:
    if gradients.keys() != due.keys():
        raise Undecidable("the gradients are not those of the model's parameters")
    difference = {name: gradients[name].astype(np.float64) - scale * due[name] for name in due}
    return norm_of(difference) / (scale * norm_of(due))


@backend_promise("A gradient that is not finite is refused on every rank, with weights and optimizer as they were")
def not_finite(subject: BackendSubject, case: BackendCase) -> None:
    remedy = "Raise ModelError before the step where the norm is not finite, on all ranks alike, and clear the gradient"
    work = case.whole(scale=_scale(subject, case, SMALL))
    with subject.open_ranks(case, optimizer=SPEC) as ranks:
        ranks.forward_backward(work)
        ranks.optim_step()
        require_nothing_left(ranks)
        before = ranks.weights()[0]
        ranks.forward_backward(evolve(work, scale=float("nan")))
        if (applied := _try_step(ranks)) is not None:
            raise Broken(f"takes a step over a gradient that is not a number, and reports the norm {applied.grad_norm}", remedy)
        _require_untouched(ranks.weights()[0], before, remedy)
        ranks.forward_backward(work)
        ranks.optim_step()
        recovered = ranks.weights()[0]
    with subject.open_ranks(case, optimizer=SPEC) as ranks:
        for _ in range(2):
            ranks.forward_backward(work)
            ranks.optim_step()
        due = ranks.weights()[0]
    for name, weight in recovered.items():
        if not np.allclose(weight, due[name], rtol=1e-5, atol=1e-7):
            raise Broken(f"the step after a refused one is another than without it: {name} differs", remedy)


@backend_promise(
    "A gradient that zero_grad drops leaves weights, moments and the count of steps as they are: the next steps' bytes are equal"
)
def dropped_gradient(subject: BackendSubject, case: BackendCase) -> None:
    """Before the first step and between two, of one call and of several, finite and not; two steps show moments and their correction."""
    work = case.whole(scale=_scale(subject, case, SMALL))
    with subject.open_ranks(case, optimizer=SPEC) as ranks:
        due = [_take_step(ranks, work) for _ in range(3)]
    dropped = ((LARGE,), (LARGE, SMALL), (float("nan"),))
    with subject.open_ranks(case, optimizer=SPEC) as ranks:
        for number, (norms, (expected, weights)) in enumerate(zip(dropped, due, strict=True), start=1):
            for norm in norms:
                ranks.forward_backward(case.whole(scale=_scale(subject, case, norm)))
            ranks.zero_grad()
            if (left := ranks.gradients()[0]) and norm_of(left):
                raise Broken(f"a gradient of norm {norm_of(left):.3g} is still there after zero_grad", DROP)
            applied, got = _take_step(ranks, work)
            if applied.grad_norm != expected.grad_norm:
                raise Broken(
                    f"the gradient of step {number} has the norm {applied.grad_norm!r} after another was dropped, and {expected.grad_norm!r} "
                    f"where there was none",
                    DROP,
                )
            for name, weight in weights.items():
                if not np.array_equal(got[name], weight):
                    distance = float(np.abs(got[name] - weight).max())
                    raise Broken(
                        f"{name} is another after step {number}, by {distance:.1e}, where a gradient was dropped before it", DROP
                    )


DROP = "Clear the gradient in zero_grad, and every buffer of it, and take no step: one of rate 0 moves moments and their count"


def _take_step(ranks: BackendRanks, work: PassOrder) -> tuple[OptimStep, Arrays]:
    ranks.forward_backward(work)
    return ranks.optim_step()[0], ranks.weights()[0]


def require_nothing_left(ranks: BackendRanks) -> None:
    """Raise Undecidable where a gradient outlives its step, because every later step is wrong then."""
    if (left := ranks.gradients()[0]) and norm_of(left):
        raise Undecidable("a gradient is left over after a step")


def _try_step(ranks: BackendRanks) -> OptimStep | None:
    try:
        return ranks.optim_step()[0]
    except EngineError:
        return None


def _require_untouched(weights: Arrays, before: Arrays, remedy: str) -> None:
    for name, weight in weights.items():
        if not np.array_equal(weight, before[name]):
            raise Broken(f"refuses a gradient that is not a number after it has changed {name}", remedy)


STEP_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (
    step,
    sgd_step,
    undeclared_sgd,
    further_steps,
    gradient_norm,
    clipping,
    not_finite,
    dropped_gradient,
)
