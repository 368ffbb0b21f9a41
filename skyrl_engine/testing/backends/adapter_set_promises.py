"""Promises of a backend about several sets of adapters over one base model: each learns as if the others were not there."""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from attrs import define, evolve, field, frozen

from skyrl_engine.contracts.values.model import LoraConfig
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.testing.backends.bench import Model
from skyrl_engine.testing.backends.gradient_comparison import require_same_weights
from skyrl_engine.testing.backends.held_backend import Arrays, PassOrder
from skyrl_engine.testing.backends.ranks import BackendRanks
from skyrl_engine.testing.backends.step_promises import SPEC
from skyrl_engine.testing.backends.subject import NUMBERS, BackendCase, BackendSubject, backend_promise
from skyrl_engine.testing.promise import Broken, Promise


@frozen
class _Lesson:
    """A set of adapters, the seed that it begins with, and the documents of each call of each of its steps."""

    name: str
    lora: LoraConfig
    seed: int
    steps: tuple[tuple[tuple[int, ...], ...], ...]


BASE = _Lesson("the product that has further sets", LoraConfig(rank=1), 11, ((NUMBERS,), (NUMBERS[1:],)))
FIRST = _Lesson(
    "a set of rank 3 with dropout", LoraConfig(rank=3, dropout=0.2), 5, ((NUMBERS[:4], NUMBERS[4:]), (NUMBERS[2:],), (NUMBERS,))
)
SECOND = _Lesson(
    "a set of rank 2 on two kinds of layers",
    LoraConfig(rank=2, alpha=9, targets=("q_proj", "down_proj")),
    7,
    ((NUMBERS,), (NUMBERS[3:], NUMBERS[:3])),
)


@define
class _LessonResults:
    """The losses and gradient norms of a lesson, in order, and the weights at its end."""

    numbers: list[tuple[str, float]] = field(factory=list)
    weights: Arrays = field(factory=dict)


def _take_lesson(ranks: BackendRanks, case: BackendCase, lesson: _Lesson, results: _LessonResults) -> Iterator[None]:
    """Take a lesson, and pause after every call."""
    for number, calls in enumerate(lesson.steps, start=1):
        for documents in calls:
            outputs = ranks.forward_backward(PassOrder(case.cut(documents)))
            results.numbers.append((f"the objective of a call of step {number}", ranks.loss(outputs)))
            yield
        results.numbers.append((f"the gradient norm of step {number}", ranks.optim_step()[0].grad_norm))
        yield
    results.weights = ranks.weights()[0]


def _choose_lessons(subject: BackendSubject, case: BackendCase) -> tuple[Model | None, tuple[_Lesson, _Lesson, _Lesson]]:
    """Return the model and what it is taught: with dropout of its own and of adapters, or without for a backend that refuses it."""
    try:
        with subject.open_ranks(case, "dropout", optimizer=SPEC, lora=FIRST.lora):
            return "dropout", (BASE, FIRST, SECOND)
    except UnsupportedError:
        return None, (BASE, evolve(FIRST, name="a set of rank 3", lora=evolve(FIRST.lora, dropout=0.0)), SECOND)


def _learn_alone(subject: BackendSubject, case: BackendCase, model: Model | None, lesson: _Lesson) -> _LessonResults:
    results = _LessonResults()
    with subject.open_ranks(case, model, optimizer=SPEC, lora=lesson.lora, seed=lesson.seed) as ranks:
        for _ in _take_lesson(ranks, case, lesson, results):
            pass
    return results


def _learn_together(
    subject: BackendSubject, case: BackendCase, model: Model | None, taught: tuple[_Lesson, _Lesson, _Lesson]
) -> list[_LessonResults]:
    """Take three lessons in turns; the last set is added late, saved and loaded in between, and freed before the others are done."""
    of_base, of_first, of_second = taught
    results = [_LessonResults() for _ in range(3)]
    with (
        tempfile.TemporaryDirectory(prefix="skyrl-engine-adapter-sets-") as directory,
        subject.open_ranks(case, model, optimizer=SPEC, lora=of_base.lora, seed=of_base.seed) as base,
        base.adapter_set(of_first.lora, of_first.seed) as first,
    ):
        lessons = [_take_lesson(base, case, of_base, results[0]), _take_lesson(first, case, of_first, results[1])]
        # a gradient of the first set is accumulated when the second one comes
        next(lessons[1])
        with base.adapter_set(of_second.lora, of_second.seed) as second:
            turns = _take_lesson(second, case, of_second, results[2])
            next(turns)
            next(turns)
            second.save(Path(directory))
            for lesson in lessons:
                next(lesson)
            second.load(Path(directory))
            for _ in turns:
                next(lessons[1], None)
        for lesson in lessons:
            for _ in lesson:
                pass
    return results


def _exempt_without_adapter_sets(subject: BackendSubject) -> str | None:
    if find_spec("peft") is None:
        return "peft is not installed"
    return None if subject.declares("adapter_sets") else "the backend does not declare 'adapter_sets'"


@backend_promise(
    "Sets of adapters over one base model, of other ranks, layers and seeds, learn in turns bit for bit what each learns alone",
    exempt=_exempt_without_adapter_sets,
)
def adapter_sets(subject: BackendSubject, case: BackendCase) -> None:
    if "adapter_sets" not in subject.describe(case.sizes.options, case.sizes.ranks).capabilities:
        return
    model, taught = _choose_lessons(subject, case)
    together = _learn_together(subject, case, model, taught)
    for lesson, got in zip(taught, together, strict=True):
        due = _learn_alone(subject, case, model, lesson)
        for (what, one), (_, other) in zip(got.numbers, due.numbers, strict=True):
            if one != other:
                raise Broken(
                    f"of {lesson.name}, {what} is {one!r} beside other sets, and {other!r} alone",
                    "Share frozen weights and nothing else: gradients, moments, step counts and random states are a set's own",
                )
        remedy = "Step the adapters of a set with its own moments and step count"
        require_same_weights(got.weights, due.weights, f"of {lesson.name}", remedy)


ADAPTER_SET_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (adapter_sets,)
