"""Promises of a backend about options that change speed alone: compiled layers, and the attention kernel."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from skyrl_engine.contracts.values.outputs import RankOutput
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.testing.backends.held_backend import Arrays, PassOrder
from skyrl_engine.testing.backends.ranks import BackendRanks
from skyrl_engine.testing.backends.subject import (
    NUMBERS,
    BackendCase,
    BackendSubject,
    backend_promise,
    exempt_with,
    exempt_without,
    is_right_loss,
    require_words,
)
from skyrl_engine.testing.promise import Broken, Promise, Undecidable

TOLERANCE = 1e-5
"""Largest difference of a compiled pass relative to the largest entry: float32 sums of some thousand products, taken in another order."""


def _not_compiled(subject: BackendSubject) -> str | None:
    from skyrl_engine.modeling.compiling import refuse_without_compiler

    if not subject.declares("compile"):
        return "the backend does not declare 'compile'"
    try:
        refuse_without_compiler(subject.device)
    except UnsupportedError as error:
        return f"NOT PROVED HERE: {error.cause}"
    return None


@backend_promise(
    "With model.compile, loss, scores and gradients are those without, up to rounding, and both passes score with the same bits",
    layouts="one rank",
    exempt=_not_compiled,
)
def compiled(subject: BackendSubject, case: BackendCase) -> None:
    compare_compiled(subject, case, rows="packed" if subject.declares("packed") else "padded")


def compare_compiled(
    subject: BackendSubject,
    case: BackendCase,
    *,
    rows: RowKind = "packed",
    needs: tuple[str, ...] = ("logprobs", "entropy"),
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """Raise Broken where a model with these options computes something else compiled, beyond `tolerance` relative to the largest entry.

    Micro-batches have other lengths than each other, so one program must serve several.
    """
    order = PassOrder(case.cut(micro_batches=2), rows=rows, needs=needs)
    results = []
    for compile_layers in (False, True):
        with subject.open_ranks(case, rows=rows, compile=compile_layers, **options) as ranks:
            scored = ranks.forward(order)
            learned = ranks.forward_backward(order)
            results.append((_scores_of(ranks, learned), ranks.gradients()[0]))
            if (name := _first_other_bits(scored, learned)) is not None:
                if not compile_layers:
                    raise Undecidable(f"forward gives other {name} than forward_backward without compiled layers")
                raise Broken(
                    f"compiled, forward gives other {name} than forward_backward of the same weights",
                    "Score by the program of training: the first importance ratio must be 1",
                )
    (scores, gradients), (own_scores, own_gradients) = results
    for what, due, got in (("scores", scores, own_scores), ("gradients", gradients, own_gradients)):
        _require_equal(what, due, got, tolerance)


def _scores_of(ranks: BackendRanks, outputs: Sequence[RankOutput]) -> Arrays:
    return {"loss": np.array(ranks.loss(outputs)), **{name: values.values for name, values in outputs[0].fields.items()}}


def _first_other_bits(scored: Sequence[RankOutput], learned: Sequence[RankOutput]) -> str | None:
    one, other = scored[0].fields, learned[0].fields
    return next((name for name in other if name not in one or not np.array_equal(one[name].values, other[name].values)), None)


def _require_equal(what: str, due: Arrays, got: Arrays, tolerance: float) -> None:
    """Raise Broken for an array that is further from the due one than `tolerance` of the largest entry of all of them."""
    if due.keys() != got.keys():
        raise Broken(f"compiled, the {what} have the names {sorted(got)[:3]}, not {sorted(due)[:3]}", "Compile in place")
    largest = max(float(np.abs(values).max(initial=0)) for values in due.values())
    for name, values in due.items():
        difference = float(np.abs(got[name] - values).max(initial=0))
        if not difference <= tolerance * largest:
            raise Broken(
                f"compiled, the {what} differ by {difference / largest:.1e} of the largest entry, of {name} first",
                "Compile layers as they are, with the weights that the backend trains",
            )


@backend_promise("A model that is to be compiled, which it does not declare, is refused in words", exempt=exempt_with("compile"))
def undeclared_compile(subject: BackendSubject, case: BackendCase) -> None:
    try:
        with subject.open_ranks(case, compile=True) as ranks:
            ranks.forward(case.whole())
    except EngineError as error:
        require_words(error)
        return
    raise Broken(
        "ignores model.compile, which it does not declare", "Compile and declare 'compile', or raise UnsupportedError in setup"
    )


@backend_promise(
    'It attends right by the kernel "sdpa", and refuses on the CPU, in words, a kernel of CUDA devices',
    exempt=exempt_without("attention"),
)
def attention(subject: BackendSubject, case: BackendCase) -> None:
    rows: RowKind = "packed" if subject.declares("packed") else "padded"
    with subject.open_ranks(case, rows=rows, attention="sdpa") as ranks:
        got = ranks.loss(ranks.forward(PassOrder(case.cut(micro_batches=2), rows=rows)))
    if not is_right_loss(subject, case, got):
        due = subject.bench.definition(case.model, NUMBERS).loss
        raise Broken(
            f'by the kernel "sdpa" the objective is {got:.6g}, where transformers\' own model gives {due:.6g}', "Attend causally"
        )
    for kernel in ("flash", "flex"):
        try:
            with subject.open_ranks(case, rows=rows, attention=kernel, dtype="bfloat16"):
                pass
        except EngineError as error:
            require_words(error)
            continue
        raise Broken(
            f'takes model.attention = "{kernel}" on the CPU, where that kernel does not train',
            "Call skyrl_engine.modeling.device_check.refuse_on_device in setup",
        )


@backend_promise("An attention kernel, which it does not declare to choose, is refused in words", exempt=exempt_with("attention"))
def undeclared_attention(subject: BackendSubject, case: BackendCase) -> None:
    try:
        with subject.open_ranks(case, attention="sdpa") as ranks:
            ranks.forward(case.whole())
    except EngineError as error:
        require_words(error)
        return
    raise Broken(
        "ignores model.attention, which it does not declare",
        "Attend by it and declare 'attention', or raise UnsupportedError in setup",
    )


SPEED_PROMISES: tuple[Promise[BackendSubject, BackendCase], ...] = (compiled, undeclared_compile, attention, undeclared_attention)
